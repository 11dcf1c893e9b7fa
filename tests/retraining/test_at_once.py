"""Coalitions that train at once, beside the same coalitions one by one."""

import ctypes
import functools
import gc
import logging
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import NamedTuple

import lightning as L
import pytest
import torch
from retraining.programs_at_once import (
    TEACHERS,
    TRAINED_AT_ONCE,
    TRAINED_ONE_BY_ONE,
    Classifier,
    FrozenInDouble,
    TeacherInGlobal,
    WithDropout,
    WithZeroGradients,
    ZeroGradientsAndRateBySteps,
)
from retraining.recorded import ShadowShapleyThatKeepsUtilities

from flsv import FederatedLoop, Reporting
from flsv.retraining import scored_run
from flsv.retraining.at_once import AtOnce
from flsv.retraining.price import PriceList
from flsv.vmap import coalition_rows
from flsv.vmap.row_training import RowTraining, SharedBatchTraining
from helpers.data import toy_data
from helpers.fits import fit, make_checkpoint_callback

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*training changes", "ignore:.*clients train otherwise"),
]

ONE_BY_ONE, AT_ONCE = float("inf"), 0.0


class Result(NamedTuple):
    utilities: torch.Tensor
    values: torch.Tensor
    #: How coalitions differ from the run.
    differences: list[str]
    #: The line that says why coalitions are trained one by one, or the plan.
    lines: list[str]


def fit_with_coalitions(
    price, make_module=Classifier, *, data=None, loop=None, metric=None, rounds=3, **options
):
    """Fit with all coalitions, at the ``price`` of training them at once."""
    options_of_metric = metric or {"performance": "negative_loss"}
    metric = ShadowShapleyThatKeepsUtilities(coalitions="all", **options_of_metric)
    options_of_loop = {
        "reporting": Reporting(table=False, figures=0, files=False),
        **(loop or {}),
    }
    federated_loop = FederatedLoop(metrics={"value": metric}, seed=5, **options_of_loop)
    TEACHERS.clear()
    L.seed_everything(1, verbose=False)
    log = BufferingHandler(capacity=1000)
    logger = logging.getLogger("lightning.pytorch")
    logger.setLevel("INFO")
    logger.addHandler(log)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PriceList, "at_once", lambda prices, masks: price_of(prices, price))
        try:
            fit(
                federated_loop,
                Path(),
                make_module(),
                data() if data else toy_data(server_val=0.2),
                rounds=rounds,
                **options,
            )
        finally:
            logger.removeHandler(log)

    differences = federated_loop.run.coalition_differences
    lines = [record.getMessage() for record in log.buffer]
    return Result(metric.utilities, metric.compute(), differences, lines)


def price_of(prices, price):
    return ONE_BY_ONE if prices.trial.why_not else price


@functools.cache
def at_once_in_one_part(make_module=Classifier):
    return fit_with_coalitions(AT_ONCE, make_module)


def is_trained_at_once(result):
    is_planned = any("are trained at once" in line for line in result.lines)
    return is_planned and not any("one by one" in line for line in result.lines)


