"""Metrics that fail after their first round: the run goes on as without them, and says why they have no values."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from flsv import FederatedLoop
from flsv._lightning.patches import find_loop
from flsv.aggregation import ShapleySoftmax, ShapleyWeighted
from flsv.core import Values
from flsv.metrics import LeaveOneOut
from flsv.metrics.base import ContributionMetric
from flsv.payment import write_report
from helpers import warns
from helpers.data import toy_data
from helpers.fits import fit, state_vector
from helpers.models import Plain

ROUNDS = 4
#: Methods that a run calls, and what stands when one fails: the value, or nothing.
METHODS = (
    "update",
    "compute",
    "diagnostics",
    "per_client",
    "result",
    "end_run",
    "state_dict",
    "picklable",
)
#: Attributes that a run or its user reads, each a property that fails.
PROPERTIES = (
    "prior",
    "higher_is_better",
    "to_pay_by",
    "class_names",
    "trains_coalitions",
    "measure",
    "evaluators",
)


class FailsInOneMethod(ContributionMetric):
    """It counts rounds, and fails in one method from its second round on."""

    per_class = False
    counts: Tensor

    def __init__(self, method="update", first_round=2):
        self.method = method
        self.first_round = first_round
        super().__init__()

    def init_states(self, num_clients, num_classes):
        zeros = torch.zeros(num_clients)
        self.add_state("counts", zeros, dist_reduce_fx="sum")

    def _fail(self, method):
        if method != self.method:
            return

        finished_rounds = self.first_round - 1
        if method != "update":  # the others are called when the round has been counted
            finished_rounds += 1
        if self.rounds >= finished_rounds:
            raise KeyError(f"{method} fails")

    def update(self, client_ids):
        self._fail("update")
        increments = 1 + client_ids
        self.counts[client_ids] += increments

    def compute(self):
        self._fail("compute")
        return self.counts.clone()

    def diagnostics(self):
        self._fail("diagnostics")
        return {"sum": self.counts.sum()}

    def per_client(self, value):
        self._fail("per_client")
        return value

    def result(self):
        self._fail("result")
        return super().result()

    def end_run(self):
        self._fail("end_run")
        return False

    def state_dict(self, *args, **kwargs):
        self._fail("state_dict")
        state = super().state_dict(*args, **kwargs)
        if self.method == "picklable" and self.rounds >= self.first_round:
            state["picklable"] = (part for part in "fails")
        return state


class FailsInEachAttribute(FailsInOneMethod):
    """It shows nothing of itself from its second round on, but what torchmetrics reads."""

    def __getattribute__(self, name):
        if name in PROPERTIES or name == "columns":
            states = object.__getattribute__(self, "__dict__")
            if states.get("rounds", 0) >= 2:
                raise KeyError(f"{name} fails")
        return super().__getattribute__(name)


class ReadsValues(Callback):
    """It reads all metrics' values in every round, as a program may."""

    def on_train_epoch_end(self, trainer, pl_module):
        find_loop(trainer.callbacks).contributions  # noqa: B018


def fit_run(folder, metrics, module=None, **options):
    """Return the loop, the module and the warnings of a run."""
    loop = FederatedLoop(metrics=metrics, seed=1, **options)
    module = module or Plain()
    data = toy_data(server_val=0.2)
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        fit(
            loop,
            folder,
            module=module,
            data=data,
            rounds=ROUNDS,
            callbacks=[ReadsValues()],
            enable_checkpointing=True,
        )

    messages = []
    for warning in caught_warnings:
        message = str(warning.message)
        if "has failed: " in message:
            messages.append(message)
    return loop, module, messages


@pytest.fixture(scope="module")
def run_without(tmp_path_factory):
    folder = tmp_path_factory.mktemp("without")
    metrics = {"loo": LeaveOneOut()}
    return fit_run(folder, metrics)


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize("method", METHODS)
def test_run_goes_on_without_a_metric_that_fails_after_its_first_round(
    method,
    run_without,
    tmp_path,
):
    metrics = {
        "fails": FailsInOneMethod(method),
        "loo": LeaveOneOut(),
    }
    loop, module, messages = fit_run(tmp_path, metrics)

    loop_without, module_without, _ = run_without
    weights = state_vector(module)
    weights_without = state_vector(module_without)
    assert torch.equal(weights, weights_without)

    values = loop.contributions["loo"]
    values_without = loop_without.contributions["loo"]
    assert torch.equal(values, values_without)
    assert loop.round_index == ROUNDS
    reason = f"{method} fails"
    if method == "picklable":
        reason = "cannot pickle"
    assert len(messages) == 1
    assert reason in messages[0]
    missing_values = loop.contributions["fails"]
    assert missing_values.isnan().all()
    assert reason in loop.values["fails"].missing

    record_text = (tmp_path / "run.json").read_text()
    record = json.loads(record_text)
    assert reason in record["missing"]["fails"]
    report = write_report(tmp_path)
    assert reason in report.read_text()


