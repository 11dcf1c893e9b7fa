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
    ROUNDS,
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


class ModuleWithRateByRound(ClassifierClient):
    """Its learning rate is halved every second round."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "epoch", "frequency": 2}]


class ModuleWithRateByStep(ClassifierClient):
    """Its learning rate falls linearly to zero, over a client's steps of all rounds."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        total_steps = self.trainer.estimated_stepping_batches
        steps_per_epoch = len(self.trainer.train_dataloader)
        assert self.trainer.num_training_batches == steps_per_epoch <= total_steps

        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: max(0.0, 1 - step / total_steps)
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ModuleWithDropout(ClassifierClient):
    """Draws random numbers in every step."""

    def forward(self, x):
        return super().forward(torch.nn.functional.dropout(x, 0.3, self.training))


#: The client, and the number of its classes if it lacks the last ones.
OSAKA = 2
CLASSES_AT_OSAKA = 7


def make_module_of(module_class):
    torch.manual_seed(7)
    return module_class("mlp", num_classes=10, input_shape=(1, 8, 8))


def make_fedavg_loop(**options):
    return make_shapfed_loop(**{"aggregator": FedAvg(), "metrics": {}, **options})


def make_ditto_loop():
    """Make a loop whose clients have a second model, and are asked for losses and scores."""
    return make_fedavg_loop(
        metrics={"cost": CommunicationCost()},
        client_algorithm=Ditto(0.3, 0.05),
        sampler=PowerOfChoice(2, 3),
        evaluation=ClientEvaluation(every=2),
    )


def make_shadow_loop(**options):
    return make_fedavg_loop(
        metrics={"shadow": ShadowShapley(coalitions="singles", performance="negative_loss")},
        **options,
    )


def make_evaluation_loop():
    metrics = {
        "shadow": ShadowShapley(coalitions="singles", evaluators="clients"),
        "partial": PartialFederatedShapley(evaluators="clients"),
    }
    return make_fedavg_loop(metrics=metrics)


def make_in_run_and_shadow_loop():
    metrics = {"in_run": InRunShapley(), "shadow": ShadowShapley(coalitions="singles")}
    return make_fedavg_loop(metrics=metrics, client_algorithm=InRunValues(2))


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
        {"make_module": partial(make_module_of, ModuleWithRateByRound), "rounds": 3},
    ),
    "a schedule by a client's own steps": (
        partial(make_shapfed_loop, sampler=UniformSampler(2)),
        {"make_module": partial(make_module_of, ModuleWithRateByStep)},
    ),
    "equally many steps": (
        partial(make_shapfed_loop, local_epochs="5 steps"),
        {"make_module": partial(make_module_of, ModuleWithRateByStep)},
    ),
    "dropout": (
        partial(make_fedavg_loop, local_epochs=2),
        {"make_module": partial(make_module_of, ModuleWithDropout)},
    ),
    "local heads": (partial(make_fedavg_loop, share=["!head"]), {}),
    "scaffold": (
        partial(make_shapfed_loop, aggregator=FedAvg("uniform"), client_algorithm=SCAFFOLD()),
        {},
    ),
    "Ditto": (make_ditto_loop, SPLITS),
}
NUM_TRAINING_SAMPLES = 480
VALIDATION_SHARE = 0.1


def fit_sites_and_one_process(tmp_path, make, rounds=ROUNDS, **options):
    """Fit a federation of sites, and the same one in one process."""
    in_process = SitesInProcess(tmp_path / "sites", make, **options)
    remote = in_process.fit(rounds, server_data=ServerData())
    local = fit_in_one_process(tmp_path / "one", make, rounds=rounds, **options)
    return remote, local


def assert_same_uploads_and_client_states(folder, remote, local):
    bytes_of_sites = remote.channel.bytes(range(3), "up").tolist()
    assert bytes_of_sites == local.channel.bytes(range(3), "up").tolist()

    for client, expected_tensors in client_tensors(local).items():
        last_state = load_site_states(folder, NAMES[client])[-1]
        tensors = last_state["store"]["tensors"]
        assert tensors.keys() == expected_tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected_tensors[name])


def assert_sites_equal_one_process(tmp_path, make, **options):
    """Compare results, uploads and what clients keep. Return the loops of the sites and of one process."""
    remote, local = fit_sites_and_one_process(tmp_path, make, **options)
    assert_same_runs(remote, local)
    assert_same_uploads_and_client_states(tmp_path / "sites", remote, local)
    return remote, local


@pytest.mark.by_turn
@pytest.mark.fast_rows("a schedule by a client's own steps")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*one after the other")
def test_federation_of_sites_equals_one_process(tmp_path, case):
    make, options = CASES[case]
    remote, _ = assert_sites_equal_one_process(tmp_path, make, **options)

    for values in remote.contribution_metrics.contributions.values():
        assert values.isfinite().any()
    (record,) = (tmp_path / "sites").rglob("run.json")
    assert json.loads(record.read_text())["validation"] == {
        "of": "the server's own data",
        "rows": VALIDATION_SHARE * NUM_TRAINING_SAMPLES,
        "trained_on": None,  # not compared
    }


