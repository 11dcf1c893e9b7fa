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
from dataclasses import dataclass, replace
from typing import Any

import joblib
import lightning as L
import torch
from joblib._parallel_backends import LokyBackend
from joblib.parallel import get_active_backend
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from flsv._lightning.patches import callbacks_of, find_loop, is_loop
from flsv.engines.ranks import FederatedStrategy
from flsv.games.coalition_utility import Measure
from flsv.games.trained_game import OutputScore
from flsv.retraining.coalition_fit import (
    GlobalModelScoring,
    change_in_place,
    coalition_loop,
    prepare_coalition_fit,
)
from flsv.retraining.fit_order import FitFailed, FitOrder, FitResult
from flsv.sampling import FullParticipation
from flsv.scores.performance import ModelScore
from flsv.server.round_server import NoModel
from flsv.utilities.choices import Participation
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
    # With "all", all members of a coalition train in every round.
    participation: Participation = "drawn"
    # Names of classes of callbacks that take no part.
    left_out: frozenset[str] = frozenset()

    @classmethod
    def by(cls, measure: Measure, participation: Participation = "drawn") -> Scoring:
        """Make the scoring by one measure, called :data:`UTILITY_NAME`, or by several names."""
        if isinstance(measure, str | ModelScore):
            return cls({UTILITY_NAME: measure}, participation)
        return cls({name: name for name in measure}, participation)


def train_coalition(
    run_copy: RunCopy,
    scoring: Scoring,
    order: FitOrder,
) -> FitResult | FitFailed:
    """Train one coalition in this process, and return its result, or the error by which its fit has ended."""
    with _in_quiet(), _new_folder() as folder:
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
    run_state: Any = None
    if order.checkpoint is not None:
        checkpoint: Any = torch.load(order.checkpoint, map_location="cpu", weights_only=True)
        run_state = checkpoint["state_dict"]

    callback = prepare_coalition_fit(
        trainer,
        module,
        data,
        measures=scoring.measures,
        order=order,
        folder=folder,
    )
    with suppress(NoModel):  # the last finite model counts
        _fit(trainer, module, data)
    result = callback.result()
    if order.save_as is not None:
        L.Trainer.save_checkpoint(trainer, order.save_as, weights_only=True)

    if result.models is None or run_state is None:
        return result
    module.load_state_dict(run_state)
    checkpoint_model = callback.space.read(module).cpu()
    models = replace(result.models, checkpoint=checkpoint_model)
    return replace(result, models=models)


def _load(run_copy: RunCopy, scoring: Scoring) -> tuple[Any, Any, Any]:
    trainer, module, data = run_copy.load()
    if not isinstance(module, L.LightningModule):  # what makes it
        module = module()
    callbacks = []
    for callback in callbacks_of(trainer):
        if is_loop(callback) and scoring.participation == "all":
            change_in_place(callback, sampler=FullParticipation())
        if type(callback).__name__ not in scoring.left_out:
            callbacks.append(callback)
    trainer.callbacks = callbacks
    return trainer, module, data


def _fit(trainer: L.Trainer, module: Any, data: Any) -> None:
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
def _in_quiet() -> Iterator[None]:
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


def _new_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="flsv-coalition-", ignore_cleanup_errors=True)


class CopiedFits:
    """Trainer of coalitions by fits of copies.

    Args:
        copy_of: returns the copy of the run for a seed. The last one is kept.
        jobs: the number of processes that train at once, by joblib. 1: this process, one fit after the other. A backend
            of ``joblib.parallel_config`` has its own number.
    """

    def __init__(
        self,
        copy_of: Callable[[int], RunCopy],
        scoring: Scoring,
        *,
        jobs: int = 1,
    ) -> None:
        self._make_copy = copy_of
        self._scoring = scoring
        self._jobs = jobs
        self._copy: RunCopy | None = None
        self._seed_of_copy: int | None = None

    def train(self, orders: Sequence[FitOrder]) -> Iterator[tuple[FitOrder, FitResult | FitFailed]]:
        """Train the coalitions. Yield each order with its result or error, in any order if there are several jobs."""
        if self._jobs == 1 and not _has_workers():
            for order in orders:
                run_copy = self.copy_of(order.seed)
                result = train_coalition(run_copy, self._scoring, order)
                yield order, result
            return
        # None: the number of jobs that the user's backend has.
        num_jobs = None if self._jobs == 1 else self._jobs
        yield from self._train_at_workers(orders, num_jobs)

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

    def predict(self, prediction: Prediction) -> Predicted:
        """Compute the clients' values that ``prediction`` requests."""
        num_clients = prediction.masks.shape[1]
        with self._evaluator(prediction.seed, num_clients) as (evaluator, weights):
            return evaluator.predict(prediction, weights)

    def has_logits(self, seed: int, num_clients: int) -> bool:
        """Return whether the outputs of models are logits."""
        with self._evaluator(seed, num_clients) as (evaluator, _weights):
            return evaluator.output_score.logits

    @contextmanager
    def _evaluator(self, seed: int, num_clients: int) -> Iterator[tuple[_Evaluator, Tensor]]:
        all_clients = FitOrder(
            members=tuple(range(num_clients)),
            seed=seed,
            is_whole=False,
        )
        with _in_quiet(), _new_folder() as folder:
            run_copy = self.copy_of(seed)
            yield _evaluator_of(run_copy, self._scoring, all_clients, folder=folder)


