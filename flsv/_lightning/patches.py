"""A trainer's callbacks, and attributes of a trainer and its loggers that are replaced during a fit."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from threading import Thread
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.profilers import PassThroughProfiler
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric

from flsv.utilities.errors import ConfigurationError

Patch = tuple[Any, str, Any]
"""An object, the name of an attribute, and the attribute's new value."""

CONFIGURE_HOOK = "configure_optimizers"
#: Lightning's name of the epoch in logs, which is the round here.
ROUND_NAME = "epoch"
#: Lightning's callbacks that only watch or end a run. Their hooks do not change the module, its optimizer or batches,
#: so they are allowed while a batched model trains, and excluded when a coalition is trained alone.
WATCHERS = (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    ThroughputMonitor,
    Timer,
)
#: Seconds in which a logger is closed after a run was stopped.
MAX_SECONDS_TO_CLOSE = 4.0
#: Stands for the original value if the instance has none and its class has a method of this name.
_INHERITED = object()


class PatchedAttributes:
    """Changes of attributes, each ``(object, name, value)``, that :meth:`restore` or the end of a ``with`` undoes."""

    def __init__(self, changes: Sequence[Patch] = ()) -> None:
        self._originals = []
        for owner, name, _ in changes:
            original = getattr(owner, name)
            # A method is restored by deleting the instance's attribute, which would else be copied and pickled with it.
            if inspect.isroutine(original) and name not in vars(owner):
                original = _INHERITED
            self._originals.append((owner, name, original))
        for owner, name, value in changes:
            setattr(owner, name, value)

    def restore(self) -> None:
        for owner, name, original in self._originals:
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._originals = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        self.restore()


class LastCallback(L.Callback):
    """Callback that calls ``action`` once, after the last of a fit's hooks, which is the module's ``teardown``.

    It is made while callbacks are torn down, and becomes the last of them, so that no other callback sees the patched
    module.
    """

    def __init__(self, trainer: L.Trainer, action: Callable[[], None]) -> None:
        self._callbacks = callbacks_of(trainer)
        self._action = action
        self._callbacks.append(self)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.remove()
        tear_down_module = pl_module.teardown

        def tear_down_and_act(stage: str) -> None:
            patch.restore()  # a module may be pickled in its own ``teardown``
            tear_down_module(stage=stage)
            self._action()

        patch = PatchedAttributes([(pl_module, "teardown", tear_down_and_act)])

    def remove(self) -> None:
        """Remove this from the trainer's callbacks."""
        if self in self._callbacks:
            self._callbacks.remove(self)


