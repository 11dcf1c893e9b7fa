"""CopiedFits: trains coalitions, each by the ordinary fit of a copy of the run with the coalition's members only.

The fits run one after the other in this process, or in several processes by joblib.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import joblib
import lightning as L
import torch
from joblib._parallel_backends import LokyBackend
from joblib.parallel import get_active_backend
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from flsv._lightning.patches import callbacks_of
from flsv.engines.ranks import FederatedStrategy
from flsv.isolation.own_folder import ProgramFolder
from flsv.isolation.program_state import restored_program
from flsv.isolation.run_copy import RunCopy
from flsv.retraining.coalition_fit import prepare_coalition_fit
from flsv.retraining.training_job import FitFailed, FitOutcome, FitResult, TrainingJob
from flsv.scores.performance import Measures
from flsv.server.round_server import NoModel
from flsv.training.module_snapshot import ModuleSnapshot
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.plain_values import are_equal
from flsv.utilities.stop_signals import stop_if_signaled

#: Advice for programs that cannot create or read a file or folder a second time.
HOW_TO_MAKE_AGAIN = (
    "The fit of a coalition repeats the run, and files outside of the working folder are already there. Let the "
    "program accept existing files and folders (exist_ok=True, mode 'w'), name files by paths relative to the working "
    "folder, or exclude the callback from coalitions: ShadowShapley(excluded_callbacks=['ItsClass'])."
)


class CopyOfRun(RunCopy):
    """A copy of a run before its fit, with the folder in which fits of its copies work.

    On several ranks, a copy trains on the device of this rank alone. ``excluded`` callbacks do nothing in a copy.
    """

    def __init__(
        self, trainer: L.Trainer, module: Any, data: Any, excluded: Collection[L.Callback] = ()
    ) -> None:
        self.folder = ProgramFolder(_folders_of(trainer))
        super().__init__(
            trainer,
            module,
            data=data,
            reductions=_reductions(trainer, excluded),
            locations=self.folder.locations,
        )


def _reductions(trainer: L.Trainer, excluded: Collection[L.Callback]) -> dict[int, Any]:
    """Return ``{id of an object: the constructor and its arguments by which copies create the object}``."""
    reductions: dict[int, Any] = {id(callback): (L.Callback, ()) for callback in excluded}
    strategy = trainer.strategy
    if isinstance(strategy, FederatedStrategy):
        arguments = (
            strategy.root_device,
            strategy.accelerator,
            None,  # no plugin for checkpoints
            strategy.precision_plugin,
        )
        reductions[id(strategy)] = (SingleDeviceStrategy, arguments)
    return reductions


def _folders_of(trainer: L.Trainer) -> list[str]:
    folders: list[Any] = [trainer.default_root_dir]
    folders += [logger.save_dir for logger in trainer.loggers]
    folders += [getattr(callback, "dirpath", None) for callback in callbacks_of(trainer)]
    return [str(folder) for folder in folders if folder and os.path.isabs(folder)]


class KeptRun:
    """A snapshot of a run's weights, optimizers and attributes, which :meth:`restore` writes back."""

    def __init__(self, trainer: L.Trainer) -> None:
        module = trainer.lightning_module
        optimizer_states = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
        tensors = [*module.parameters(), *module.buffers(), *tree_leaves(optimizer_states)]

        self._snapshot = ModuleSnapshot(module)
        self._tensors: list[tuple[Tensor, Tensor]] = []
        for tensor in tensors:
            if isinstance(tensor, Tensor) and not is_lazy(tensor):
                self._tensors.append((tensor, tensor.detach().clone()))

    @torch.no_grad()
    def restore(self) -> bool:
        """Write the snapshot back. Return whether tensors had changed."""
        self._snapshot.restore()
        is_changed = False
        for tensor, original in self._tensors:
            if not are_equal(tensor.detach(), original):
                tensor.copy_(original)
                is_changed = True
        return is_changed


def train_coalition(run_copy: CopyOfRun, measures: Measures, job: TrainingJob) -> FitOutcome:
    """Train one coalition in this process. Return its result, or the error that ended its fit."""
    try:
        with in_quiet() as changed_tensors:
            result = _fit_with_needed_validations(run_copy, measures, job)
        changed_files = run_copy.folder.changed_files
        return replace(result, changed_tensors=[*changed_tensors, *changed_files])
    except ConfigurationError:
        raise
    except FileExistsError as error:
        return FitFailed(f"{error}. {HOW_TO_MAKE_AGAIN}")
    except Exception as error:
        return FitFailed(f"{type(error).__name__}: {error}")


def _fit_with_needed_validations(
    run_copy: CopyOfRun, measures: Measures, job: TrainingJob
) -> FitResult:
    """Fit a copy of the run. If this fails without validations, fit another copy with all that the run has."""
    try:
        return _fit_copy(run_copy, measures, job)
    except ConfigurationError:
        raise
    except Exception:  # NeedsValidation, or the error of a hook that reads results of validations
        if job.validates:
            raise
    return _fit_copy(run_copy, measures, replace(job, validates=True, keeps_checkpoints=True))


