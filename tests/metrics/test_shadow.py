"""ShadowShapley: every coalition's model against a plain loop that trains this coalition alone."""

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from flsv import FederatedLoop, Reporting
from flsv.aggregation import (
    CGSV,
    Bucketing,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedNova,
    GeometricMedian,
    ShapFedWA,
    ShapleySoftmax,
    ShapleyWeighted,
    TrimmedMean,
)
from flsv.attacks import Alignment, ALittleIsEnough, FreeRider, Scaling
from flsv.filters import NormCap, OutlierFilter, SampleCap
from flsv.functional import exact_shapley, few_coalitions
from flsv.metrics import (
    ClassSpecificShapley,
    CosineGradientShapley,
    ShadowShapley,
    SurrogateFederatedShapley,
    WassersteinContribution,
)
from flsv.metrics.coalitions.designs import coalition_masks
from flsv.personalization import Standalone
from flsv.privacy import GaussianPrivacy
from flsv.retraining.retrained_utility import RetrainedUtility
from flsv.retraining.shadow import ShadowTraining
from flsv.sampling import FixedCohort
from flsv.training.algorithms import SCAFFOLD, FedProx
from flsv.training.rows.row_step import RowStep
from flsv.uploads import TopK
from flsv.utilities.errors import ConfigurationError
from helpers import slow_except
from helpers.coalitions_by_hand import (
    ROUNDS,
    SEED,
    Draws,
    KeepsModels,
    Reads,
    Validates,
    by_a_plain_loop,
    data,
    shadow_loop,
)
from helpers.fits import assert_resumes, fit, trainer_for, vector
from helpers.models import Plain, adam, network

EVERYBODY = [[0, 1, 2]] * ROUNDS

#: A module, the loop's options, the cohorts, and the server's weighting and rate.
PLAIN: dict[str, Any] = {
    "Adam": lambda: (Plain(network(batch_norm=False), adam), {}, EVERYBODY, "samples", 1.0),
    "dropout": lambda: (Plain(network(batch_norm=False, dropout=0.4)), {}, EVERYBODY, "samples", 1.0),
    "uniform": lambda: (Plain().double(), {"aggregator": FedAvg("uniform")}, EVERYBODY, "uniform", 1.0),
    "half": lambda: (Plain().double(), {"aggregator": FedAvg(server_lr=0.5)}, EVERYBODY, "samples", 0.5),
}


@pytest.mark.parametrize("name", PLAIN)
def test_shadow_models_equal_a_plain_loop_over_each_coalition(tmp_path: Path, name: str) -> None:
    module, options, cohorts, *server = PLAIN[name]()
    start, federation = copy.deepcopy(module), shadow_loop(**options)
    # Batch norm makes rounding large.
    precision: Any = "64-true" if name in ("uniform", "half") else "32-true"
    trained = fit(federation, tmp_path, module, data(), rounds=ROUNDS, precision=precision)
    models = federation.metrics["shadow"].models
    assert len(models) == 8
    for mask, found in models.items():
        expected = by_a_plain_loop(start, [client for client in range(3) if mask[client]], cohorts, *server)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(models[True, True, True].double(), vector(trained), rtol=0, atol=0)