def in_turn(*functions: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that calls the functions one after the other."""

    def all_of_them() -> None:
        for function in functions:
            function()

    return all_of_them


def is_watcher(kind: type) -> bool:
    """Return whether a class of callbacks only watches or ends a run: it is one of Lightning's or of flsv's, and one of
    :data:`WATCHERS`.

    Example:
        >>> class Stops(EarlyStopping):
        ...     __module__ = "project"
        >>> is_watcher(EarlyStopping), is_watcher(Stops)
        (True, False)
    """
    package, _, _ = kind.__module__.partition(".")
    return package in ("lightning", "flsv") and issubclass(kind, WATCHERS)


def callbacks_of(trainer: L.Trainer) -> list[L.Callback]:
    """Return the trainer's list of callbacks, an attribute that Lightning does not declare."""
    return trainer.callbacks  # type: ignore[attr-defined]  # set by Lightning's connectors


def is_loop(callback: object) -> bool:
    """Return whether a callback is a FederatedLoop, recognized by a property that only its class has.

    Example:
        >>> from flsv import FederatedLoop
        >>> is_loop(FederatedLoop()), is_loop("another callback")
        (True, False)
    """
    return hasattr(type(callback), "current_client")


def find_loop(callbacks: Iterable[object]) -> Any:
    """Return the FederatedLoop among a trainer's callbacks.

    Raises:
        ConfigurationError: no callback is a FederatedLoop.

    Example:
        >>> from flsv import FederatedLoop
        >>> find_loop(["another callback", FederatedLoop(seed=3)]).seed
        3
        >>> find_loop([])
        Traceback (most recent call last):
        ...
        flsv.utilities.errors.ConfigurationError: the Trainer has no FederatedLoop. Add one to its callbacks.
    """
    for callback in callbacks:
        if is_loop(callback):
            return callback
    raise ConfigurationError("the Trainer has no FederatedLoop. Add one to its callbacks.")


def discarded_logs(module: nn.Module) -> PatchedAttributes:
    """Discard all values that the module logs within this context."""
    changes = [(module, name, do_nothing) for name in ("log", "log_dict") if hasattr(module, name)]
    return PatchedAttributes(changes)


def do_nothing(*_: Any, **__: Any) -> None:
    """Replace any function."""


MetricState = tuple[Metric, dict[str, Any]]


def metric_states(module: nn.Module) -> list[MetricState]:
    """Pair each torchmetrics metric of a module with a copy of its state."""
    states = []
    for layer in module.modules():
        if isinstance(layer, Metric):
            state: dict[str, Any] = dict(layer._copy_state_dict())
            state["_update_count"] = layer._update_count
            state["_computed"] = layer._computed
            states.append((layer, state))
    return states


def put_metric_states(states: list[MetricState]) -> None:
    """Restore the states that :func:`metric_states` has copied."""
    for metric, state in states:
        for name, value in state.items():
            setattr(metric, name, value)


def round_axis_patch(trainer: L.Trainer) -> Patch:
    """Return the patch ``(object, name, value)`` with which loggers use the round as the step of all values."""
    connector = trainer._logger_connector
    log_metrics: Callable[..., None] = connector.log_metrics

    def log_over_rounds(metrics: dict[str, Any]) -> None:
        round_index = trainer.current_epoch
        step = None if "step" in metrics else round_index  # the module may have chosen its axis
        log_metrics({ROUND_NAME: round_index, **metrics}, step=step)
        if ROUND_NAME not in metrics:
            # It is only for loggers, not for trainer.logged_metrics.
            connector._logged_metrics.pop(ROUND_NAME, None)

    # Lightning's own step, of batches, is not used.
    def log_with_round_as_step(metrics: dict[str, Any], step: int | None = None) -> None:
        # `_first_loop_iter` is None outside of an epoch's batches, and else a bool.
        is_of_batch = connector._first_loop_iter is not None
        if metrics:
            log_over_rounds(metrics)
        elif not is_of_batch:
            # Lightning saves loggers only if it has logged values. Without this a killed run would lose flsv's curves.
            for logger in trainer.loggers:
                logger.save()

    return connector, "log_metrics", log_with_round_as_step


def no_placeholder_patches(trainer: L.Trainer) -> list[Patch]:
    """Return the patches that keep a placeholder value out of TensorBoard's table of runs."""
    return [
        (logger, "_default_hp_metric", False)
        for logger in trainer.loggers
        if isinstance(logger, TensorBoardLogger)
    ]


def limit_closing(loggers: Sequence[Logger]) -> None:
    """Let Lightning close the loggers of a fit that was stopped as :func:`close_in_time` does."""

    def close(logger: Logger, patch: PatchedAttributes, status: str) -> None:
        patch.restore()
        close_in_time(partial(logger.finalize, status), type(logger).__name__)

    for logger in loggers:
        patch = PatchedAttributes([(logger, "finalize", logger.finalize)])
        logger.finalize = partial(close, logger, patch)  # type: ignore[method-assign]


def close_in_time(close: Callable[[], None], name: str) -> None:
    """Call ``close``. If it takes longer than :data:`MAX_SECONDS_TO_CLOSE`, warn, and let the program go on. An error
    that was raised in the middle of a writer's code may have left it waiting.
    """
    closing: Future[None] = Future()

    def close_and_tell() -> None:
        try:
            close()
        except BaseException as error:
            closing.set_exception(error)
        else:
            closing.set_result(None)

    Thread(target=close_and_tell, daemon=True).start()
    try:
        closing.result(MAX_SECONDS_TO_CLOSE)
    except TimeoutError:
        warnings.warn(
            f"{name} was not closed within {MAX_SECONDS_TO_CLOSE:g} seconds after the run was stopped, so its last "
            "values may be missing.",
            stacklevel=2,
        )


def no_profiling_patches(trainer: L.Trainer) -> list[Patch]:
    """Return the patches with which a Trainer without a profiler skips profiling calls."""
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]  # set by Lightning's connectors
    if type(profiler) is not PassThroughProfiler:
        return []
    return [(profiler, "profile", nullcontext)]


def new_optimizers(trainer: L.Trainer) -> tuple[list[Optimizer], list[Any]]:
    """Call the module's ``configure_optimizers`` and return its optimizers and schedulers."""
    optimizers, configs = _init_optimizers_and_lr_schedulers(trainer.lightning_module)
    schedulers = [config.scheduler for config in configs]
    return optimizers, schedulers
