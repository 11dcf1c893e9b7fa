"""FreshFits: trains coalitions in newly started processes, from a pickled fit.

It gets the program's globals as they were at the beginning of the fit (:mod:`flsv.retraining.program_state`).
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import cloudpickle
import lightning as L
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info

from flsv._lightning.patches import callbacks_of
from flsv.core.ranks import ranks_of
from flsv.engines.ranks import FederatedStrategy
from flsv.games.performance import ModelScore
from flsv.retraining.coalition_fit import of_the_run, prepare_coalition_fit
from flsv.retraining.fit_order import FitOrder, FitResult
from flsv.retraining.forked_fits import limit_since, own_files
from flsv.retraining.program_state import (
    Name,
    ProgramState,
    Surroundings,
    restore,
    restore_torch,
    torch_settings,
)
from flsv.retraining.readings import Reading, reduced
from flsv.server.round_server import NoModel
from flsv.utilities.errors import listed
from flsv.utilities.forks import cores
from flsv.utilities.own_files import own_folder
from flsv.utilities.supervisor import ChildFailed, FreshProcess, supervise_fresh


class FreshFits:
    """Trainer of coalitions, each in a newly started process."""

    is_reentrant = False

    def __init__(
        self,
        trainer: L.Trainer,
        # From :func:`pickled_fit`.
        fit: bytes,
        measures: Mapping[str, str | ModelScore],
        # When the run has begun.
        since: float,
    ) -> None:
        self._fit, self._measures, self._since = fit, dict(measures), since
        kind = trainer.strategy.root_device.type
        self._process, self._forks = FreshProcess(), kind != "cuda"
        self._jobs = cores() if kind == "cpu" and ranks_of(trainer).size == 1 else 1

    def train(
        self, orders: Sequence[FitOrder]
    ) -> Iterator[tuple[FitOrder, FitResult | ChildFailed | Reading]]:
        """Train the coalitions, and yield each order with its result or error."""
        with own_folder() as folder:
            tasks = []
            for index, order in enumerate(orders):
                task = partial(
                    _train,
                    self._fit,
                    self._measures,
                    str(folder),
                    order,
                )
                tasks.append((index, task))

            run: Any = partial(supervise_fresh, forks=False)
            if self._forks:
                run = self._process.supervise
            limit_s = limit_since(self._since)
            for index, result in run(tasks, self._jobs, limit_s):
                yield orders[index], result

    def close(self) -> None:
        """End the process from which the others are forked, if there is one."""
        self._process.close()


def pickled_fit(
    trainer: L.Trainer,
    *parts: Any,
    environment: Mapping[str, str] | None = None,
) -> bytes:
    """Pickle a Trainer, a module or its factory, and perhaps data, with what the program has set in its modules.

    Objects that only observe the run are left out. With ``environment`` its variables and the working folder are set in
    the process that unpickles the fit.
    """
    program = ProgramState(trainer, trainer.callbacks, *parts)  # type: ignore[attr-defined]
    state, not_pickled = program.pickled()
    if not_pickled:
        rank_zero_info(
            f"flsv: fresh processes have {listed(not_pickled)} as the modules make them, since they cannot be pickled."
        )
    file = io.BytesIO()
    names = program.by_object()
    _Pickler(file, trainer, names).dump((trainer, *parts))
    surroundings = None
    if environment is not None:
        surroundings = Surroundings(dict(environment), os.getcwd())
    fit = file.getvalue()
    return pickle.dumps((surroundings, torch_settings(), state, fit))


def unpickled_fit(data: bytes) -> tuple[Any, ...]:
    """Return what :func:`pickled_fit` has pickled, after giving this process the program's state."""
    surroundings, settings, state, fit = pickle.loads(data)
    if surroundings is not None:
        surroundings.restore()
    restore(state)
    restore_torch(settings)
    return pickle.loads(fit)  # type: ignore[no-any-return]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickler that omits the profiler and a strategy of several ranks. Loggers and observing callbacks are pickled as
    stand-ins, and globals of the program by their ``names``.
    """

    def __init__(
        self,
        file: io.BytesIO,
        trainer: L.Trainer,
        names: Mapping[int, Name],
    ) -> None:
        super().__init__(file)
        unfitted: Any = trainer
        self._instead: dict[int, Any] = {}
        for object_id, name in names.items():
            self._instead[object_id] = (Name.value, (name,))
        self._instead[id(unfitted.profiler)] = (PassThroughProfiler, ())
        for logger in trainer.loggers:
            self._instead[id(logger)] = reduced(logger)
        for callback in callbacks_of(trainer):
            if of_the_run(callback):
                self._instead[id(callback)] = reduced(callback)

        strategy = trainer.strategy
        if isinstance(strategy, FederatedStrategy):  # each rank trains its coalitions by itself
            parts = (
                strategy.root_device,
                strategy.accelerator,
                None,
                strategy.precision_plugin,
            )
            self._instead[id(strategy)] = (SingleDeviceStrategy, parts)

    def reducer_override(self, value: Any) -> Any:
        return self._instead.get(id(value)) or super().reducer_override(value)


def _train(
    data: bytes, measures: Mapping[str, str | ModelScore], folder: str, order: FitOrder
) -> FitResult:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    trainer, module = unpickled_fit(data)
    federated: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning does not declare it
    scoring = prepare_coalition_fit(trainer, federated, measures, order, own_files(trainer, folder))
    with suppress(NoModel):  # the last finite model counts
        trainer.fit(module, federated)
    return scoring.result()
