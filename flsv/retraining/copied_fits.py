"""CopiedFits: trains coalitions, each by the ordinary fit of a copy of the run with the coalition's members only.

The fits run one after the other in this process, or by joblib in several.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any

import joblib
import lightning as L
import torch
from joblib._parallel_backends import LokyBackend
from joblib.parallel import get_active_backend
from lightning.pytorch.strategies import SingleDeviceStrategy

from flsv._lightning.patches import callbacks_of
from flsv.engines.ranks import FederatedStrategy
from flsv.games.coalition_utility import Measure
from flsv.retraining.coalition_fit import prepare_coalition_fit
from flsv.retraining.fit_order import FitFailed, FitOrder, FitResult
from flsv.scores.performance import ModelScore
from flsv.server.round_server import NoModel
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.run_copy import RunCopy
from flsv.utilities.seeding import global_rngs, restore_global_rngs

#: Name of the performance measure in a fit's result, if there is only one.
UTILITY_NAME = "utility"


def copy_of_run(trainer: L.Trainer, module: Any, data: Any) -> RunCopy:
    """Copy a run before its fit. On several ranks, a copy trains on the device of this rank alone."""
    reductions = {}
    strategy = trainer.strategy
    if isinstance(strategy, FederatedStrategy):
        arguments = (
            strategy.root_device,
            strategy.accelerator,
            None,  # no plugin for checkpoints
            strategy.precision_plugin,
        )
        reductions[id(strategy)] = (SingleDeviceStrategy, arguments)
    return RunCopy(trainer, module, data=data, reductions=reductions)


@dataclass(frozen=True, eq=False)
class Scoring:
    """How the models of coalitions are scored."""

    # {name: performance}, or those of one measure, see `measures_of`.
    measures: Mapping[str, str | ModelScore]
    # Names of classes of callbacks that take no part.
    left_out: frozenset[str] = frozenset()

    @classmethod
    def by(cls, measure: Measure) -> Scoring:
        """Make the scoring by one measure, called :data:`UTILITY_NAME`, or by several names."""
        if isinstance(measure, str | ModelScore):
            return cls({UTILITY_NAME: measure})
        return cls({name: name for name in measure})


def train_coalition(
    run_copy: RunCopy,
    scoring: Scoring,
    order: FitOrder,
) -> FitResult | FitFailed:
    """Train one coalition in this process, and return its result, or the error by which its fit has ended."""
    with in_quiet(), new_folder() as folder:
        try:
            return _trained(run_copy, scoring, order, folder)
        except ConfigurationError:
            raise
        except Exception as error:
            return FitFailed(f"{type(error).__name__}: {error}")


def _trained(
    run_copy: RunCopy,
    scoring: Scoring,
    order: FitOrder,
    folder: str,
) -> FitResult:
    trainer, module, data = _load(run_copy, scoring)
    callback = prepare_coalition_fit(
        trainer,
        module,
        data,
        measures=scoring.measures,
        order=order,
        folder=folder,
    )
    with suppress(NoModel):  # the last finite model counts
        fit_quietly(trainer, module, data)
    return callback.result()


def _load(run_copy: RunCopy, scoring: Scoring) -> tuple[Any, Any, Any]:
    trainer, module, data = run_copy.load()
    if not isinstance(module, L.LightningModule):  # what makes it
        module = module()
    callbacks = []
    for callback in callbacks_of(trainer):
        if type(callback).__name__ not in scoring.left_out:
            callbacks.append(callback)
    trainer.callbacks = callbacks
    return trainer, module, data


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
def in_quiet() -> Iterator[None]:
    """Print, log and warn nothing in this context, and restore global generators."""
    disabled_level = logging.root.manager.disable
    states = global_rngs()
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            logging.disable(logging.CRITICAL)
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(torch.enable_grad())
            yield
    finally:
        logging.disable(disabled_level)
        restore_global_rngs(states)


def new_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="flsv-coalition-", ignore_cleanup_errors=True)


class CopiedFits:
    """Trainer of coalitions by fits of copies.

    Args:
        copy_of: returns the copy of the run for a seed. The last one is kept.
    """

    def __init__(
        self,
        copy_of: Callable[[int], RunCopy],
        scoring: Scoring,
    ) -> None:
        self._make_copy = copy_of
        self._scoring = scoring
        self._copy: RunCopy | None = None
        self._seed_of_copy: int | None = None

    def train(self, orders: Sequence[FitOrder]) -> Iterator[tuple[FitOrder, FitResult | FitFailed]]:
        """Train the coalitions. Yield each order with its result or error, in any order if there are several jobs."""
        if not _has_workers():
            for order in orders:
                run_copy = self.copy_of(order.seed)
                result = train_coalition(run_copy, self._scoring, order)
                yield order, result
            return
        # None: the number of jobs of joblib.parallel_config.
        yield from self._train_at_workers(orders, num_jobs=None)

    def train_in_fresh_process(self, order: FitOrder) -> FitResult | FitFailed:
        """Train a coalition in a new process."""
        # With one job joblib would train in this process.
        ((_, result),) = self._train_at_workers([order], num_jobs=2)
        return result

    def copy_of(self, seed: int) -> RunCopy:
        """Return the copy of the run for a seed."""
        if self._copy is None or self._seed_of_copy != seed:
            self._copy = self._make_copy(seed)
            self._seed_of_copy = seed
        return self._copy

    def _train_at_workers(
        self, orders: Sequence[FitOrder], num_jobs: int | None
    ) -> Iterator[tuple[FitOrder, FitResult | FitFailed]]:
        train_at_worker = joblib.delayed(_train_at_worker)
        program_state = _ProgramState(sys.path, os.getcwd(), torch.get_num_threads())
        calls = (
            train_at_worker(program_state, index, self.copy_of(order.seed), self._scoring, order)
            for index, order in enumerate(orders)
        )
        parallel = joblib.Parallel(num_jobs, return_as="generator_unordered", pre_dispatch="n_jobs")
        for index, result in parallel(calls):
            if isinstance(result, ConfigurationError):
                raise result
            yield orders[index], result


def _has_workers() -> bool:
    """Return whether ``joblib.parallel_config`` has set a backend, or several jobs."""
    backend, num_jobs = get_active_backend()
    return num_jobs not in (None, 1) or not isinstance(backend, LokyBackend)


@dataclass(frozen=True)
class _ProgramState:
    """State of a program that its workers take over."""

    import_path: list[str]
    folder: str
    num_threads: int

    def enter(self) -> None:
        sys.path[:] = self.import_path
        with suppress(OSError):  # a worker on another machine has no such folder
            os.chdir(self.folder)
        torch.set_num_threads(self.num_threads)


def _train_at_worker(
    program_state: _ProgramState,
    index: int,
    run_copy: RunCopy,
    scoring: Scoring,
    order: FitOrder,
) -> tuple[int, FitResult | FitFailed | ConfigurationError]:
    program_state.enter()
    try:
        return index, train_coalition(run_copy, scoring, order)
    except ConfigurationError as error:
        return index, error
