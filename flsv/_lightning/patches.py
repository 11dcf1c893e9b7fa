"""Attributes of Lightning, of a Trainer and of its loggers that are replaced for the length of a fit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning as L
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.profilers import PassThroughProfiler
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric

CONFIGURE = "configure_optimizers"
_CLASS = object()


class PatchedAttributes:
    """Changes of attributes, each ``(object, name, value)``, that :meth:`restore` undoes."""

    def __init__(self, changes: list[tuple[Any, str, Any]] | None = None) -> None:
        # A method belongs to its class: set on the instance instead, it would be copied and pickled with it.
        self._before = [
            (
                owner,
                name,
                _CLASS if inspect.isroutine(before) and name not in vars(owner) else before,
            )
            for owner, name, before in (
                (owner, name, getattr(owner, name)) for owner, name, _ in changes or []
            )
        ]
        for owner, name, value in changes or []:
            setattr(owner, name, value)

    def restore(self) -> None:
        for owner, name, value in self._before:
            if value is _CLASS:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._before = []


def in_turn(*functions: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that calls the functions one after the other."""

    def all_of_them() -> None:
        for function in functions:
            function()

    return all_of_them


def callbacks_of(trainer: L.Trainer) -> list[L.Callback]:
    """Return the trainer's list of callbacks, an attribute that Lightning does not declare."""
    return trainer.callbacks  # type: ignore[attr-defined, no-any-return]  # set by Lightning's connectors


@contextmanager
def unlogged(module: nn.Module) -> Iterator[None]:
    """Discard all values that the module logs within the context."""
    patches = PatchedAttributes(
        [(module, name, _nothing) for name in ("log", "log_dict") if hasattr(module, name)]
    )
    try:
        yield
    finally:
        patches.restore()


def _nothing(*_: Any, **__: Any) -> None:
    return None


def metric_states(module: nn.Module) -> list[tuple[Metric, dict[str, Any]]]:
    """Pair each torchmetrics metric of a module with a copy of its state."""
    metrics = [layer for layer in module.modules() if isinstance(layer, Metric)]
    return [
        (m, {**m._copy_state_dict(), "_update_count": m._update_count, "_computed": m._computed})
        for m in metrics
    ]


def put_metric_states(states: list[tuple[Metric, dict[str, Any]]]) -> None:
    """Restore the states that :func:`metric_states` has copied."""
    for metric, state in states:
        for name, value in state.items():
            setattr(metric, name, value)


def round_axis(trainer: L.Trainer) -> tuple[Any, str, Any]:
    """Return the patch ``(object, name, value)`` with which loggers plot epoch values over rounds."""
    connector = trainer._logger_connector
    log_metrics = connector.log_metrics

    def with_round(metrics: dict[str, Any], step: int | None = None) -> None:
        # Between two batches `_first_loop_iter` is a bool.
        epoch_level = step is None and connector._first_loop_iter is None
        if not epoch_level or "step" in metrics:
            log_metrics(metrics, step=step)
            return
        log_metrics(metrics, step=trainer.current_epoch)
        if (
            not metrics
        ):  # Lightning then saves nothing, and a killed run would lose the round's own curves
            for logger in trainer.loggers:
                logger.save()

    return connector, "log_metrics", with_round


def no_placeholder(trainer: L.Trainer) -> list[tuple[Any, str, Any]]:
    """Return the patches that keep a placeholder value out of TensorBoard's table of runs."""
    return [
        (x, "_default_hp_metric", False)
        for x in trainer.loggers
        if isinstance(x, TensorBoardLogger)
    ]


def unprofiled(trainer: L.Trainer) -> list[tuple[Any, str, Any]]:
    """Return the patches with which a Trainer without a profiler skips profiling calls."""
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]  # set by Lightning's connectors
    return [(profiler, "profile", nullcontext)] if type(profiler) is PassThroughProfiler else []


def answering(trainer: L.Trainer, answers: dict[str, Callable[[], Any]]) -> tuple[Any, str, Any]:
    """Return a patch ``(object, name, value)`` that replaces a Trainer's properties by the functions ``answers``,
    except where they return None."""
    kind = type(trainer)

    def answered(name: str, answer: Callable[[], Any]) -> property:
        lightnings: Any = getattr(kind, name)

        def get(self: L.Trainer) -> Any:
            own = answer() if self is trainer else None
            return lightnings.fget(self) if own is None else own

        return property(get)

    own = type(
        kind.__name__, (kind,), {name: answered(name, answer) for name, answer in answers.items()}
    )
    return trainer, "__class__", own


def new_optimizers(trainer: L.Trainer) -> tuple[list[Optimizer], list[Any]]:
    """Call the module's ``configure_optimizers`` and return its optimizers and schedulers."""
    optimizers, configs = _init_optimizers_and_lr_schedulers(trainer.lightning_module)
    return optimizers, [config.scheduler for config in configs]