def _has_workers() -> bool:
    """Return whether ``joblib.parallel_config`` has set a backend."""
    backend, _jobs = get_active_backend()
    return not isinstance(backend, LokyBackend)


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


@dataclass(frozen=True, eq=False)
class Prediction:
    """Request to compute clients' values for s seeds. The outputs of untrained coalitions are predicted from those of
    trained ones.
    """

    seed: int
    # bool [K, n], the trained coalitions, the empty one first
    masks: Tensor
    # float64 [s, K, C], by C performance measures
    utilities: Tensor
    # [s, K - 1, V, ...], of all but the empty coalition
    outputs: Tensor


@dataclass(frozen=True, eq=False)
class Predicted:
    """Clients' ``values`` from predicted outputs, for s seeds and C performance measures. ``disagreement`` is the
    difference between their two predictions. Both are float64 ``[s, n, C]``.
    """

    values: Tensor
    disagreement: Tensor
    # float64 [C, n, n], the covariance of the means over the seeds between draws of as many validation samples. NaN:
    # it is not known.
    case_covariance: Tensor


def _evaluator_of(
    run_copy: RunCopy,
    scoring: Scoring,
    order: FitOrder,
    folder: str,
) -> tuple[_Evaluator, Tensor]:
    trainer, module, data = _load(run_copy, scoring)
    loop: Any = find_loop(callbacks_of(trainer))
    sampler = loop.config.sampler
    evaluator = _Evaluator(data, [*scoring.measures.values()])
    prepare_coalition_fit(
        trainer,
        module,
        data,
        measures={},
        order=order,
        folder=folder,
    )
    coalition_loop(loop, sampler, order.seed)
    _scoring, *callbacks = callbacks_of(trainer)
    untyped_trainer: Any = trainer
    untyped_trainer.callbacks = [evaluator, *callbacks]
    untyped_trainer.strategy.on_train_end = _do_nothing

    # The evaluator ends this fit before training: it only sets up the module and the data.
    _fit(trainer, module, data)
    return evaluator, loop.config.client_weights(data.num_samples)


def _do_nothing() -> None:
    pass


class _Evaluator(GlobalModelScoring):
    """Callback that makes a performance measure's evaluator, and ends the fit before training."""

    def __init__(self, data: Any, measures: list[Any]) -> None:
        measure = measures[0] if len(measures) == 1 else measures
        super().__init__(data, [measure], initial_state={}, rounds=())

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        trainer.should_stop = True
        trainer.fit_loop.min_epochs = 0

    @property
    def output_score(self) -> OutputScore:
        """Return the score of models' outputs by all measures."""
        (evaluator,) = self._evaluators
        (measure,) = self._measures
        output_score = OutputScore.for_evaluator(evaluator, measure)
        assert output_score is not None
        return output_score

    def predict(self, prediction: Prediction, weights: Tensor) -> Predicted:
        """Compute the clients' values that are requested, given their ``weights [n]`` in the average. If all
        coalitions are trained, only their covariance.
        """
        (evaluator,) = self._evaluators
        (measure,) = self._measures
        # The empty coalition's outputs, of this fit's untrained model, only matter for the covariance.
        empty_outputs = torch.zeros_like(prediction.outputs[:, :1])
        if self.untrained_scores[0].outputs is not None:
            empty_outputs[:] = self.untrained_scores[0].outputs
        outputs = torch.cat([empty_outputs, prediction.outputs], 1)

        predictions = []
        for utilities, seed_outputs in zip(prediction.utilities, outputs):
            values_of_seed = self.output_score.shapley(
                prediction.masks, utilities, seed_outputs, weights
            )
            predictions.append(values_of_seed)

        measures = [measure] if isinstance(measure, str | ModelScore) else measure
        num_clients = len(weights)
        covariances = []
        for name in measures:
            score = OutputScore.for_evaluator(evaluator, name)
            assert score is not None
            covariance = score.case_covariance(prediction.masks, outputs, weights)
            if covariance is None:
                covariance = torch.full((num_clients, num_clients), torch.nan).double()
            covariances.append(covariance)
        return Predicted(
            values=torch.stack([of_seed.values for of_seed in predictions]),
            disagreement=torch.stack([of_seed.disagreement for of_seed in predictions]),
            case_covariance=torch.stack(covariances),
        )
