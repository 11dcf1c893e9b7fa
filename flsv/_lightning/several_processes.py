"""Support for epochs whose batches are trained outside of this Trainer's loop: in other processes, or by an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric

from flsv._lightning.patches import PatchedAttributes

#: Hooks that run once per epoch in every process, so that the values that they log are not merged.
_HOOKS_WITHOUT_CLIENTS = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end")

#: Arguments of ``results.log`` that are not sent to other processes.
_ARGUMENTS_OF_PROCESS = ("batch_size", "sync_dist_fn", "reduce_fx")


class Record(NamedTuple):
    """A logged value: its position among all values, the arguments of ``results.log``, and the batch's size."""

    position: int
    call: dict[str, Any]
    batch_size: int | None


class LoggedValues:
    """Recorder of an epoch's logged values that merges them over all processes."""

    def __init__(
        self,
        trainer: L.Trainer,
        position_of_client: Callable[[], int],
        exchange: Callable[[Any, str], list[Any]],
        is_idle: Callable[[], bool],
    ) -> None:
        self._trainer = trainer
        self._position_of_client = position_of_client
        self._exchange = exchange
        self._is_idle = is_idle
        self._results = trainer.fit_loop.epoch_loop._results
        self._connector = trainer._logger_connector
        self._records: list[Record] = []
        self._metrics: dict[str, Metric] = {}
        self._reductions: dict[str, Any] = {}

        self._original_log = self._results.log
        self._original_epoch_end = self._connector.epoch_end_reached
        log_patch = (self._results, "log", self._log_and_record)
        epoch_end_patch = (self._connector, "epoch_end_reached", self._merge_and_end_epoch)
        self._patches = PatchedAttributes([log_patch, epoch_end_patch])

    def remove(self) -> None:
        self._patches.restore()

    def _log_and_record(self, hook: str, name: str, value: Any, **kwargs: Any) -> None:
        self._original_log(hook, name, value, **kwargs)
        if hook in _HOOKS_WITHOUT_CLIENTS:
            return
        key = f"{hook}.{name}"
        if isinstance(value, Metric):
            self._metrics[key] = value
            return

        batch_size = kwargs.get("batch_size") or self._results.batch_size
        reduction = kwargs.get("reduce_fx", torch.mean)
        self._reductions[key] = reduction  # the function itself, which cannot be sent
        # The call can be pickled, so that another process can repeat it.
        call = {
            "fx": hook,
            "name": name,
            "value": value.detach().clone(),
            "reduce_fx": reduction if isinstance(reduction, str) else reduction.__name__,
        }
        for argument in kwargs:
            if argument not in _ARGUMENTS_OF_PROCESS:
                call[argument] = kwargs[argument]
        self._records.append(Record(self._position_of_client(), call, batch_size))

    def _merge_and_end_epoch(self) -> None:
        self._merge()
        self._original_epoch_end()

    def _merge(self) -> None:
        # Each rank sends its records and its metrics' states. An idle rank has trained no client.
        own_records: list[Record] = []
        own_states: dict[str, Any] = {}
        if not self._is_idle():
            own_records = self._records
            own_states = {key: _state(metric) for key, metric in self._metrics.items()}
        sent_by_ranks = self._exchange((own_records, own_states), "logged values")

        records_of_all: list[Record] = []
        for records, _ in sent_by_ranks:
            records_of_all += records
        self._replace_logged_values(records_of_all)
        for key, metric in self._metrics.items():
            states_of_metric = [states[key] for _, states in sent_by_ranks if key in states]
            _merge_states(metric, states_of_metric)
        self._records = []
        self._metrics = {}

    def _replace_logged_values(self, records_of_all: Sequence[Record]) -> None:
        """Log all ranks' values in the order of one process."""
        for record in self._records:
            self._results.pop(_result_key(record.call), None)
        for record in sorted(records_of_all, key=attrgetter("position")):
            self._log_again(record.call, record.batch_size)
        # Every rank gets the value of the last step, as a single process would have it.
        logged_values = self._results.metrics(on_step=True)["callback"]
        self._connector._callback_metrics.update(logged_values)

    def _log_again(self, call: dict[str, Any], batch_size: int | None) -> None:
        """Log a value of any process in this process."""
        strategy = self._trainer.strategy
        arguments = {
            **call,
            "value": call["value"].to(strategy.root_device),
            "reduce_fx": self._reductions.get(_result_key(call), call["reduce_fx"]),
            "sync_dist_fn": strategy.reduce,
            "batch_size": batch_size or 1,
        }
        self._original_log(**arguments)