EPOCHS = (2, 1, 3)


def make_sites_with_own_epochs(folder):
    make = partial(make_shapfed_loop, local_epochs=dict(zip(NAMES, EPOCHS)))
    return SitesInProcess(folder, make, make_momentum_module)


@pytest.mark.slow
def test_sites_train_their_own_number_of_epochs(tmp_path):
    remote = make_sites_with_own_epochs(tmp_path / "sites").fit(server_data=ServerData())
    # In one process clients have ids in place of names.
    make = partial(make_shapfed_loop, local_epochs=dict(enumerate(EPOCHS)))
    local = fit_in_one_process(tmp_path / "one", make, make_momentum_module)

    assert_same_runs(remote, local)


def test_site_with_another_number_of_epochs_than_the_server_is_refused(tmp_path):
    remote = make_sites_with_own_epochs(tmp_path)
    remote.make_loop = make_shapfed_loop
    with refused("differ in 'training': .*local_epochs=.*'Boston': 2"):
        remote.fit()


@pytest.mark.by_turn
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
        (make_in_run_and_shadow_loop, {"make_module": make_momentum_module}),
    ],
)
def test_values_of_coalitions_at_sites_equal_those_of_one_process(tmp_path, make, options):
    remote, local = fit_sites_and_one_process(tmp_path, make, **options)

    assert torch.equal(remote.state.model(), local.state.model())
    for name, values in local.contributions.items():
        torch.testing.assert_close(remote.contributions[name], values, rtol=1e-5, atol=1e-6)


def make_coalitions_loop(coalitions):
    metric = ShadowShapley(coalitions=coalitions, performance="negative_loss")
    return make_fedavg_loop(metrics={"shadow": metric}, aggregator=FedAdam(0.02))


def halves_of_first_updates(folder):
    """Return the coalitions of the metric, as they follow from the models after a first round."""
    make = partial(make_fedavg_loop, evaluation=ClientEvaluation(keep_trained=True))
    first_round = fit_in_one_process(folder, make, rounds=1)
    clients = range(len(NAMES))
    first_models = torch.stack([first_round.trained[client] for client in clients])
    halves = choose_halvings(first_models, NAMES, 1, logits=False)
    return [[client] for client in clients] + members_of(halves)


@pytest.mark.slow
def test_halves_at_sites_are_those_of_first_updates(tmp_path):
    sites_in_process = SitesInProcess(tmp_path / "sites", partial(make_coalitions_loop, "halves"))
    remote = sites_in_process.fit(server_data=ServerData())
    coalitions = halves_of_first_updates(tmp_path / "first")
    local = fit_in_one_process(tmp_path / "one", partial(make_coalitions_loop, coalitions))

    assert torch.equal(remote.state.model(), local.state.model())
    values = remote.contributions["shadow"]
    torch.testing.assert_close(values, local.contributions["shadow"], rtol=1e-5, atol=1e-6)


class CallbackThatChangesWeights(L.Callback):
    """Changes the module's weights after a round."""

    def __init__(self, round_index):
        self.round_index = round_index

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == self.round_index:
            with torch.no_grad():
                next(pl_module.parameters()).mul_(1.01)


@pytest.mark.slow
def test_hook_that_changes_weights_after_round_0_is_refused(tmp_path):
    remote = SitesInProcess(tmp_path, make_shadow_loop)
    callback = CallbackThatChangesWeights(round_index=0)
    with (
        refused("weights or buffers have changed before round 2"),
        warns("round 2 is discarded"),
    ):
        remote.fit(rounds=2, server_data=ServerData(), callbacks=[callback])


@pytest.mark.slow
def test_hook_that_changes_weights_later_is_warned_about_and_recorded(tmp_path):
    remote = SitesInProcess(tmp_path, make_shadow_loop)
    callback = CallbackThatChangesWeights(round_index=1)
    message = "weights or buffers have changed before round 3"
    with warns(message):
        loop = remote.fit(rounds=3, server_data=ServerData(), callbacks=[callback])

    assert loop.contributions["shadow"].isfinite().all()
    record = json.loads((tmp_path / "run.json").read_text())
    assert any(message in event["text"] for event in record["events"])


class LyonThatSendsTheGlobalModel:
    """Trains in the federation's run, and sends in the runs of coalitions the last global model that it was sent."""

    def __init__(self, monkeypatch):
        self.run_of_the_federation: str | None = None
        self.global_model: torch.Tensor | None = None
        self.end_honest_training = SiteTraining._end_training
        monkeypatch.setattr(
            SiteTraining, "_end_training", lambda training: self.end_training(training)
        )

    def end_training(self, training):
        self.end_honest_training(training)
        instruction = training._instruction
        if instruction.client_id != 1:
            return

        run = training._packet.plain["run"]
        is_first_run = self.run_of_the_federation is None
        if is_first_run:
            self.run_of_the_federation = run
        if run == self.run_of_the_federation:
            self.global_model = instruction.start
            return

        assert training.update is not None
        assert self.global_model is not None
        training.update = replace(training.update, vector=self.global_model.clone())


