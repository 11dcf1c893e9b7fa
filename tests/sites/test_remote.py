"""A federation of three sites, each of which has its own data, module and Trainer, gives what one process gives."""

import json
from dataclasses import replace
from functools import partial

import lightning as L
import pytest
import torch

from flsv import ClassifierClient, ClientEvaluation
from flsv.aggregation import FedAdam, FedAvg
from flsv.contrib import InRunShapley, InRunValues
from flsv.data import load_image_data
from flsv.functional import choose_halvings
from flsv.games.members import members_of
from flsv.metrics import (
    CommunicationCost,
    ContributionEstimation,
    DomainRelevance,
    PartialFederatedShapley,
    ShadowShapley,
)
from flsv.personalization import PFedSV, ShapFedPersonalizer
from flsv.sampling import PowerOfChoice, UniformSampler
from flsv.sites.site_training import SiteTraining
from flsv.training.algorithms import SCAFFOLD, Ditto
from flsv.uploads import TopK
from helpers import refused, sites, warns
from helpers.fits import client_tensors
from helpers.sites import (
    NAMES,
    SPLITS,
    ServerData,
    SitesInProcess,
    assert_same_runs,
    fit_in_one_process,
    load_site_states,
    make_momentum_module,
    make_shapfed_loop,
    make_site,
    site_of_each_digit,
    training_packet,
)


class Scheduled(ClassifierClient):
    """A rate that falls with the rounds."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "epoch", "frequency": 2}]


class Decaying(ClassifierClient):
    """Ends at zero after the last of a client's steps."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        total = self.trainer.estimated_stepping_batches

        assert self.trainer.num_training_batches == len(self.trainer.train_dataloader) <= total

        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: max(0.0, 1 - step / total)
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Dropping(ClassifierClient):
    """Draws random numbers in every step."""

    def forward(self, x):
        return super().forward(torch.nn.functional.dropout(x, 0.3, self.training))


OSAKA = 2  # the client
CLASSES_AT_OSAKA = 7


def make_module_of(kind):
    torch.manual_seed(7)
    return kind("mlp", num_classes=10, input_shape=(1, 8, 8))


def make_fedavg_loop(**options):
    return make_shapfed_loop(**{"aggregator": FedAvg(), "metrics": {}, **options})


def make_second_model_loop():
    """Make a loop whose clients are asked about candidate models."""
    options = {"sampler": PowerOfChoice(2, 3), "evaluation": ClientEvaluation(every=2)}
    return make_fedavg_loop(
        metrics={"cost": CommunicationCost()}, client_algorithm=Ditto(0.3, 0.05), **options
    )


def make_shadow_loop(**options):
    return make_fedavg_loop(
        metrics={"shadow": ShadowShapley(performance="negative_loss")}, **options
    )


def make_evaluation_loop():
    metrics = {}
    for kind in (ShadowShapley, PartialFederatedShapley):
        metrics[kind.__name__] = kind(evaluators="clients")
    return make_fedavg_loop(metrics=metrics)


#: Loops, and what else the federation has.
CASES = {
    "kept momentum, two of three": (
        partial(
            make_shapfed_loop, optimizer_state="persist", sampler=UniformSampler(2), local_epochs=2
        ),
        {"make_module": make_momentum_module},
    ),
    "a schedule by rounds": (
        make_shapfed_loop,
        {"make_module": partial(make_module_of, Scheduled)},
    ),
    "a schedule by a client's own steps": (
        partial(make_shapfed_loop, sampler=UniformSampler(2)),
        {"make_module": partial(make_module_of, Decaying)},
    ),
    "equally many steps": (
        partial(make_shapfed_loop, local_epochs="5 steps"),
        {"make_module": partial(make_module_of, Decaying)},
    ),
    "dropout": (
        partial(make_fedavg_loop, local_epochs=2),
        {"make_module": partial(make_module_of, Dropping)},
    ),
    "local heads": (partial(make_fedavg_loop, share=["!head"]), {}),
    "scaffold": (
        partial(make_shapfed_loop, aggregator=FedAvg("uniform"), client_algorithm=SCAFFOLD()),
        {},
    ),
    "Ditto": (make_second_model_loop, SPLITS),
}


@pytest.mark.fast_rows("a schedule by a client's own steps")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*one after the other")
def test_federation_of_sites_equals_one_process(tmp_path, case):
    make, data_options = CASES[case]
    remote, _ = check_that_sites_equal_one_process(tmp_path, make, **data_options)

    for values in remote.contribution_metrics.contributions.values():
        assert values.isfinite().any()

    (record,) = (tmp_path / "b").rglob("run.json")
    assert json.loads(record.read_text())["validation"] == {
        "of": "the server's own data",
        "rows": 48,  # a tenth of the 480 samples in all
    }