#: Where each coalition's server does more than to average by samples, or clients more than to train.
FEDERATIONS: dict[str, Any] = {
    "FedAdam": lambda: {"aggregator": FedAdam(lr=0.02)},
    "FedAvgM": lambda: {"aggregator": FedAvgM(momentum=0.5)},
    "FedNova": lambda: {"aggregator": FedNova()},
    "trimmed mean": lambda: {"aggregator": TrimmedMean(0.34)},
    "buckets": lambda: {"aggregator": Bucketing(GeometricMedian())},
    "CGSV": lambda: {"aggregator": CGSV(scale=0.1), "metrics": {"cgsv": CosineGradientShapley()}},
    "ShapFed-WA": lambda: {"aggregator": ShapFedWA("cssv"), "metrics": {"cssv": ClassSpecificShapley()}},
    "by distance to the server's data": lambda: {
        "aggregator": ShapleySoftmax("distance"),
        "metrics": {"distance": WassersteinContribution()},
    },
    "FedProx and FedAdam": lambda: {"client_algorithm": FedProx(0.5), "aggregator": FedAdam(lr=0.02)},
    "error feedback": lambda: {"uploads": [TopK(0.3)]},
    "excluded": lambda: {"uploads": [Scaling(1e4, clients=[1])], "filters": [OutlierFilter(exclude=True)]},
    "attacks": lambda: {  # of which one keeps something between rounds, another in each coalition
        "uploads": [Scaling(2.0, clients=[0]), FreeRider("noise", clients=[1]), Alignment(0.7, clients=[2])]
    },
    "caps": lambda: {"filters": [OutlierFilter(), NormCap(1.0), SampleCap(1.0)]},
}

#: One of each way in which coalitions could come to something else.
FAST = ("FedAdam", "CGSV", "FedProx and FedAdam", "excluded", "attacks")