@pytest.mark.slow
def test_site_that_sends_the_global_model_as_its_own_is_recorded(tmp_path, monkeypatch):
    LyonThatSendsTheGlobalModel(monkeypatch)

    loop = SitesInProcess(tmp_path, make_shadow_loop).fit(server_data=ServerData())

    events = {(event.client, event.what) for event in loop.events}
    events_on_own_models = {event for event in events if "its own model is" in event[1]}
    assert events_on_own_models == {
        (1, "its own model is not its first update"),
        (1, "its own model is the federation's"),
    }


def labels_of_digits():
    return torch.tensor([int(label) for _image, label in load_image_data("digits").train])


@pytest.fixture
def osaka_has_one_class(monkeypatch):
    """Deal all zeros to Osaka, and the other digits to Boston and Lyon."""
    labels = labels_of_digits()
    boston_or_lyon = torch.arange(len(labels)) % 2
    owners = boston_or_lyon.where(labels != 0, OSAKA).tolist()
    monkeypatch.setattr(sites, "site_of_each_digit", lambda: owners)


@pytest.mark.slow
@pytest.mark.usefixtures("osaka_has_one_class")
def test_site_with_one_class_is_named_before_training_if_a_score_needs_two(tmp_path):
    metric = PartialFederatedShapley(performance="auroc", evaluators="clients")
    make = partial(make_fedavg_loop, metrics={"m": metric})
    # So many samples are held out that each class has five.
    remote = SitesInProcess(tmp_path, make, client_val=0.6)

    with refused(r"clients \[2\] do not score models\. site 'Osaka' .* with an error; the"):
        remote.fit(rounds=1)


@pytest.fixture
def osaka_lacks_the_last_classes(monkeypatch):
    """Deal all digits of the last classes to other sites than Osaka."""
    owners = torch.tensor(site_of_each_digit())
    is_to_move = (owners == OSAKA) & (labels_of_digits() >= CLASSES_AT_OSAKA)
    dealt = owners.masked_fill(is_to_move, 0).tolist()
    monkeypatch.setattr(sites, "site_of_each_digit", lambda: dealt)


def make_in_run_loop():
    return make_fedavg_loop(
        metrics={"in_run": InRunShapley()}, client_algorithm=InRunValues(2), local_epochs=2
    )


@pytest.mark.slow
@pytest.mark.usefixtures("osaka_lacks_the_last_classes")
def test_in_run_values_of_a_site_that_lacks_classes_are_0_for_them(tmp_path):
    loop, _ = assert_sites_equal_one_process(
        tmp_path, make_in_run_loop, make_module=make_momentum_module
    )
    values = loop.values["in_run"].by_class

    num_classes = 10
    assert values.shape == (3, num_classes + 1)
    assert (values[OSAKA, CLASSES_AT_OSAKA:num_classes] == 0).all()
    assert values[:, :CLASSES_AT_OSAKA].abs().min() > 0


@pytest.mark.slow
@pytest.mark.usefixtures("osaka_lacks_the_last_classes")
def test_site_that_lacks_classes_scores_models_of_more_classes(tmp_path):
    make = partial(make_fedavg_loop, metrics={"fedce": ContributionEstimation()})
    loop, _ = assert_sites_equal_one_process(tmp_path, make, **SPLITS)
    assert loop.contributions["fedce"].isfinite().all()


def test_site_with_more_classes_than_the_server_fails(tmp_path):
    reply = make_site(tmp_path, 0, make_in_run_loop).respond(training_packet(classes=7))

    assert reply.kind == "failed"
    assert reply.plain["error"].startswith("it failed with an error; the site's own log")


def make_pfedsv_loop():
    return make_fedavg_loop(
        metrics={"relevance": DomainRelevance()},
        personalizer=PFedSV("relevance", k=2),
        evaluation=ClientEvaluation(every=2),
    )


@pytest.mark.slow
def test_personal_models_known_only_to_their_sites_are_evaluated_there(tmp_path):
    remote, local = assert_sites_equal_one_process(tmp_path, make_pfedsv_loop, **SPLITS)

    assert sorted(local.received()) == [0, 1, 2]
    assert remote.received() == {}


def test_personal_models_that_the_server_makes_are_received(tmp_path):
    make = partial(make_shapfed_loop, personalizer=ShapFedPersonalizer("cssv"))

    loop = SitesInProcess(tmp_path, make).fit(rounds=1)

    assert sorted(loop.received()) == [0, 1, 2]