@pytest.mark.slow
def test_sites_know_their_own_number_of_passes(tmp_path):
    """In a simulation clients are called by their numbers. A site of other settings is left out."""
    passes = (2, 1, 3)
    remote = SitesInProcess(
        tmp_path / "b",
        partial(make_shapfed_loop, local_epochs=dict(zip(NAMES, passes))),
        make_momentum_module,
    )
    local = fit_in_one_process(
        tmp_path / "a",
        partial(make_shapfed_loop, local_epochs=dict(enumerate(passes))),
        make_momentum_module,
    )

    assert_same_runs(remote.fit(server_data=ServerData()), local)

    remote.make = make_shapfed_loop
    with refused("differ in training: .*local_epochs=.*'Boston': 2"):
        remote.fit()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (partial(make_shadow_loop, aggregator=FedAdam(0.02), client_algorithm=SCAFFOLD()), {}),
        (
            partial(
                make_shadow_loop,
                optimizer_state="persist",
                uploads=[TopK(0.1)],
                sampler=UniformSampler(2),
            ),
            {"make_module": make_momentum_module},
        ),
        (make_evaluation_loop, {"client_val": 0.4}),
    ],
)
def test_values_of_coalitions_at_sites_equal_those_of_one_process(tmp_path, make, options):
    """Sites train coalitions as runs of their own, one process in fits of their own."""
    remote = SitesInProcess(tmp_path / "b", make, **options).fit(server_data=ServerData())
    local = fit_in_one_process(tmp_path / "a", make, **options)
    assert torch.equal(remote.state.model(), local.state.model())
    for name, values in local.contributions.items():
        torch.testing.assert_close(remote.contributions[name], values, rtol=1e-5, atol=1e-6)


def make_coalitions_loop(coalitions, **options):
    metric = ShadowShapley(coalitions=coalitions, performance="negative_loss")
    return make_fedavg_loop(metrics={"shadow": metric}, **options)


@pytest.mark.slow
def test_halves_at_sites_are_those_of_first_updates(tmp_path):
    aggregator = FedAdam(0.02)
    make = partial(make_coalitions_loop, "halves", aggregator=aggregator)
    remote = SitesInProcess(tmp_path / "b", make).fit(server_data=ServerData())
    first_round = fit_in_one_process(
        tmp_path / "a",
        partial(make_fedavg_loop, evaluation=ClientEvaluation(keep_trained=True)),
        rounds=1,
    )
    first_models = [first_round.trained[client] for client in range(len(NAMES))]
    halves = choose_halvings(
        torch.stack(first_models),
        NAMES,
        1,
        logits=False,
    )
    coalitions = [[client] for client in range(len(NAMES))]
    coalitions += members_of(halves)

    local = fit_in_one_process(
        tmp_path / "c",
        partial(make_coalitions_loop, coalitions, aggregator=aggregator),
    )

    assert torch.equal(remote.state.model(), local.state.model())
    torch.testing.assert_close(
        remote.contributions["shadow"],
        local.contributions["shadow"],
        rtol=1e-5,
        atol=1e-6,
    )


class ChangesWeights(L.Callback):
    """Changes the module's weights after a round."""

    def __init__(self, round_index):
        self.round_index = round_index

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == self.round_index:
            with torch.no_grad():
                next(pl_module.parameters()).mul_(1.01)


@pytest.mark.slow
def test_weights_that_a_hook_changes_are_refused_at_first_and_told_later(tmp_path):
    words = "weights or buffers have changed before round"
    at_once = SitesInProcess(tmp_path / "a", make_shadow_loop)
    with (
        refused(f"{words} 2"),
        warns("round 2 is discarded"),
    ):
        at_once.fit(3, server_data=ServerData(), callbacks=[ChangesWeights(0)])

    later = SitesInProcess(tmp_path / "b", make_shadow_loop)
    with warns(f"{words} 3"):
        loop = later.fit(3, server_data=ServerData(), callbacks=[ChangesWeights(1)])

    assert loop.contributions["shadow"].isfinite().all()
    record = json.loads((tmp_path / "b" / "run.json").read_text())
    assert any(f"{words} 3" in event["text"] for event in record["events"])


class LyonThatSendsTheGlobalModel:
    """Trains in the federation's run, and sends in the runs of coalitions the last global model that it was sent."""

    def __init__(self, monkeypatch):
        self.run_of_the_federation: str | None = None
        self.global_model: torch.Tensor | None = None
        self.end_honest_training = SiteTraining._end_training
        monkeypatch.setattr(
            SiteTraining, "_end_training", lambda training: self.end_training(training)
        )

    def end_training(self, visit):
        self.end_honest_training(visit)
        instruction = visit._instruction
        if instruction.client_id != 1:
            return

        run = visit._packet.plain["run"]
        if self.run_of_the_federation is None:
            self.run_of_the_federation = run  # it is the first
        if run == self.run_of_the_federation:
            self.global_model = instruction.start
            return

        assert visit.update is not None
        assert self.global_model is not None
        visit.update = replace(visit.update, vector=self.global_model.clone())