@pytest.mark.parametrize("name", slow_except(FAST, FEDERATIONS))
def test_shadow_values_equal_those_of_retraining_each_coalition(tmp_path: Path, name: str) -> None:
    module, make = Plain(network(batch_norm=False)), FEDERATIONS[name]
    quiet = Reporting(table=False)

    def alone(cohort: FixedCohort) -> L.Trainer:
        federation = FederatedLoop(**make(), sampler=cohort, seed=SEED, reporting=quiet)
        return trainer_for(federation, tmp_path, rounds=ROUNDS, limit_val_batches=0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        utility = RetrainedUtility(alone, module, data(), "negative_loss")
        expected = exact_shapley(utility, 3).values
        utility.metric = "per_class_accuracy"  # of the same trainings
        classes = exact_shapley(utility, 3).values
        options = make()
        options["metrics"] = {**options.get("metrics", {}), "classes": ShadowShapley(coalitions="all", per_class=True)}
        federation = shadow_loop(ShadowShapley(coalitions="all", performance="negative_loss"), **options)
        fit(federation, tmp_path, module, data(), rounds=ROUNDS)
    values, by_class = federation.contributions["shadow"].double(), federation.contributions["classes"].by_class
    seen = ~values.isnan()  # whom a filter leaves out of every round has none
    assert seen.tolist() == [True, name != "excluded", True]
    torch.testing.assert_close(values[seen], expected[seen], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(by_class[seen].double(), classes[seen], rtol=1e-5, atol=1e-6)
    metric: Any = federation.metrics["shadow"]
    low, high = metric.intervals()
    # No coalition is left open; what untrained models and the last three rounds differ by.
    starts, rounds = metric.starts[:, 0].std() / 3, metric.recent[..., 0].double().var(0).mean()
    half = 1.6448536 * ((0.025 * expected.clamp_min(0).sum()) ** 2 + starts**2 + rounds).sqrt().expand(3)
    torch.testing.assert_close((high - low).double()[seen] / 2, half[seen], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(metric.recent[-1, :, 0].double()[seen], expected[seen], rtol=1e-4, atol=1e-5)
    assert federation.metrics["classes"].intervals() is None


@pytest.mark.parametrize("coalitions", ["pairs+leave-one-out", "auto", [[0], [1, 2]]])
def test_shadow_models_are_the_same_for_any_choice_of_coalitions(tmp_path: Path, coalitions: Any) -> None:
    federation = shadow_loop(KeepsModels(coalitions=coalitions))
    fit(federation, tmp_path, Plain(network(batch_norm=False)), data(), rounds=2)
    whole = shadow_loop(KeepsModels(coalitions="all"))
    fit(whole, tmp_path, Plain(network(batch_norm=False)), data(), rounds=2)
    models, every = federation.metrics["shadow"].models, whole.metrics["shadow"].models
    assert [list(mask) for mask in models] == coalition_masks(coalitions, 3).tolist()
    for mask, model in models.items():
        torch.testing.assert_close(model, every[mask], rtol=1e-5, atol=1e-6)


def test_shadow_shapley_leaves_the_federation_unchanged_to_the_bit(tmp_path: Path) -> None:
    plain = FederatedLoop(seed=SEED, reporting=Reporting(table=False))
    without = fit(plain, tmp_path, Plain(), data())
    beside = fit(shadow_loop(ShadowShapley()), tmp_path, Plain(), data())
    assert torch.equal(vector(beside), vector(without))


@pytest.mark.parametrize("name", slow_except(["CGSV"], ["FedAvg", "CGSV"]))
def test_shadow_shapley_resumes_to_the_bit(tmp_path: Path, name: str) -> None:
    def federation() -> FederatedLoop:
        return shadow_loop(ShadowShapley(), **FEDERATIONS.get(name, dict)())

    whole = assert_resumes(federation, tmp_path, Plain, data)
    rows = whole.state_dict()["coalitions"]["rows"]["rows"]
    assert rows.shape[0] == 6
    assert rows.unique(dim=0).shape[0] == 6


def test_shadow_models_are_counted_as_traffic(tmp_path: Path) -> None:
    federation = shadow_loop(ShadowShapley(coalitions="pairs"))
    fit(federation, tmp_path, Plain(), data(), rounds=1)
    size = federation.space.size
    assert federation.channel.numbers([0], "down").tolist() == [size + 3 * size]
    assert federation.channel.numbers([0], "up").tolist() == [size + 3 * (size + 1)]


def test_a_model_that_diverges_keeps_its_client_out_of_the_coalition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays what it was, and the run goes on, as a federation whose only client sends nothing finite would."""

    class Breaks(ShadowTraining):
        def end_client(self, context: Any) -> Any:
            models = super().end_client(context)["trained_coalition_models"].clone()
            if context.instruction.client_id == 1:
                models[:, 0] = 0
            return {"trained_coalition_models": models}

    federation, module = shadow_loop(KeepsModels(coalitions="all")), Plain(network(batch_norm=False))
    monkeypatch.setattr("flsv.retraining.coalition_plan.ShadowTraining", Breaks)
    monkeypatch.setattr("flsv.retraining.coalition_plan.CoalitionPlan._prove", lambda *_: None)
    start = copy.deepcopy(module)
    fit(federation, tmp_path, module, data(), rounds=2)
    models = federation.metrics["shadow"].models
    torch.testing.assert_close(models[False, True, False].double(), vector(start), rtol=0, atol=0)
    expected = by_a_plain_loop(start, [0], EVERYBODY[:2])
    torch.testing.assert_close(models[True, True, False].double(), expected, rtol=1e-5, atol=1e-5)


def test_shadow_values_are_computed_every_n_rounds_and_at_the_end(tmp_path: Path) -> None:
    whole, some = shadow_loop(ShadowShapley(coalitions="all")), shadow_loop(ShadowShapley(coalitions="all", every=2))
    for each in (whole, some):
        fit(each, tmp_path, Plain(network(batch_norm=False)), data(), rounds=3)
    assert torch.equal(whole.contributions["shadow"], some.contributions["shadow"])
    assert int(some.metrics["shadow"].evaluations) == 2 * 8
    assert int(whole.metrics["shadow"].evaluations) == 3 * 8


@pytest.mark.parametrize(("of", "rounds"), [({}, 12), ({"performance": "val_loss", "mode": "min"}, 4)])
def test_shadow_shapley_by_a_logged_value_evaluates_at_most_five_rounds(of: dict[str, Any], rounds: int) -> None:
    metric = ShadowShapley(num_clients=2, **of)
    metric.check_rounds(12)
    for index in range(12):
        metric.update(torch.arange(2), few_coalitions(2), lambda masks: masks.sum(1).double(), index)
    assert int(metric.evaluations) == 4 * rounds


class Twice(Plain):
    """Steps by something that batched training does not know."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad *= 2


def refused(folder: Path, match: str, module: L.LightningModule | None = None, rounds: int = 1, **options: Any) -> None:
    def attempt() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(shadow_loop(**options), folder, module or Plain(network(batch_norm=False)), data(), rounds)

    with pytest.raises(ConfigurationError, match=match):
        attempt()


REFUSED: dict[str, tuple[str, Any]] = {
    "personalizer": ("gives each client a start point", lambda: {"personalizer": Standalone()}),
    "noise": ("noise would be spent", lambda: {"uploads": [GaussianPrivacy(1.0, 0.1)]}),
    "colluders": ("compare the updates of one cohort", lambda: {"uploads": [ALittleIsEnough(clients=[0, 1])]}),
    "share": ("others stay at the clients", lambda: {"share": ["!net.4.*"]}),
    "two sets": ("different coalitions", lambda: {"metrics": {"other": ShadowShapley(coalitions="singles")}}),
    "no such client": ("names clients", lambda: {"metric": ShadowShapley(coalitions=[[7]])}),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_shadow_shapley_with_an_unsupported_setting_is_refused_before_training(tmp_path: Path, what: str) -> None:
    match, options = REFUSED[what]
    refused(tmp_path, match, **options())


#: What keeps coalitions from being rows, besides the module: a federation that is trained by whole fits.
BY_FITS: dict[str, tuple[str, Any]] = {
    "a game that the aggregator reads": ("evaluate models in every round", lambda: {
        "aggregator": ShapleyWeighted("ssv"), "metrics": {"ssv": SurrogateFederatedShapley()}}),
    "engine": ("clients are rows already", lambda: {"engine": "vmap"}),
    "algorithm": ("client_algorithm=SCAFFOLD", lambda: {
        "client_algorithm": SCAFFOLD(), "module": Plain(network(False), lambda p: torch.optim.SGD(p, lr=0.1))}),
    "reads": ("batched model: vmap", lambda: {"module": Reads(network(batch_norm=False))}),
    "draws": ("draws random numbers by random", lambda: {"module": Draws(network(batch_norm=False))}),
    "validation": ("validation changes 'seen'", lambda: {"module": Validates(network(batch_norm=False))}),
    "hook": ("on_after_backward", lambda: {"module": Twice(network(batch_norm=False))}),
}  # fmt: skip


@pytest.mark.parametrize("what", slow_except(("engine", "reads"), BY_FITS))
def test_coalitions_unfit_for_rows_train_by_fits(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    match, make = BY_FITS[what]
    options = make()
    module = options.pop("module", None) or Plain(network(batch_norm=False))

    def alone(cohort: FixedCohort) -> L.Trainer:
        federation = shadow_loop(**copy.deepcopy(options)).replace(sampler=cohort, metrics=options.get("metrics"))
        return trainer_for(federation, tmp_path, 2)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        utility = RetrainedUtility(alone, module, data(), "negative_loss")
        expected = exact_shapley(utility, 3).values
        federation = shadow_loop(ShadowShapley(performance="negative_loss"), **options)
        with caplog.at_level("INFO", "lightning.pytorch"):
            fit(federation, tmp_path, module, data(), rounds=2)
    found = federation.contributions["shadow"].double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    said = [text for text in caplog.messages if "trained after the run" in text]
    assert len(said) == 1
    assert "costs 3 more fits" in said[0]
    assert re.search(match, said[0])
    assert "bug report" not in said[0]  # torch's advice to its own developers


class Later(Plain):
    """From the second round on a step of rows is another than that of a client."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        other = self.current_epoch > 0 and type(self.net[0].weight) is not torch.nn.Parameter
        return super().training_step(batch, batch_idx) * (2 if other else 1)


class Stops(Plain):
    """From the second round on no rows of one batched model can take its step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if self.current_epoch == 0 or float(loss) < 1e9 else 0 * loss


class Between(Plain):
    """Changes its weights between two rounds."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch == 1 and batch_idx == 0:
            with torch.no_grad():
                self.net[0].weight.mul_(0.5)
        return super().validation_step(batch, batch_idx)


#: Modules whose rows turn out to be none in the second round.
GIVEN_UP = {"model of a coalition differs by": Later, "calling .item": Stops, "have changed between rounds": Between}


def values_by_retraining(folder: Path, module: L.LightningModule, rounds: int, **options: Any) -> torch.Tensor:
    def alone(cohort: FixedCohort) -> L.Trainer:
        federation = shadow_loop(**copy.deepcopy(options)).replace(sampler=cohort, metrics=options.get("metrics"))
        return trainer_for(federation, folder, rounds)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return exact_shapley(RetrainedUtility(alone, module, data(), "negative_loss"), 3).values


@pytest.mark.parametrize("match", GIVEN_UP)
def test_rows_that_differ_during_the_run_are_replaced_by_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, match: str
) -> None:
    """In the midst of training: coalitions are trained by fits when it has ended, and the federation goes on."""
    monkeypatch.setattr("flsv.retraining.coalition_rows.COMPARED", 1)
    module = GIVEN_UP[match](network(batch_norm=False))
    expected = values_by_retraining(tmp_path, module, ROUNDS)
    plain = FederatedLoop(seed=SEED, reporting=Reporting(table=False))
    without = fit(plain, tmp_path, copy.deepcopy(module), data(), ROUNDS)
    federation = shadow_loop(ShadowShapley(performance="negative_loss"))
    with pytest.warns(UserWarning, match=f"trained after the run.*{match}.*Until now they were trained during the run"):
        trained = fit(federation, tmp_path, module, data(), ROUNDS)
    torch.testing.assert_close(federation.contributions["shadow"].double(), expected, rtol=0, atol=1e-6)
    assert torch.equal(vector(trained), vector(without))


def test_rows_that_need_too_much_memory_step_in_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the random numbers and the buffers of all at once, and a line, once."""
    sizes, derive = [], RowStep._derive

    def with_little_memory(self: RowStep, states: Any, batch: Any) -> Any:
        sizes.append(len(next(iter(states.values()))))
        if sizes[-1] > 2:
            torch.rand(3)  # whatever has been drawn until memory ran out
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return derive(self, states, batch)

    def values() -> torch.Tensor:
        federation = shadow_loop(ShadowShapley(performance="negative_loss"))
        fit(federation, tmp_path, Plain(network(dropout=0.3)), data(), rounds=2)
        return federation.contributions["shadow"]

    expected = values()
    monkeypatch.setattr(RowStep, "_derive", with_little_memory)
    with pytest.warns(
        UserWarning, match="a step of 3 coalitions' models at once ran out of memory: from here on 2"
    ) as told:
        found = values()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert sum("ran out of memory" in str(each.message) for each in told) == 1
    assert sizes.count(3) == 1
    assert {1, 2} <= set(sizes)
    monkeypatch.setattr(RowStep, "_derive", lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA out of memory.")))
    torch.testing.assert_close(values(), expected, rtol=1e-4, atol=1e-6)  # by fits of their own


def test_rows_are_proved_by_a_coalition_that_is_trained_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last round, where nothing in between has compared them."""
    monkeypatch.setattr("flsv.retraining.coalition_rows.COMPARED", 10**15)
    module = Later(network(batch_norm=False))
    expected = values_by_retraining(tmp_path, module, ROUNDS)
    federation = shadow_loop(ShadowShapley(performance="negative_loss"))
    with pytest.warns(UserWarning, match="trained after the run.*alone comes to a model that lies"):
        fit(federation, tmp_path, module, data(), ROUNDS)
    torch.testing.assert_close(federation.contributions["shadow"].double(), expected, rtol=0, atol=1e-6)


class Calls(Plain):
    """Trains by a function that holds the module, as a loss with a log may."""

    def __init__(self, net: torch.nn.Module, reads: bool) -> None:
        super().__init__(net)
        self.reads = reads
        self.step = lambda batch: Plain.training_step(self, batch, 0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.step(batch)
        return loss if not self.reads or float(loss) < 1e9 else 0 * loss


@pytest.mark.parametrize("reads", [False, True])
def test_module_with_functions_bound_to_it_trains_its_coalitions(tmp_path: Path, reads: bool) -> None:
    """By rows, and by fits."""
    net = network(batch_norm=False)
    expected = values_by_retraining(tmp_path, Plain(copy.deepcopy(net)), 2)
    federation = shadow_loop(ShadowShapley(performance="negative_loss"))
    fit(federation, tmp_path, Calls(net, reads), data(), rounds=2)
    torch.testing.assert_close(federation.contributions["shadow"].double(), expected, rtol=1e-4, atol=1e-5)


def test_callbacks_that_hold_the_module_act_on_coalitions_models(tmp_path: Path) -> None:
    def clamps(module: L.LightningModule) -> L.Callback:
        def clamp(*_: Any) -> None:
            for parameter in module.parameters():
                parameter.data.clamp_(-0.2, 0.2)

        return LambdaCallback(on_train_batch_end=clamp)

    module, other = (Plain(network(batch_norm=False)) for _ in range(2))
    other.load_state_dict(module.state_dict())
    other.on_train_batch_end = clamps(other).on_train_batch_end  # type: ignore[method-assign]
    found = []
    for each, callbacks in ((module, [clamps(module)]), (other, [])):
        federation = shadow_loop(ShadowShapley(performance="negative_loss"))
        trainer_for(federation, tmp_path, 2, callbacks=callbacks).fit(each, data())
        found.append(federation.contributions["shadow"])
    assert torch.equal(*found)


def test_run_whose_rows_are_given_up_resumes_to_the_bit(tmp_path: Path) -> None:
    def module() -> Plain:
        return Between(network(batch_norm=False))

    whole = assert_resumes(lambda: shadow_loop(ShadowShapley()), tmp_path, module, data)
    assert not whole.contributions["shadow"].isnan().any()


def test_rows_that_are_too_large_are_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flsv.retraining.shadow.MOST_BYTES", 1000)
    module = Plain(network(batch_norm=False))
    expected = values_by_retraining(tmp_path, module, 1)
    federation = shadow_loop(ShadowShapley(performance="negative_loss"))
    fit(federation, tmp_path, module, data(), rounds=1)
    torch.testing.assert_close(federation.contributions["shadow"].double(), expected, rtol=0, atol=1e-6)


def test_non_finite_performance_gives_nan_values_and_training_goes_on() -> None:
    metric, masks = ShadowShapley(num_clients=3), coalition_masks("all", 3)
    with pytest.warns(UserWarning, match="come to no finite performance"):
        metric.update(torch.arange(3), masks, lambda masks: torch.tensor([1.0, 1, torch.nan, 1, 1, 1, 1, 1]))
    assert metric.compute().isnan().all()


def test_shadow_shapley_keeps_the_users_client_algorithm_visible() -> None:
    assert shadow_loop().client_algorithm is None
    proximal = shadow_loop(client_algorithm=FedProx(0.1))
    assert isinstance(proximal.replace(seed=1).client_algorithm, FedProx)


def test_shadow_values_of_an_earlier_round_have_no_interval() -> None:
    metric, masks = ShadowShapley(num_clients=2), coalition_masks("all", 2)
    metric.update(torch.arange(2), masks, lambda masks: masks.sum(1).double())
    earlier = metric.compute()
    metric.update(torch.arange(2), masks, lambda masks: 3.0 * masks.sum(1).double())
    assert metric.intervals(value=earlier) is None
    low, high = metric.intervals(value=metric.compute()) or (None, None)
    assert low is not None
    assert (low < high).all()
