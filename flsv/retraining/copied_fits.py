"""CopiedFits: trains coalitions, each by the ordinary fit of a copy of the run with the coalition's members only.

The fits run one after the other in this process, or by joblib in several.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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

from flsv._lightning.patches import callbacks_of, do_nothing
from flsv.engines.ranks import FederatedStrategy
from flsv.retraining.coalition_fit import prepare_coalition_fit
from flsv.retraining.fit_order import FitFailed, FitOrder, FitResult
from flsv.retraining.own_folder import ProgramFolder
from flsv.scores.performance import ModelScore
from flsv.server.round_server import NoModel
from flsv.training.module_snapshot import ModuleSnapshot
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.plain_values import are_equal
from flsv.utilities.program_state import restored_program
from flsv.utilities.run_copy import RunCopy

#: The performance measures by which models of coalitions are scored, by name.
Measures = Mapping[str, str | ModelScore]

#: What to do if a coalition finds files otherwise than the run.
HOW_TO_MAKE_AGAIN = (
    "A coalition repeats the run, and finds files elsewhere as they are now. Let the program accept what is there "
    "(exist_ok=True, mode 'w'), name files by paths relative to the working folder, or leave the callback out, "
    "ShadowShapley(excluded_callbacks=['ItsClass'])."
)


class CopyOfRun(RunCopy):
    """A copy of a run, with the folder in which copies work."""

    folder: ProgramFolder


def copy_of_run(
    trainer: L.Trainer,
    module: Any,
    data: Any,
    excluded: Collection[L.Callback] = (),
) -> CopyOfRun:
    """Copy a run before its fit. On several ranks, a copy trains on the device of this rank alone. Callbacks that are
    ``excluded`` do nothing in a copy.
    """
    # Each is a constructor and its arguments, which make the object's copy.
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

    folder = ProgramFolder(_folders_of(trainer))
    run_copy = CopyOfRun(
        trainer,
        module,
        data=data,
        reductions=reductions,
        locations=folder.locations,
    )
    run_copy.folder = folder
    return run_copy


def _folders_of(trainer: L.Trainer) -> list[str]:
    """Return the folders that a Trainer writes into."""
    folders: list[Any] = [trainer.default_root_dir]
    folders += [logger.save_dir for logger in trainer.loggers]
    folders += [getattr(callback, "dirpath", None) for callback in callbacks_of(trainer)]
    return [str(folder) for folder in folders if folder and os.path.isabs(folder)]


class KeptRun:
    """The weights, optimizers and attributes of a run at one time, which :meth:`restore` writes back."""

    def __init__(self, trainer: L.Trainer) -> None:
        module = trainer.lightning_module
        optimizer_states = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
        tensors = [
            *module.parameters(),
            *module.buffers(),
            *tree_leaves(optimizer_states),
        ]

        self._snapshot = ModuleSnapshot(module)
        self._tensors: list[tuple[Tensor, Tensor]] = []
        for tensor in tensors:
            if isinstance(tensor, Tensor) and not is_lazy(tensor):
                self._tensors.append((tensor, tensor.detach().clone()))

    @torch.no_grad()
    def restore(self) -> bool:
        """Write the state back. Return whether tensors have changed."""
        self._snapshot.restore()
        is_changed = False
        for tensor, original in self._tensors:
            if not are_equal(tensor.detach(), original):
                tensor.copy_(original)
                is_changed = True
        return is_changed


def train_coalition(
    run_copy: CopyOfRun,
    measures: Measures,
    order: FitOrder,
) -> FitResult | FitFailed:
    """Train one coalition in this process, and return its result, or the error by which its fit has ended."""
    try:
        with in_quiet() as changed_tensors:
            result = _fit_with_what_it_needs(run_copy, measures, order)
        changed_files = run_copy.folder.changed_files
        return replace(result, changed_tensors=[*changed_tensors, *changed_files])
    except ConfigurationError:
        raise
    except FileExistsError as error:
        return FitFailed(f"{error}. {HOW_TO_MAKE_AGAIN}")
    except Exception as error:
        return FitFailed(f"{type(error).__name__}: {error}")


def _fit_with_what_it_needs(
    run_copy: CopyOfRun,
    measures: Measures,
    order: FitOrder,
) -> FitResult:
    """Fit a copy of the run, and if this fails without validations, fit it with them."""
    if order.is_whole:
        return _fit_copy(run_copy, measures, order)
    try:
        return _fit_copy(run_copy, measures, order)
    except (ConfigurationError, TimeoutError):
        raise
    except Exception:  # NeedsValidation, or an error of a hook that misses what validations leave
        order_with_validations = replace(order, is_whole=True)
    return _fit_copy(run_copy, measures, order_with_validations)


def _fit_copy(run_copy: CopyOfRun, measures: Measures, order: FitOrder) -> FitResult:
    """Fit a copy of the run to the members in ``order``, in a folder of its own."""
    with (
        run_copy.folder.entered() as folder,
        given_up_after(order.max_wait) as wait_for_round,
    ):
        trainer, module, data = run_copy.load()
        if not isinstance(module, L.LightningModule):  # what makes it
            module = module()
        callback = prepare_coalition_fit(
            trainer,
            module,
            data,
            measures=measures,
            order=order,
            folder=folder,
        )
        callback.wait_for_round = wait_for_round
        with suppress(NoModel):  # the last finite model counts
            fit_quietly(trainer, module, data)
        return callback.result()


@contextmanager
def given_up_after(seconds: float | None) -> Iterator[Callable[[float | None], None]]:
    """Raise TimeoutError in this context after some seconds, unless the function that it yields begins to wait anew.

    Only the main thread of a POSIX system can be interrupted.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    has_timer = hasattr(signal, "setitimer")
    if seconds is None or not is_main_thread or not has_timer:
        yield do_nothing
        return

    def wait(seconds: float | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds or 0)

    def give_up(*_: Any) -> None:
        raise TimeoutError(f"it has begun no round for {seconds:.0f} s, and is given up")

    handler = signal.signal(signal.SIGALRM, give_up)
    wait(seconds)
    try:
        yield wait
    finally:
        wait(None)
        signal.signal(signal.SIGALRM, handler)


