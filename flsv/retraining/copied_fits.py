"""CopiedFits: trains coalitions by copies of a Trainer and its module, where the fit cannot be forked.

A copy may still refer to objects of the original, such as a global list. :mod:`flsv.retraining.proof` finds out whether
that has changed the result.
"""

from __future__ import annotations

import copy
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from flsv._lightning.patches import callbacks_of
from flsv.data import FederatedDataModule
from flsv.engines.ranks import FederatedStrategy
from flsv.games.copy_module import copy_module, deepcopy_with_closures
from flsv.games.lent_module import lent
from flsv.games.performance import ModelScore
from flsv.retraining.coalition_fit import FitOrder, FitResult, Nowhere, into_a_coalitions_fit, of_the_run
from flsv.server.round_server import NoModel
from flsv.utilities.seeding import global_rngs, restore_global_rngs
from flsv.utilities.supervisor import ChildFailed


class Spare:
    """Copies of a Trainer and its module before a fit, without loggers, checkpoints and progress bars.

    Args:
        trainer: the trainer in its ``setup``, before the fit has changed it.
        module: the module before the first round.

    Raises:
        ConfigurationError: the module cannot be copied.
    """

    def __init__(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._module = copy_module(module)
        held: Any = trainer
        instead: dict[int, Any] = {id(held.datamodule): held.datamodule, id(held.profiler): PassThroughProfiler()}
        instead |= {id(logger): Nowhere() for logger in trainer.loggers}
        left_out = L.Callback()
        instead |= {id(each): left_out for each in held.callbacks if of_the_run(each)}
        strategy = trainer.strategy
        if isinstance(strategy, FederatedStrategy):  # each rank trains its coalitions by itself
            parts = copy.deepcopy((strategy.accelerator, strategy.precision_plugin))
            instead[id(strategy)] = SingleDeviceStrategy(strategy.root_device, parts[0], precision_plugin=parts[1])
        pairs = _counterparts(module, self._module)
        self._trainer = deepcopy_with_closures(trainer, callbacks_of(trainer), {*pairs}, instead | pairs)
        callbacks: list[L.Callback] = callbacks_of(self._trainer)
        callbacks[:] = [each for each in callbacks if each is not left_out]

    def made(self) -> tuple[L.Trainer, L.LightningModule]:
        """Copy the stored Trainer and module once more, for one fit, and return the two copies."""
        module = copy_module(self._module)
        data: Any = self._trainer.datamodule  # type: ignore[attr-defined]  # Lightning does not declare it
        same = {id(each): each for each in (data, *self._trainer.loggers)}
        pairs, callbacks = _counterparts(self._module, module), callbacks_of(self._trainer)
        return deepcopy_with_closures(self._trainer, callbacks, {*pairs}, same | pairs), module


def _counterparts(module: L.LightningModule, copy_of_it: L.LightningModule) -> dict[int, Any]:
    """Return ``{id of original: copy}`` for all layers, parameters and buffers of a module, by which copied callbacks
    refer to the copied module."""
    pairs = [*zip(module.modules(), copy_of_it.modules()), *zip(module.parameters(), copy_of_it.parameters())]
    return {id(mine): theirs for mine, theirs in (*pairs, *zip(module.buffers(), copy_of_it.buffers()))}


class CopiedFits:
    """Fits of coalitions, each by copies of a Trainer and its module, one after the other in the run's process.

    Args:
        spare: the copies of the Trainer and the module before the fit.
        module: the run's module. Its parameters and buffers are restored after each fit, since a copy may change them.
        data: the federation's data module.
        measures: ``{name: performance measure}`` by which models are scored.
    """

    def __init__(
        self,
        spare: Spare,
        module: L.LightningModule,
        data: FederatedDataModule,
        measures: Mapping[str, str | ModelScore],
    ) -> None:
        self._spare, self._module, self._data, self._measures = spare, module, data, measures

    def train(self, orders: Sequence[FitOrder]) -> Iterator[tuple[FitOrder, FitResult | ChildFailed]]:
        """Train the coalitions of ``orders``, and yield each order with its result, or with its error."""
        for order in orders:
            yield order, _answer_or_failure(partial(self._train, order))

    def _train(self, order: FitOrder) -> FitResult:
        trainer, module = self._spare.made()
        with as_it_was(self._data, self._module), tempfile.TemporaryDirectory() as folder:
            scoring = into_a_coalitions_fit(trainer, self._data, self._measures, order, folder)
            with suppress(NoModel):  # the last finite model counts
                trainer.fit(module, self._data)
        return scoring.result()


def in_this_process(
    data: FederatedDataModule, module: nn.Module | None, tasks: Iterable[tuple[Any, Callable[[], Any]]], *_: Any
) -> Iterator[tuple[Any, Any]]:
    """Run tasks in this process, one after the other, and yield each task's name and answer, or its error as
    :class:`flsv.utilities.supervisor.ChildFailed`: in place of :func:`flsv.utilities.supervisor.supervise`.

    Args:
        data: the data module on which the tasks fit.
        module: the module whose parameters and buffers are restored after each task; None: each task makes its module.
        tasks: pairs of a name and a function.
        _: further arguments of ``supervise``, which have no effect.
    """
    for name, task in tasks:
        with as_it_was(data, module):
            answer = _answer_or_failure(task)
        yield name, answer


def _answer_or_failure(task: Callable[[], Any]) -> Any:
    try:
        return task()
    except Exception as error:
        return ChildFailed(f"{type(error).__name__}: {error}")


@contextmanager
def as_it_was(data: FederatedDataModule, module: nn.Module | None) -> Iterator[None]:
    """Silence logs and warnings within this context, in which another Trainer may fit on ``data``; then restore
    ``data.trainer``, the module's parameters and buffers, and the random state."""
    logger, trainer, drawn = logging.getLogger("lightning.pytorch"), data.trainer, global_rngs()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), nullcontext() if module is None else lent(module):
            warnings.simplefilter("ignore")  # the run itself has shown them
            yield
    finally:
        logger.setLevel(level)
        data.trainer = trainer
        restore_global_rngs(drawn)
