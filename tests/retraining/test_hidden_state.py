"""Runs with every sort of state: each coalition against a fit of its members alone, in a process of its own."""

import pickle
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

import lightning as L
import pytest
import torch
from retraining.recorded import ShadowShapleyThatKeepsUtilities

from flsv.sampling import FullParticipation
from helpers import refused
from helpers.fits import all_samples, plain_trainer, state_vector
from helpers.forked import Forked
from zoo.program import entropy, fit_program, with_three_clients
from zoo.table import ROWS, Row, rows_with

pytestmark = pytest.mark.slow

#: What a copy of a run keeps of a module is in tests/utilities/test_run_copy.py, and that each client begins with it in
#: tests/compat/test_states.py. Here are rows that need a whole fit: state elsewhere, made in training, and counted.

#: Of these coalitions the members are trained alone, too: the last one that is trained, and that of all clients.
PAIR = (0, 1)
ALL_CLIENTS = (0, 1, 2)
COALITIONS = [(0,), (2,), PAIR, ALL_CLIENTS]


class FitWithValues(NamedTuple):
    #: {members: utility of their model}
    utilities: dict[tuple[int, ...], float]
    #: Warnings of the metric.
    consistency_warnings: list[str]
    model: list[float]


class FailsIfTrained(L.Callback):
    def on_train_batch_start(self, *_):
        raise AssertionError("it is trained")


def fit_with_values(row):
    """Train the federation of a row, and its coalitions. One that must be refused may not train."""
    mode = "min" if row.performance == "val_loss" else None
    metric = ShadowShapleyThatKeepsUtilities(
        coalitions=COALITIONS, performance=row.performance, mode=mode
    )
    callbacks = [FailsIfTrained()] if row.retrained == "refused" else []
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(record=True) as caught_warnings,
    ):
        warnings.simplefilter("always")
        loop, module = fit_program(row.program, Path(folder), callbacks, metrics={"shadow": metric})

    fitted_metric = loop.metrics["shadow"]
    messages = [str(warning.message) for warning in caught_warnings]
    return FitWithValues(
        utilities=dict(zip(fitted_metric.members, fitted_metric.utilities.tolist())),
        consistency_warnings=[text for text in messages if text.startswith("shadow: ")],
        model=state_vector(module).tolist(),
    )


def fit_members_alone(row, members):
    """Train some clients only, by the federation of a row. Return the model's utility, and the model."""
    program = row.alone or row.program
    sampler = program.loop().get("sampler", FullParticipation())
    with tempfile.TemporaryDirectory() as folder:
        _, module = fit_program(program, Path(folder), sampler=sampler.among(members))
        model = state_vector(module).tolist()
        if row.performance == "val_loss":
            loss = logged_loss(module, program, folder)
        else:
            loss = loss_of_outputs(module, program)
    return -loss, model


def logged_loss(module, program, folder):
    trainer = plain_trainer(folder)
    trainer.validate(module, program.data(), verbose=False)
    return float(trainer.callback_metrics["val_loss"])


@torch.no_grad()
def loss_of_outputs(module, program):
    data = program.data()
    data.setup("fit")
    inputs, labels = all_samples(data.val_dataloader())

    module.eval()
    is_mixed = program.trainer.get("precision") == "bf16-mixed"
    with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        return float(entropy(module(inputs), labels))


def in_fork(function, *arguments):
    """Return what a function returns in a fork of this process, in which no program is trained."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "response")
        process = Forked(Path(folder, "process"), store_response, file, function, arguments)
        status, output = process.wait(seconds=300)
        assert status == 0, output
        response = pickle.loads(file.read_bytes())

    if isinstance(response, Exception):
        raise response
    return response


def store_response(file, function, arguments):
    """Write what a function returns or raises into a file."""
    try:
        response = function(*arguments)
    except Exception as error:
        response = error
    file.write_bytes(pickle.dumps(response))


def fit_in_fork(name):
    """Fit a row with its values, and compare them and the model to fits of members alone. Return the warnings."""
    row = ROWS[name]
    run = in_fork(fit_with_values, row)

    utility_of_pair, _model = in_fork(fit_members_alone, row, PAIR)
    assert run.utilities[PAIR] == pytest.approx(utility_of_pair, rel=0, abs=1e-6)

    utility_of_all, model_of_all = in_fork(fit_members_alone, row, ALL_CLIENTS)
    assert run.utilities[ALL_CLIENTS] == pytest.approx(utility_of_all, rel=0, abs=1e-6)
    assert run.model == model_of_all, "the metric has changed the training"
    return run.consistency_warnings


@pytest.fixture(scope="module", autouse=True)
def train_once():
    """Fit once before any fork, which pays for imports and threads."""
    fit_with_values(Row(with_three_clients(rounds=1)))


@pytest.mark.by_turn
@pytest.mark.parametrize("name", rows_with("retrained", "right"))
def test_coalitions_are_fits_of_their_members(name):
    assert fit_in_fork(name) == []


@pytest.mark.by_turn
@pytest.mark.parametrize("name", rows_with("retrained", "warned"))
def test_coalitions_whose_clients_train_by_company_are_fits_of_their_members_with_a_warning(name):
    (consistency_warning,) = fit_in_fork(name)
    assert "clients train otherwise in the first round of coalitions" in consistency_warning


@pytest.mark.parametrize("name", rows_with("retrained", "refused"))
def test_coalitions_of_a_run_that_cannot_be_copied_are_refused_before_training(name):
    row = ROWS[name]
    with refused(row.refusal):
        in_fork(fit_with_values, row)