@pytest.mark.by_turn
@pytest.mark.parametrize("options", TRAINED_AT_ONCE.values(), ids=TRAINED_AT_ONCE)
def test_coalitions_at_once_are_those_that_train_one_by_one(options):
    at_once = fit_with_coalitions(AT_ONCE, **options)
    one_by_one = fit_with_coalitions(ONE_BY_ONE, **options)

    assert is_trained_at_once(at_once), at_once.lines
    assert not is_trained_at_once(one_by_one)
    assert not at_once.differences
    torch.testing.assert_close(at_once.utilities, one_by_one.utilities, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(at_once.values, one_by_one.values, rtol=1e-3, atol=1e-5)


@pytest.mark.by_turn
@pytest.mark.parametrize(("make_module", "options", "reason"), TRAINED_ONE_BY_ONE)
def test_a_line_says_why_coalitions_train_one_by_one(make_module, options, reason):
    refused = fit_with_coalitions(AT_ONCE, make_module, rounds=2, **options)

    assert not is_trained_at_once(refused)
    assert any(reason in line for line in refused.lines), refused.lines


@pytest.mark.parametrize("make_module", [TeacherInGlobal, ZeroGradientsAndRateBySteps])
def test_coalitions_that_were_tried_at_once_are_those_of_one_by_one(make_module):
    """The first are refused by what the program reads, the second by a proof."""
    refused, one_by_one = [
        fit_with_coalitions(price, make_module, rounds=2) for price in (AT_ONCE, ONE_BY_ONE)
    ]

    assert not is_trained_at_once(refused)
    assert torch.equal(refused.utilities, one_by_one.utilities)


def test_frozen_parameters_are_the_runs_after_a_comparison_in_64_bits():
    loop = {"share": "trainable"}
    result = fit_with_coalitions(AT_ONCE, FrozenInDouble, loop=loop, rounds=2)

    assert result.values.isfinite().all()


def test_rounding_errors_that_training_enlarges_are_told(capsys):
    loop = {"reporting": Reporting(figures=0, files=False)}
    at_once = fit_with_coalitions(AT_ONCE, WithZeroGradients, loop=loop, rounds=2)
    report = capsys.readouterr().out
    one_by_one = fit_with_coalitions(ONE_BY_ONE, WithZeroGradients, rounds=2)

    assert is_trained_at_once(at_once), at_once.lines
    assert not at_once.differences
    assert "training enlarges rounding errors" in report
    torch.testing.assert_close(at_once.values, one_by_one.values, rtol=0.05, atol=0.005)


COUNTER_IN_C = ctypes.c_long(0)


class CountsOutsideOfCopies(WithZeroGradients):
    def training_step(self, batch, batch_idx):
        COUNTER_IN_C.value += self.current_epoch
        return super().training_step(batch, batch_idx) * (1 + 0.01 * COUNTER_IN_C.value)


def test_training_that_cannot_be_repeated_is_no_rounding():
    COUNTER_IN_C.value = 0
    result = fit_with_coalitions(AT_ONCE, CountsOutsideOfCopies, rounds=2)

    assert any("this is no rounding error" in line for line in result.lines)
    assert result.differences


def test_proofs_need_no_stored_outputs(monkeypatch):
    monkeypatch.setattr(scored_run, "MAX_STORED_OUTPUTS", 0)
    result = fit_with_coalitions(AT_ONCE, rounds=2)
    assert is_trained_at_once(result), result.lines


def test_groups_that_do_not_fit_into_memory_are_halved(monkeypatch):
    group_sizes = []
    fit_group = AtOnce._fit

    def fit_with_memory_for_four(coalitions, group, in_double=False):
        group_sizes.append(len(group))
        if len(group) > 4:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return fit_group(coalitions, group, in_double)

    whole = at_once_in_one_part()
    monkeypatch.setattr(AtOnce, "_fit", fit_with_memory_for_four)
    with pytest.warns(UserWarning, match="6 groups of clients do not fit into the memory"):
        halves = fit_with_coalitions(AT_ONCE)

    assert group_sizes == [6, 3, 3]
    assert is_trained_at_once(halves), halves.lines
    torch.testing.assert_close(halves.utilities, whole.utilities, rtol=1e-4, atol=1e-5)


def test_a_group_leaves_no_copy_of_the_run_behind(monkeypatch):
    numbers_of_engines = []
    fit_group = AtOnce._fit

    def fit_and_count(at_once, group, in_double=False):
        results = fit_group(at_once, group, in_double)
        types = map(type, gc.get_objects())
        numbers_of_engines.append(list(types).count(coalition_rows.CoalitionRows))
        return results

    monkeypatch.setattr(AtOnce, "_fit", fit_and_count)
    monkeypatch.setattr("flsv.retraining.price.MAX_ELEMENTS_OF_GROUP", 700)
    gc.collect()  # what other tests have left
    fit_with_coalitions(AT_ONCE, rounds=1)

    assert len(numbers_of_engines) > 1
    assert len(set(numbers_of_engines)) == 1, numbers_of_engines


@pytest.mark.parametrize(
    "limit",
    ["retraining.price.MAX_ELEMENTS_OF_GROUP", "vmap.coalition_rows.MAX_ELEMENTS_OF_CHUNK"],
    ids=["groups", "chunks"],
)
def test_coalitions_in_parts_are_those_of_one_part(limit, monkeypatch):
    whole = at_once_in_one_part(WithDropout)
    monkeypatch.setattr(f"flsv.{limit}", 700)
    parts = fit_with_coalitions(AT_ONCE, WithDropout)

    assert is_trained_at_once(parts), parts.lines
    torch.testing.assert_close(parts.utilities, whole.utilities, rtol=1e-4, atol=1e-5)


class Prints(L.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        self.last_round = trainer.current_epoch
        print(self.last_round)


def test_values_with_a_callback_that_watches_are_those_without():
    without = at_once_in_one_part()
    one_by_one = fit_with_coalitions(AT_ONCE, callbacks=[Prints()])
    metric = {"performance": "negative_loss", "excluded_callbacks": ["Prints"]}
    excluded = fit_with_coalitions(AT_ONCE, callbacks=[Prints()], metric=metric)

    assert not is_trained_at_once(one_by_one)
    assert any("excluded_callbacks=['Prints']" in line for line in one_by_one.lines)
    torch.testing.assert_close(one_by_one.values, without.values, rtol=1e-3, atol=1e-5)
    assert is_trained_at_once(excluded), excluded.lines
    assert torch.equal(excluded.values, without.values)


def test_a_resumed_run_names_a_further_callback_that_takes_part(tmp_path):
    checkpoint = make_checkpoint_callback(tmp_path)
    saved = fit_with_coalitions(
        AT_ONCE, rounds=1, callbacks=[checkpoint], enable_checkpointing=True
    )
    resumed = fit_with_coalitions(
        AT_ONCE, rounds=2, callbacks=[Prints()], ckpt_path=checkpoint.best_model_path
    )

    assert is_trained_at_once(saved), saved.lines
    assert any("at once: Prints takes part in training" in line for line in resumed.lines)


def test_a_fit_tries_only_the_kind_of_rows_of_the_dry_run(monkeypatch):
    dry_run = coalition_rows._dry_run
    kinds = []

    def record_kind(*arguments, kind=RowTraining):
        kinds.append(kind)
        return dry_run(*arguments, kind=kind)

    monkeypatch.setattr(coalition_rows, "_dry_run", record_kind)
    result = fit_with_coalitions(AT_ONCE, WithDropout, rounds=1)

    assert is_trained_at_once(result), result.lines
    assert kinds == [RowTraining, SharedBatchTraining, SharedBatchTraining]