def _fit_copy(run_copy: CopyOfRun, measures: Measures, job: TrainingJob) -> FitResult:
    with run_copy.folder.entered() as folder:
        trainer, module, data = run_copy.load()
        callback = prepare_coalition_fit(
            trainer, module, data, measures=measures, job=job, folder=folder
        )
        with suppress(NoModel):  # the result has the last finite model
            fit_quietly(trainer, module, data)
        return callback.result()


def fit_quietly(trainer: L.Trainer, module: Any, data: Any) -> None:
    """Fit a module. If the user interrupts the fit, raise KeyboardInterrupt, where Lightning would end the process."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(module, data)
    except SystemExit as error:
        interrupt = error.__context__
        if isinstance(interrupt, KeyboardInterrupt):
            # Lightning ignores further interrupts after the first one.
            signal.signal(signal.SIGINT, handler)
            raise interrupt from None  # of SIGTERM it is a Terminated
        stop_if_signaled()  # Lightning has ended the fit since it has received SIGTERM, too
        raise


@contextmanager
def collected_garbage() -> Iterator[None]:
    """Free at the end of this context the objects that were created in it. The parts of a copy refer to each other, so
    Python alone would free them at some later time. Older objects are not examined, which saves time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()


@contextmanager
def in_quiet() -> Iterator[list[str]]:
    """Suppress all output, logs and warnings in this context. At its end restore the program as
    :func:`restored_program` does, and free the objects that were created. Yield the paths of the tensors that were
    changed but could not be restored."""
    disabled_level = logging.root.manager.disable
    try:
        with ExitStack() as stack:
            stack.enter_context(collected_garbage())
            changed_tensors = stack.enter_context(restored_program())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            logging.disable(logging.CRITICAL)
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(torch.enable_grad())
            yield changed_tensors
    finally:
        logging.disable(disabled_level)


class CopiedFits:
    """Trainer of coalitions by fits of copies of a run.

    Args:
        run_copy: the copy of the run from before its fit.
        measures: the performance measures by which models are scored, by name.
    """

    def __init__(self, run_copy: CopyOfRun, measures: Measures) -> None:
        self._run_copy = run_copy
        self._measures = measures
        run_copy.folder.take_over_run()

    def train(self, jobs: Sequence[TrainingJob]) -> Iterator[tuple[TrainingJob, FitOutcome]]:
        """Train the coalitions. Yield each job with its result or error, as soon as it is done."""
        if self._run_copy.folder.shares_files or not _has_workers():
            for job in jobs:
                yield job, train_coalition(self._run_copy, self._measures, job)
        else:
            yield from self._train_at_workers(jobs)

    def _train_at_workers(
        self, jobs: Sequence[TrainingJob]
    ) -> Iterator[tuple[TrainingJob, FitOutcome]]:
        delayed_training = joblib.delayed(_train_at_worker)
        program_state = _ProgramState(
            import_path=sys.path,
            folder=os.getcwd(),
            num_threads=torch.get_num_threads(),
            process=os.getpid(),
        )
        calls = (
            delayed_training(program_state, self._run_copy, self._measures, job, index)
            for index, job in enumerate(jobs)
        )
        parallel = joblib.Parallel(return_as="generator_unordered", pre_dispatch="n_jobs")
        try:
            for index, result in parallel(calls):
                if isinstance(result, ConfigurationError):
                    raise result
                yield jobs[index], result
        finally:
            self._run_copy.folder.put_back()


def _has_workers() -> bool:
    """Return whether the user has set a backend or several processes by ``joblib.parallel_config``."""
    backend, num_jobs = get_active_backend()
    has_several_jobs = num_jobs not in (None, 1)
    is_default_backend = isinstance(backend, LokyBackend)
    return has_several_jobs or not is_default_backend


@dataclass(frozen=True)
class _ProgramState:
    """State of a program that its worker processes get, too."""

    import_path: list[str]
    folder: str
    num_threads: int
    process: int

    def enter(self) -> None:
        _end_with(self.process)
        sys.path[:] = self.import_path
        with suppress(OSError):  # a worker on another machine has no such folder
            os.chdir(self.folder)
        torch.set_num_threads(self.num_threads)


@cache
def _end_with(process: int) -> None:
    """Let this process end when its parent ``process`` has ended, such as by a kill. A worker on another machine has
    another parent, and is not watched."""

    def watch() -> None:
        while os.getppid() == process:
            time.sleep(1)
        os._exit(1)

    if os.getppid() == process:
        threading.Thread(target=watch, daemon=True).start()


def _train_at_worker(
    program_state: _ProgramState,
    run_copy: CopyOfRun,
    measures: Measures,
    job: TrainingJob,
    index: int,
) -> tuple[int, FitOutcome | ConfigurationError]:
    program_state.enter()
    try:
        return index, train_coalition(run_copy, measures, job)
    except ConfigurationError as error:
        return index, error