def _result_key(call: dict[str, Any]) -> str:
    """Return the key under which Lightning holds a logged value."""
    return f"{call['fx']}.{call['name']}"


def _state(metric: Metric) -> dict[str, Any]:
    state = {name: getattr(metric, name) for name in metric._defaults}
    state["_update_count"] = metric._update_count
    return state


def _merge_states(metric: Metric, states: list[dict[str, Any]]) -> None:
    """Set the metric's state to the merged ``states`` of all processes."""
    if not states:
        metric.reset()
        return
    for name, default in metric._defaults.items():
        values = [state[name] for state in states]
        if isinstance(default, list):
            merged: Any = list(chain.from_iterable(values))
        else:
            merged = _reduced(metric, name, values)
        setattr(metric, name, merged)
    metric._update_count = sum(state["_update_count"] for state in states)
    metric._computed = None


def _reduced(metric: Metric, name: str, values: list[Tensor]) -> Tensor:
    """Apply the reduction of a metric's state ``name`` to the state's values in all processes."""
    reduction = metric._reductions[name]
    if not callable(reduction):
        raise RuntimeError(
            f"{type(metric).__name__} was logged as an object, but its state {name!r} has no reduction, so it cannot "
            "be merged from several processes. Log its values instead."
        )
    stacked = torch.stack([value.to(metric.device) for value in values])
    if reduction.__name__ == "dim_zero_cat":
        return torch.cat(list(stacked))
    merged_value = reduction(stacked)
    if reduction.__name__ == "dim_zero_sum":
        # Every process has started from the default, which must be counted only once.
        default: Any = metric._defaults[name]
        num_extra_defaults = len(values) - 1
        merged_value = merged_value - num_extra_defaults * default.to(merged_value)
    return merged_value


class TrainingCounts(NamedTuple):
    """Numbers of batches, of optimizer steps, and of batches that ended with a step."""

    batches: int = 0
    steps: int = 0
    batches_that_stepped: int = 0

    def __sub__(self, earlier: TrainingCounts) -> TrainingCounts:
        return TrainingCounts(
            batches=self.batches - earlier.batches,
            steps=self.steps - earlier.steps,
            batches_that_stepped=self.batches_that_stepped - earlier.batches_that_stepped,
        )


def counts_so_far(trainer: L.Trainer) -> TrainingCounts:
    """Count this process's batches and steps since the beginning of the fit."""
    loop = trainer.fit_loop.epoch_loop
    return TrainingCounts(
        batches=loop.batch_progress.total.ready,
        steps=trainer.global_step,
        batches_that_stepped=loop._batches_that_stepped,
    )


def add_counts(trainer: L.Trainer, counts: TrainingCounts) -> None:
    """Add other processes' counts of batches and steps to those of this trainer."""
    loop = trainer.fit_loop.epoch_loop
    _add_to(loop.batch_progress, counts.batches)
    if trainer.lightning_module.automatic_optimization:
        optimizer_progress = loop.automatic_optimization.optim_progress.optimizer
        _add_to(optimizer_progress.step, counts.steps)
        _add_to(optimizer_progress.zero_grad, counts.steps)
    else:
        _add_to(loop.manual_optimization.optim_step_progress, counts.steps)
    loop._batches_that_stepped += counts.batches_that_stepped


def _add_to(progress: Any, count: int) -> None:
    total = progress.total  # not `current`, which decides whether to validate now
    for name in vars(total):
        setattr(total, name, getattr(total, name) + count)
