"""Support for epochs whose batches are trained outside of this Trainer's loop: in other processes, or by an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import lightning as L
import torch
from torchmetrics import Metric

from flsv._lightning.patches import PatchedAttributes

#: Hooks that run once per epoch in every process, so that the values that they log are not merged.
_ONCE = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end")

#: Record of a logged value: its place in the order of all values, the arguments of ``results.log``, the batch's size.
Record = tuple[int, dict[str, Any], int | None]


class LoggedValues:
    """Recorder of an epoch's logged values that merges them over all processes."""

    def __init__(
        self,
        trainer: L.Trainer,
        place: Callable[[], int],
        exchange: Callable[[Any, str], list[Any]],
        idle: Callable[[], bool],
    ) -> None:
        self._trainer, self._place, self._exchange, self._idle = trainer, place, exchange, idle
        self._results = trainer.fit_loop.epoch_loop._results
        self._connector = trainer._logger_connector
        self._records: list[Record] = []
        self._metrics: dict[str, Metric] = {}
        self._reductions: dict[str, Any] = {}
        self._log, self._end = self._results.log, self._connector.epoch_end_reached
        self._patches = PatchedAttributes(
            [
                (self._results, "log", self._remembered),
                (self._connector, "epoch_end_reached", self._ended),
            ]
        )

    def remove(self) -> None:
        self._patches.restore()

    def _remembered(self, fx: str, name: str, value: Any, **kwargs: Any) -> None:
        self._log(fx, name, value, **kwargs)
        if fx in _ONCE:
            return
        if isinstance(value, Metric):
            self._metrics[f"{fx}.{name}"] = value
            return
        # The others belong to this process: the synchronizing function, and the batch from which Lightning takes a
        # size.
        known = {
            key: kwargs[key]
            for key in kwargs
            if key not in ("batch_size", "sync_dist_fn", "reduce_fx")
        }
        size = kwargs.get("batch_size") or self._results.batch_size
        reduction = kwargs.get("reduce_fx", torch.mean)
        self._reductions[f"{fx}.{name}"] = reduction
        reduction = reduction if isinstance(reduction, str) else reduction.__name__
        call = {
            "fx": fx,
            "name": name,
            "value": value.detach().clone(),
            "reduce_fx": reduction,
            **known,
        }
        self._records.append((self._place(), call, size))

    def _ended(self) -> None:
        self._merge()
        self._end()

    def _merge(self) -> None:
        results, own, idle = self._results, self._records, self._idle()
        states = {key: _state(metric) for key, metric in self._metrics.items()}
        parts = self._exchange(([], {}) if idle else (own, states), "logged values")
        for _, call, _ in own:
            results.pop(f"{call['fx']}.{call['name']}", None)
        strategy = self._trainer.strategy
        for _, call, size in sorted(
            (record for logged, _ in parts for record in logged), key=lambda record: record[0]
        ):
            here = {
                "value": call["value"].to(strategy.root_device),
                "reduce_fx": self._reductions.get(
                    f"{call['fx']}.{call['name']}", call["reduce_fx"]
                ),
                "sync_dist_fn": strategy.reduce,
                "batch_size": size or 1,
            }
            self._log(**{**call, **here})
        # A single process would have the last step's value at this point, so every rank gets it, too.
        self._connector._callback_metrics.update(results.metrics(on_step=True)["callback"])
        for key, metric in self._metrics.items():
            _merge_states(metric, [held[key] for _, held in parts if key in held])
        self._records, self._metrics = [], {}


def _state(metric: Metric) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in metric._defaults} | {
        "_update_count": metric._update_count
    }


def _merge_states(metric: Metric, states: list[dict[str, Any]]) -> None:
    """Set the metric's state to the merged ``states`` of all processes."""
    if not states:
        metric.reset()
        return
    for name, default in metric._defaults.items():
        values, reduce = [state[name] for state in states], metric._reductions[name]
        if isinstance(default, list):
            merged: Any = [part for value in values for part in value]
        elif reduce is None or not callable(reduce):
            raise RuntimeError(
                f"{type(metric).__name__} was logged as an object, and its state {name!r} has no reduction: it cannot "
                "be put together from several processes. Log its values."
            )
        else:
            stacked = torch.stack([value.to(metric.device) for value in values])
            merged = (
                reduce(stacked) if reduce.__name__ != "dim_zero_cat" else torch.cat(list(stacked))
            )
            if reduce.__name__ == "dim_zero_sum":
                merged = merged - (len(values) - 1) * default.to(merged)
        setattr(metric, name, merged)
    metric._update_count = sum(state["_update_count"] for state in states)
    metric._computed = None


class Counted(NamedTuple):
    """Numbers of batches, of optimizer steps, and of batches that ended with a step."""

    batches: int = 0
    steps: int = 0
    stepped: int = 0

    def __sub__(self, other: Counted) -> Counted:
        return Counted(*(mine - theirs for mine, theirs in zip(self, other)))


def counts_so_far(trainer: L.Trainer) -> Counted:
    """Count this process's batches and steps since the beginning of the fit."""
    loop = trainer.fit_loop.epoch_loop
    return Counted(loop.batch_progress.total.ready, trainer.global_step, loop._batches_that_stepped)


def add(trainer: L.Trainer, others: Counted) -> None:
    """Add other processes' counts of batches and steps to those of this trainer."""
    loop = trainer.fit_loop.epoch_loop
    progress = loop.automatic_optimization.optim_progress.optimizer
    counts: list[tuple[Any, int]] = [(loop.batch_progress, others.batches)]
    if trainer.lightning_module.automatic_optimization:
        counts += [(progress.step, others.steps), (progress.zero_grad, others.steps)]
    else:
        counts += [(loop.manual_optimization.optim_step_progress, others.steps)]
    for tracker, count in counts:
        for name in vars(tracker.total):  # not `current`, which decides whether to validate now
            setattr(tracker.total, name, getattr(tracker.total, name) + count)
    loop._batches_that_stepped += others.stepped


class IdleBatch:
    """Placeholder for the batches of a round that are trained outside of this Trainer's loop."""

    visits: Sequence[Any] = ()

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        yield self


def idle_patches(trainer: L.Trainer) -> list[tuple[Any, str, Any]]:
    """Return the patches with which a Trainer does nothing for an :class:`IdleBatch`."""
    module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop

    def passing(step: Any) -> Any:
        def pass_by(batch: Any, *args: Any, **kwargs: Any) -> Any:
            return batch if isinstance(batch, IdleBatch) else step(batch, *args, **kwargs)

        return pass_by

    def nothing(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}

    return [
        (module, "_on_before_batch_transfer", passing(module._on_before_batch_transfer)),
        (trainer.strategy, "batch_to_device", passing(trainer.strategy.batch_to_device)),
        (
            trainer.precision_plugin,
            "convert_input",
            passing(trainer.precision_plugin.convert_input),
        ),
        (loop.automatic_optimization, "run", nothing),
        (loop.manual_optimization, "run", nothing),
        (module, "on_train_batch_start", nothing),
        (module, "on_train_batch_end", nothing),
    ]
