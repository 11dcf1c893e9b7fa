"""ForkedFits: trains coalitions in forks of the process as it was when the fit began.

In ``setup`` of a fit, its process is forked once, with the fit's whole initial state. For each coalition this fork
forks itself, and the new process continues the same call of ``Trainer.fit``, with the coalition's members only.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import lightning as L

from flsv._lightning.patches import callbacks_of, find_loop
from flsv._lightning.private import keep_callbacks_unrestored, let_callbacks_log
from flsv.core.ranks import ranks_of
from flsv.data import FederatedDataModule
from flsv.retraining.coalition_fit import (
    CoalitionScoring,
    prepare_coalition_fit,
)
from flsv.retraining.fit_order import FitOrder, FitResult
from flsv.retraining.readings import Reading
from flsv.scores.performance import ModelScore
from flsv.server.round_server import NoModel
from flsv.utilities.forks import num_cores, quiet_fork, why_not_fork
from flsv.utilities.own_files import no_writes, own_folder, own_view
from flsv.utilities.supervisor import (
    POLL_S,
    ChildFailed,
    ContinueInChild,
    ended_by_sigterm,
    exit_with_answer,
    exit_with_failure,
    supervise,
)

#: A coalition's fit is ended after ``TIME_LIMIT_FACTOR`` times the seconds that the run took until then, plus
#: ``EXTRA_SECONDS``.
TIME_LIMIT_FACTOR = 20
EXTRA_SECONDS = 120


def why_not_by_forks(trainer: L.Trainer) -> str | None:
    """Return why a Trainer's fit cannot be forked, or None."""
    if ranks_of(trainer).size > 1:
        return "the fit has several processes"
    if trainer.current_epoch:
        return "the Trainer goes on with an earlier fit"
    return why_not_fork(trainer.strategy.root_device)


class ForkedFits:
    """Trainer of coalitions, each in a fork of the process at the beginning of the fit."""

    is_reentrant = False

    def __init__(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        measures: Mapping[str, str | ModelScore],
        pickle_fit: Callable[[], bytes],
    ) -> None:
        self._pipe, pipe_of_fork = Pipe()
        self._pickle_fit = pickle_fit
        # Whether this process is a fork whose Trainer has become a coalition's.
        self.is_in_coalition_process = False
        self.start_time = time.monotonic()
        # The id of the fork that waits for orders. 0 in the fork itself, and after its end.
        self._waiting_process_id = quiet_fork()
        if self._waiting_process_id:  # this is the run's process
            pipe_of_fork.close()
            return
        try:
            self._pipe.close()
            order = self._wait_for_order(pipe_of_fork)  # it returns in a coalition's process only
            self._prepare_trainer(trainer, module, measures, order)
            self.is_in_coalition_process = True
        except BaseException as error:
            exit_with_failure(f"{type(error).__name__}: {error}")

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a process that waits cannot be copied")

    def __del__(self) -> None:
        if not self.is_in_coalition_process:
            self.close()

    # ---- in the run's process

    def train(
        self, orders: Sequence[FitOrder]
    ) -> Iterator[tuple[FitOrder, FitResult | ChildFailed | Reading]]:
        """Train the coalitions in parallel, and yield each order with its result or error."""
        with own_folder() as folder:
            for index, result in self._ask([*orders], str(folder)):
                yield orders[index], result

    def pickled_fit(self) -> bytes | ChildFailed:
        """Return the pickled Trainer and module in their state at the beginning of the fit, or the error."""
        answers = list(self._ask([None], folder=""))
        _, pickled_fit = answers[0]
        return pickled_fit

    def _ask(self, orders: list[FitOrder | None], folder: str) -> Iterator[tuple[int, Any]]:
        """Send orders to the waiting process, and yield ``(index, answer)``. None requests the pickled fit."""
        unanswered = set(range(len(orders)))  # indices of orders
        limit_s = limit_since(self.start_time)
        try:
            with ended_by_sigterm() as raise_if_terminated:
                request = pickle.dumps((orders, folder, num_cores(), limit_s))
                self._pipe.send_bytes(request)
                while unanswered:
                    while not self._pipe.poll(POLL_S):
                        raise_if_terminated()
                    index, result = pickle.loads(self._pipe.recv_bytes())
                    unanswered.discard(index)
                    if ends_all(index, result):
                        unanswered.clear()
                    yield index, result
        except (EOFError, OSError):
            self.close()
            failure = ChildFailed("the process that waited at the fit's beginning has been ended")
            while unanswered:
                yield unanswered.pop(), failure
        finally:
            # The caller has stopped early, and the pipe would still bring answers.
            if unanswered:
                self.close()

    def close(self) -> None:
        """End the waiting forked process and the trainings in it."""
        process_id = self._waiting_process_id
        self._waiting_process_id = 0
        if process_id == 0:  # it has been closed before
            return
        self._pipe.close()
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(process_id, 0)

    # ---- in the process that waits

    def _wait_for_order(self, pipe: Connection) -> FitOrder:
        """Wait for orders, and fork this process for each. Return the order, but only in the fork."""
        try:
            while True:
                self._answer_request(pipe)
        except ContinueInChild:  # this is the fork of one order, which `_start` has set
            return self._order
        except BaseException:
            os._exit(1)

    def _answer_request(self, pipe: Connection) -> None:
        request = pickle.loads(pipe.recv_bytes())
        orders, self._folder, num_jobs, limit_s = request
        tasks = []
        for index, order in enumerate(orders):
            task = partial(self._start, order)
            tasks.append((index, task))
        # Each task begins in a fork, where `_start` raises ContinueInChild, which leaves this function.
        with closing(supervise(tasks, num_jobs, limit_s)) as answers:
            for index, result in answers:
                pipe.send_bytes(pickle.dumps((index, result)))
                if ends_all(index, result):
                    break

    def _start(self, order: FitOrder | None) -> bytes:
        if order is None:
            return self._pickle_fit()
        self._order = order
        raise ContinueInChild

    # ---- in the fork of a coalition

    def _prepare_trainer(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        measures: Mapping[str, str | ModelScore],
        order: FitOrder,
    ) -> None:
        """Prepare the Trainer to continue this fit with the coalition in ``order`` instead of the run."""
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        folder = isolate_files(trainer, self._folder)
        keep_callbacks_unrestored(trainer)
        untyped_trainer: Any = trainer
        data: FederatedDataModule = untyped_trainer.datamodule

        # Called at the end of training, when `scoring` is set.
        def send_result_and_exit() -> None:
            exit_with_answer(scoring.result())

        scoring = prepare_coalition_fit(
            trainer,
            data,
            measures=measures,
            order=order,
            folder=folder,
            on_end=send_result_and_exit,
        )
        callbacks_of(trainer).insert(0, _ExitOnError(scoring))
        let_callbacks_log(trainer)
        loop: Any = find_loop(callbacks_of(trainer))
        loop.setup(trainer, module, "fit")