def fit_quietly(trainer: L.Trainer, module: Any, data: Any) -> None:
    """Fit, and raise KeyboardInterrupt where Lightning would end the process."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(module, data)
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            # Lightning ignores it from its first interrupt on.
            signal.signal(signal.SIGINT, handler)
            raise KeyboardInterrupt from None
        raise


@contextmanager
def collected_garbage() -> Iterator[None]:
    """Free at the end of this context what was made in it: the parts of a copy refer to each other, and Python alone
    would free them at some later time. Nothing that was there before is looked at."""
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()


@contextmanager
def in_quiet() -> Iterator[list[str]]:
    """Print, log and warn nothing in this context. At its end restore the program as :func:`restored_program` does, and
    free what was made."""
    disabled_level = logging.root.manager.disable
    try:
        with ExitStack() as stack:
            stack.enter_context(collected_garbage())
            changed_tensors = stack.enter_context(restored_program())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            logging.disable(logging.CRITICAL)
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(torch.enable_grad())
            yield changed_tensors
    finally:
        logging.disable(disabled_level)


class CopiedFits:
    """Trainer of coalitions by fits of copies.

    Args:
        copy_of: returns the copy of the run for a seed. The last one is kept.
    """

    def __init__(
        self,
        copy_of: Callable[[int], CopyOfRun],
        measures: Measures,
    ) -> None:
        self._make_copy = copy_of
        self._measures = measures
        self._copy: CopyOfRun | None = None
        self._seed_of_copy: int | None = None

    def train(self, orders: Sequence[FitOrder]) -> Iterator[tuple[FitOrder, FitResult | FitFailed]]:
        """Train the coalitions. Yield each order with its result or error, in any order if there are several jobs."""
        shares_files = any(self.copy_of(order.seed).folder.shares_files for order in orders[:1])
        if shares_files or not _has_workers():
            for order in orders:
                run_copy = self.copy_of(order.seed)
                result = train_coalition(run_copy, self._measures, order)
                yield order, result
            return
        yield from self._train_at_workers(orders)

    def copy_of(self, seed: int) -> CopyOfRun:
        """Return the copy of the run for a seed."""
        if self._copy is None or self._seed_of_copy != seed:
            self._copy = self._make_copy(seed)
            self._seed_of_copy = seed
            self._copy.folder.take_over_run()
        return self._copy

    def _train_at_workers(
        self, orders: Sequence[FitOrder]
    ) -> Iterator[tuple[FitOrder, FitResult | FitFailed]]:
        train_at_worker = joblib.delayed(_train_at_worker)
        program_state = _ProgramState(
            import_path=sys.path,
            folder=os.getcwd(),
            num_threads=torch.get_num_threads(),
            process=os.getpid(),
        )
        folders: list[ProgramFolder] = []

        def calls() -> Iterator[Any]:
            for index, order in enumerate(orders):
                run_copy = self.copy_of(order.seed)
                folders.insert(0, run_copy.folder)
                yield train_at_worker(
                    program_state,
                    index,
                    run_copy=run_copy,
                    measures=self._measures,
                    order=order,
                )

        parallel = joblib.Parallel(
            return_as="generator_unordered",
            pre_dispatch="n_jobs",
        )
        try:
            for index, result in parallel(calls()):
                if isinstance(result, ConfigurationError):
                    raise result
                yield orders[index], result
        finally:
            for folder in folders:
                folder.put_back()


def _has_workers() -> bool:
    """Return whether ``joblib.parallel_config`` has set a backend, or several jobs."""
    backend, num_jobs = get_active_backend()
    has_several_jobs = num_jobs not in (None, 1)
    is_default_backend = isinstance(backend, LokyBackend)
    return has_several_jobs or not is_default_backend


@dataclass(frozen=True)
class _ProgramState:
    """State of a program that its workers take over."""

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
    """Let this process end when its parent ``process`` has ended, as by a kill. One of another machine has none."""

    def watch() -> None:
        while os.getppid() == process:
            time.sleep(1)
        os._exit(1)

    if os.getppid() == process:
        threading.Thread(target=watch, daemon=True).start()


def _train_at_worker(
    program_state: _ProgramState,
    index: int,
    run_copy: CopyOfRun,
    measures: Measures,
    order: FitOrder,
) -> tuple[int, FitResult | FitFailed | ConfigurationError]:
    program_state.enter()
    try:
        return index, train_coalition(run_copy, measures, order)
    except ConfigurationError as error:
        return index, error
