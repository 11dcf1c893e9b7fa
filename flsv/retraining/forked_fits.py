"""ForkedFits: trains coalitions by forks of a fit at its beginning.

When a fit is set up, before anything has moved, its process is forked once. The fork holds all that the fit begins
with: module, callbacks, functions and what they refer to, class attributes, globals, iterators, data sets, generators.
It waits; asked for coalitions it forks itself for each of them, and each of these forks goes on with the very
``Trainer.fit`` that it stands in, with the coalition's members only. The run's own process trains nothing else.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L

from flsv._lightning.patches import callbacks_of
from flsv.data import FederatedDataModule
from flsv.engines.ranks import ranks_of
from flsv.games.performance import ModelScore
from flsv.retraining.coalition_fit import CoalitionFailed, FitOrder, FitResult, into_a_coalitions_fit
from flsv.server.round_server import NoModel
from flsv.utilities.forks import quiet_fork, why_not_fork
from flsv.utilities.supervisor import ChildFailed, GoOn, answer, ended_by_sigterm, fail, supervise

#: A coalition's fit may take as many times as long as the run until then, and so many seconds more.
LONGER, SECONDS = 20, 120


def why_not_by_forks(trainer: L.Trainer) -> str | None:
    """Explain why a Trainer's fit cannot be forked; None: it can."""
    if ranks_of(trainer).size > 1:
        return "the fit has several processes"
    if trainer.current_epoch:
        return "the Trainer goes on with an earlier fit"
    return why_not_fork(trainer.strategy.root_device)


def cores() -> int:
    """Return the number of processor cores that this process may use: as many coalitions are trained at once."""
    return len(os.sched_getaffinity(0))


class ForkedFits:
    """Fits of coalitions, each by a fork of a fit at its beginning.

    Args:
        trainer: the Trainer in its ``setup``, before the fit has changed it.
        module: the module before the first round.
        measures: the performances of models, by name.

    Attributes:
        begun: whether this process is a coalition's fork, whose Trainer has been changed into the coalition's: the
            fit's hooks go on with that Trainer's callbacks.
    """

    def __init__(self, trainer: L.Trainer, module: L.LightningModule, measures: Mapping[str, str | ModelScore]) -> None:
        asked, self._ask = os.pipe()
        self._told, tell = os.pipe()
        self.begun, self._since = False, time.monotonic()
        self._waiting = quiet_fork()
        if self._waiting:
            os.close(asked)
            os.close(tell)
            return
        try:
            order = self._wait(asked, tell)
            self._begin(trainer, module, measures, order)
            self.begun = True
        except BaseException as error:
            fail(f"{type(error).__name__}: {error}")

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a process that waits cannot be copied")

    def __del__(self) -> None:
        if not self.begun:
            self.close()

    # ---- in the run's process

    def train(self, orders: Sequence[FitOrder]) -> Iterator[tuple[FitOrder, FitResult | CoalitionFailed]]:
        """Train coalitions, as many at once as there are cores, and yield each with its result, or an error."""
        spent = time.monotonic() - self._since
        left = dict(enumerate(orders))
        try:
            with ended_by_sigterm(), TemporaryDirectory() as folder, os.fdopen(os.dup(self._told), "rb") as told:
                with os.fdopen(os.dup(self._ask), "wb") as ask:
                    pickle.dump((list(orders), folder, cores(), SECONDS + LONGER * spent), ask)
                while left:
                    place, found = pickle.load(told)
                    order = left.pop(place)
                    yield order, CoalitionFailed(f"{found}") if isinstance(found, ChildFailed) else found
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            self.close()
            for order in left.values():
                yield order, CoalitionFailed("the process that waited at the fit's beginning has been ended")
        finally:
            if left:
                self.close()

    def close(self) -> None:
        """End the process that waits, and the fits that it has begun."""
        pid, self._waiting = self._waiting, 0
        if pid:
            for pipe in (self._ask, self._told):
                os.close(pipe)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)

    # ---- in the process that waits

    def _wait(self, asked: int, tell: int) -> FitOrder:
        """Wait for orders, train them by forks, and send the results; in such a fork, return its order."""
        try:
            os.close(self._ask)
            os.close(self._told)
            with os.fdopen(asked, "rb") as requests, os.fdopen(tell, "wb") as results:
                while True:
                    orders, self._folder, jobs, limit_s = pickle.load(requests)
                    tasks = [(place, partial(self._go_on, order)) for place, order in enumerate(orders)]
                    for found in supervise(tasks, jobs, limit_s):
                        pickle.dump(found, results)
                        results.flush()
        except GoOn:
            return self._order
        except BaseException:
            os._exit(1)

    def _go_on(self, order: FitOrder) -> None:
        self._order = order
        raise GoOn

    # ---- in the fork of a coalition

    def _begin(
        self, trainer: L.Trainer, module: L.LightningModule, measures: Mapping[str, str | ModelScore], order: FitOrder
    ) -> None:
        """Change the Trainer into the coalition's, and call the ``setup`` that its loop's setup has begun."""
        held: Any = trainer
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        self._kept = list(trainer.loggers)  # a logger without its threads cannot be ended
        held._checkpoint_connector._restore_modules_and_callbacks = _nothing  # of a run that is resumed
        data: FederatedDataModule = held.datamodule
        scoring = into_a_coalitions_fit(trainer, data, measures, order, self._folder, lambda: answer(scoring.result()))
        callbacks_of(trainer).insert(0, _Ends(scoring.result))
        held._callback_connector._attach_model_logging_functions()  # which a copy's own fit does
        next(each for each in callbacks_of(trainer) if hasattr(each, "without_files")).setup(trainer, module, "fit")


class _Ends(L.Callback):
    """Callback that ends a coalition's fork when its fit ends otherwise than by its last round.

    Args:
        result: a function that returns the fit's result.
    """

    def __init__(self, result: Callable[[], FitResult]) -> None:
        self._result = result

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, NoModel):
            answer(self._result())  # the last finite model counts
        fail(f"{type(exception).__name__}: {exception}")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        fail("the fit has ended before its last round")


def _nothing(*_: Any, **__: Any) -> None:
    return None