def test_attributes_of_a_metric_are_read_before_its_second_round(run_without, tmp_path):
    loop, module, messages = fit_run(tmp_path, {"fails": FailsInEachAttribute(method="none")})

    _, module_without, _ = run_without
    weights = state_vector(module)
    weights_without = state_vector(module_without)
    assert torch.equal(weights, weights_without)
    assert loop.round_index == ROUNDS
    assert loop.contributions["fails"].tolist() == [ROUNDS, 2 * ROUNDS, 3 * ROUNDS]
    assert messages == []


class FailsInItsCaseValues(LeaveOneOut):
    def result(self):
        return replace(super().result(), evidence={}, case_values=self._fail)

    def _fail(self):
        raise KeyError("case values fail")


@pytest.mark.slow
def test_run_ends_with_the_other_records_if_one_fails(tmp_path):
    _, _, messages = fit_run(tmp_path, {"fails": FailsInItsCaseValues(), "loo": LeaveOneOut()})

    assert len(messages) == 1
    assert "its record ended in KeyError: 'case values fail'" in messages[0]
    record = json.loads((tmp_path / "run.json").read_text())
    assert "case values fail" in record["missing"]["fails"]
    assert record["paid_in"].keys() == {"fails", "loo"}


class FailsInItsShape(FailsInOneMethod):
    def __init__(self, method, value):
        self.value = value
        super().__init__(method)

    def compute(self):
        if self.method == "compute":
            return self.value
        return super().compute()

    def result(self):
        return Values(self.value)


@pytest.mark.parametrize(
    ("method", "value", "description"),
    [
        ("compute", 5.0, "float"),
        ("compute", torch.zeros(2), r"\[2\]"),
        ("result", torch.zeros(2), r"\[2\]"),
    ],
)
def test_values_without_a_row_per_client_end_the_first_round(method, value, description, tmp_path):
    message = rf"{method}\(\) must return one row per client, \[3\] .* but returned {description}"
    with pytest.raises(ValueError, match=message):
        fit_run(tmp_path, {"fails": FailsInItsShape(method, value)})


@pytest.mark.parametrize("method", ["update", "compute"])
def test_metric_that_fails_in_its_first_round_ends_the_run(method, tmp_path):
    metric = FailsInOneMethod(method, first_round=1)

    with pytest.raises(KeyError, match=f"{method} fails"):
        fit_run(tmp_path, {"fails": metric})


@pytest.mark.fast_rows
@pytest.mark.parametrize("aggregator", [ShapleyWeighted, ShapleySoftmax])
def test_strategies_go_on_with_the_last_values(aggregator, tmp_path):
    """The values before round 3 are in proportion to those after it, so that the weights stay."""
    loop, _, messages = fit_run(
        tmp_path,
        {"fails": FailsInOneMethod()},
        aggregator=aggregator("fails"),
    )

    assert loop.round_index == ROUNDS
    assert len(messages) == 1
    first_values = torch.tensor([1.0, 2.0, 3.0])
    if aggregator is ShapleyWeighted:
        weights = first_values / first_values.sum()
    else:
        weights = 0.5 * first_values.softmax(0)
    assert torch.allclose(loop.weights.float(), weights)


def make_weighted_loop():
    return FederatedLoop(
        ShapleyWeighted("fails"),
        metrics={"fails": FailsInOneMethod()},
        seed=1,
    )


def test_missing_values_stay_missing_in_a_resumed_run(tmp_path):
    data = toy_data(server_val=0.2)
    folder = tmp_path / "a"
    loop = make_weighted_loop()
    with warns("has failed: "):
        fit(
            loop,
            folder,
            module=Plain(),
            data=data,
            enable_checkpointing=True,
        )
    (checkpoint,) = folder.rglob("*.ckpt")

    resumed = make_weighted_loop()
    fit(
        resumed,
        tmp_path / "b",
        module=Plain(),
        data=data,
        rounds=ROUNDS,
        ckpt_path=checkpoint,
    )

    values = resumed.values["fails"]
    assert values.overall.isnan().all()
    assert "update fails" in values.missing

    weights = resumed.weights.float()
    expected_weights = torch.tensor([1, 2, 3]) / 6
    assert torch.allclose(weights, expected_weights)