def ends_all(index: int, result: Any) -> bool:
    """Return whether to drop all other orders: the order at index 0, a test of the method, has failed, or training
    reads what it lacks.
    """
    if isinstance(result, Reading):
        return True
    return index == 0 and isinstance(result, ChildFailed)


def limit_since(start_time: float) -> float:
    """Return a coalition fit's time limit in seconds. ``start_time`` is when the run started."""
    return EXTRA_SECONDS + TIME_LIMIT_FACTOR * (time.monotonic() - start_time)


def isolate_files(trainer: L.Trainer, root: str) -> str | None:
    """Redirect this process's writes to memory. If that fails, allow writes only in a new folder in ``root``, and
    return it.
    """
    written_folders = [str(trainer.default_root_dir)]
    for logger in trainer.loggers:
        if logger.save_dir:
            written_folders.append(str(logger.save_dir))
    try:
        own_view(written_folders, root)
        return None
    except OSError:  # the system gives a process no view of files of its own
        writable_folder = tempfile.mkdtemp(dir=root)
        no_writes(writable_folder)  # elsewhere
        return writable_folder


class _ExitOnError(L.Callback):
    """Callback that ends a coalition's process if the fit stops before its last round."""

    def __init__(self, scoring: CoalitionScoring) -> None:
        self._scoring = scoring

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, NoModel):  # the last finite model counts
            self._scoring.on_exception(trainer, pl_module, exception)
            exit_with_answer(self._scoring.result())
        if isinstance(exception, OSError):
            is_refused_write = exception.errno in (errno.EROFS, errno.EOVERFLOW)
            if is_refused_write:
                path = exception.filename
                exit_with_failure(
                    f"it writes {path!r}, where a coalition cannot have a file of its own"
                )
        exit_with_failure(f"{type(exception).__name__}: {exception}")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        exit_with_failure("the fit has ended before its last round")