@pytest.mark.slow
def test_site_that_sends_the_global_model_as_its_own_is_recorded(tmp_path, monkeypatch):
    LyonThatSendsTheGlobalModel(monkeypatch)

    loop = SitesInProcess(tmp_path, make_shadow_loop).fit(server_data=ServerData())

    complaints = {
        (event.client, event.what) for event in loop.events if "its own model is" in event.what
    }
    assert complaints == {
        (1, "its own model is not its first update"),
        (1, "its own model is the federation's"),
    }


def check_that_sites_equal_one_process(
    tmp_path,
    make,
    **options,
):
    """Equal in what they found, in what crossed, and in what the clients keep."""
    remote = SitesInProcess(tmp_path / "b", make, **options).fit(server_data=ServerData())
    local = fit_in_one_process(tmp_path / "a", make, **options)

    assert_same_runs(remote, local)

    bytes_at_sites = remote.channel.bytes(range(3), "up")
    assert bytes_at_sites.tolist() == local.channel.bytes(range(3), "up").tolist()

    for client, state in client_tensors(local).items():
        last_visit = load_site_states(tmp_path / "b", NAMES[client])[-1]
        tensors = last_visit["store"]["tensors"]
        assert tensors.keys() == state.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, state[name])

    return remote, local


def test_site_with_one_class_is_named_before_training_if_a_score_needs_two(tmp_path, monkeypatch):
    """Its own log says why, and the server only learns where."""
    owners = []
    for index, (_, label) in enumerate(load_image_data("digits").train):
        if int(label) == 0:
            owners.append(OSAKA)
        else:
            owners.append(index % 2)  # Boston and Lyon in turn

    monkeypatch.setattr(sites, "site_of_each_digit", lambda: owners)

    metric = PartialFederatedShapley(performance="auroc", evaluators="clients")
    remote = SitesInProcess(
        tmp_path,
        lambda: make_fedavg_loop(metrics={"m": metric}),
        client_val=0.6,  # five samples of each class and more
    )
    message = r"clients \[2\] do not score models\. site 'Osaka' .* with ConfigurationError at"

    with refused(message):
        remote.fit(rounds=1)


@pytest.fixture
def osaka_lacks_the_last_classes(monkeypatch):
    """Deal all digits of the last classes to other sites than Osaka."""
    train = load_image_data("digits").train
    labels = torch.tensor([int(train[i][1]) for i in range(len(train))])
    owners = torch.tensor(site_of_each_digit())
    dealt = owners.where((owners != OSAKA) | (labels < CLASSES_AT_OSAKA), 0).tolist()
    monkeypatch.setattr(sites, "site_of_each_digit", lambda: dealt)


@pytest.mark.slow
@pytest.mark.usefixtures("osaka_lacks_the_last_classes")
def test_federation_of_sites_that_lack_classes_equals_one_process(tmp_path):
    def in_run():
        metrics = {"in_run": InRunShapley()}
        return make_fedavg_loop(metrics=metrics, client_algorithm=InRunValues(2), local_epochs=2)

    loop, _ = check_that_sites_equal_one_process(
        tmp_path / "in_run", in_run, make_module=make_momentum_module
    )
    values = loop.contributions["in_run"].by_class

    assert values.shape == (3, 11)
    assert values[OSAKA, CLASSES_AT_OSAKA:10].tolist() == [0, 0, 0]
    assert values[:, :CLASSES_AT_OSAKA].abs().min() > 0

    # Models of more classes are evaluated there.
    def fedce():
        return make_fedavg_loop(metrics={"fedce": ContributionEstimation()})

    loop, _ = check_that_sites_equal_one_process(tmp_path / "fedce", fedce, **SPLITS)
    assert loop.contributions["fedce"].isfinite().all()

    # Of less, they are refused.
    reply = make_site(tmp_path, 0, in_run).respond(training_packet(classes=7))

    assert reply.kind == "failed"
    assert reply.plain["error"].startswith("it failed with ConfigurationError at client_manager.py")


def make_pfedsv_loop():
    return make_fedavg_loop(
        metrics={"relevance": DomainRelevance()},
        personalizer=PFedSV("relevance", k=2),
        evaluation=ClientEvaluation(every=2),
    )


@pytest.mark.slow
def test_personal_models_known_only_to_their_sites_are_evaluated_there(tmp_path):
    """Each site has a mixture of its own, which the server does not know."""
    remote, local = check_that_sites_equal_one_process(tmp_path, make_pfedsv_loop, **SPLITS)

    assert sorted(local.received()) == [0, 1, 2]
    assert remote.received() == {}


def test_personal_models_that_the_server_makes_are_received(tmp_path):
    make = partial(make_shapfed_loop, personalizer=ShapFedPersonalizer("cssv"))

    loop = SitesInProcess(tmp_path, make).fit(rounds=1)

    assert sorted(loop.received()) == [0, 1, 2]
