"""FitsInProcesses: trains coalitions in child processes, one fit in each.

No fit can then change what the module, a callback or a data set of another fit refers to.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from flsv._lightning.patches import callbacks_of, find_loop, is_loop
from flsv.data import FederatedDataModule
from flsv.games.coalition_utility import Measure
from flsv.games.trained_game import OutputScore
from flsv.retraining.coalition_fit import (
    GlobalModelScoring,
    change_in_place,
    coalition_loop,
    only_watches_the_run,
    prepare_coalition_fit,
)
from flsv.retraining.fit_order import FitOrder, FitResult
from flsv.retraining.readings import Reading, ReadingRefused
from flsv.sampling import FullParticipation
from flsv.scores.performance import ModelScore
from flsv.server.round_server import NoModel
from flsv.utilities.choices import Participation
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.own_files import own_view
from flsv.utilities.supervisor import ChildFailed, supervise

#: Name of the performance measure in a fit's result, if there is only one.
UTILITY_NAME = "utility"


@dataclass(frozen=True, eq=False)
class Prediction:
    """Request to a child process to compute clients' values for s seeds. The outputs of untrained coalitions are
    predicted from those of trained ones.
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


@dataclass(frozen=True, eq=False)
class Federation:
    """Trainer, module, data and performance measure of a federation before its fit."""

    trainer: L.Trainer
    module: L.LightningModule
    data: FederatedDataModule
    measure: Measure
    # With "all", all members of a coalition train in every round.
    participation: Participation = "drawn"


def process_request(
    request: FitOrder | Prediction, federation: Federation, folder: str
) -> FitResult | Predicted | ConfigurationError:
    """Process a request in this process. Return its result, or the ConfigurationError that it raised. The fit writes
    its files into ``folder``.
    """
    if federation.participation == "all":
        for callback in callbacks_of(federation.trainer):
            if is_loop(callback):
                change_in_place(callback, sampler=FullParticipation())
    # A ConfigurationError is no failure of the process. It is returned, so that the caller raises it.
    try:
        if isinstance(request, Prediction):
            return _predict(request, federation)
        return _train(request, federation, folder)
    except ConfigurationError as error:
        return error


def _train(order: FitOrder, federation: Federation, folder: str) -> FitResult:
    trainer = federation.trainer
    module = federation.module

    run_state: Any = None
    if order.checkpoint is not None:
        checkpoint: Any = torch.load(order.checkpoint, map_location="cpu", weights_only=True)
        run_state = checkpoint["state_dict"]
    if order.save_as is None:
        _redirect_writes(trainer, folder)

    scoring = prepare_coalition_fit(
        trainer,
        federation.data,
        measures=_measures_of(federation),
        order=order,
        folder=folder,
    )
    with suppress(NoModel):  # the last finite model counts
        trainer.fit(module, federation.data)
    result = scoring.result()
    if order.save_as is not None:
        trainer.save_checkpoint(order.save_as, weights_only=True)

    if result.models is None or run_state is None:
        return result
    module.load_state_dict(run_state)
    checkpoint_model = scoring.space.read(module).cpu()
    models = replace(result.models, checkpoint=checkpoint_model)
    return replace(result, models=models)


def _measures_of(federation: Federation) -> dict[str, Any]:
    measure = federation.measure
    if isinstance(measure, str | ModelScore):
        return {UTILITY_NAME: measure}
    return {name: name for name in measure}


def _redirect_writes(trainer: L.Trainer, folder: str) -> None:
    """Redirect this process's writes to memory, so that no coalition reads what another one has written."""
    view = tempfile.mkdtemp(dir=folder)
    with suppress(OSError):  # where a system gives a process no view of files of its own
        own_view([trainer.default_root_dir], view)


def _predict(prediction: Prediction, federation: Federation) -> Predicted:
    trainer = federation.trainer
    callbacks: list[Any] = callbacks_of(trainer)
    loop = find_loop(callbacks)
    evaluator = _Evaluator(federation)
    training_callbacks = []
    for callback in callbacks:
        if callback is not loop and not only_watches_the_run(callback):
            training_callbacks.append(callback)

    quiet_loop = coalition_loop(loop, loop.config.sampler, prediction.seed)
    callbacks[:] = [evaluator, *training_callbacks, quiet_loop]  # the trainer's own list
    trainer.loggers = []
    # The evaluator ends this fit before training: it only sets up the module and the data.
    trainer.fit(federation.module, federation.data)
    weights = loop.config.client_weights(federation.data.num_samples)
    return evaluator.predict(prediction, weights)


class _Evaluator(GlobalModelScoring):
    """Callback that makes a performance measure's evaluator, and ends the fit before training."""

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation.data, [federation.measure], None, rounds=())

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        trainer.should_stop = True
        trainer.fit_loop.min_epochs = 0

    def predict(self, prediction: Prediction, weights: Tensor) -> Predicted:
        """Compute the clients' values that are requested, given their ``weights [n]`` in the average. If all
        coalitions are trained, only their covariance.
        """
        (evaluator,) = self._evaluators
        (measure,) = self._measures
        output_score = OutputScore.for_evaluator(evaluator, measure)
        assert output_score is not None
        # The empty coalition's outputs, of this process's untrained model, only matter for the covariance.
        empty_outputs = torch.zeros_like(prediction.outputs[:, :1])
        if self.untrained_scores[0].outputs is not None:
            empty_outputs[:] = self.untrained_scores[0].outputs
        outputs = torch.cat([empty_outputs, prediction.outputs], 1)

        predictions = []
        for utilities, seed_outputs in zip(prediction.utilities, outputs):
            values_of_seed = output_score.shapley(
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


class FitsInProcesses:
    """Trainer of coalitions in child processes, see :class:`flsv.retraining.fit_order.CoalitionTrainer`."""

    is_reentrant = True

    def __init__(
        self,
        # Returns what a child process calls for a request.
        make_task: Callable[[FitOrder | Prediction], Callable[[], Any]],
        # The most processes at once.
        num_jobs: int = 1,
        # After so many seconds a process is ended.
        limit_s: float | None = None,
        # Runs tasks in child processes, as `supervise` does.
        run: Callable[..., Iterator[tuple[Any, Any]]] = supervise,
    ) -> None:
        self._make_task = make_task
        self._num_jobs = num_jobs
        self._limit_s = limit_s
        self._supervise = run

    def train(
        self, orders: Sequence[FitOrder]
    ) -> Iterator[tuple[FitOrder, FitResult | ChildFailed | Reading]]:
        """Train the coalitions, and yield each order with its result or error. Raise its ConfigurationError."""
        tasks = [(index, self._make_task(order)) for index, order in enumerate(orders)]
        for index, result in self._supervise(tasks, self._num_jobs, self._limit_s):
            if isinstance(result, ConfigurationError):
                raise result
            yield orders[index], result

    def predict(self, prediction: Prediction) -> Predicted:
        """Compute, in a child process, the clients' values that ``prediction`` requests."""
        tasks = [(0, self._make_task(prediction))]
        answers = list(self._supervise(tasks, self._num_jobs, self._limit_s))
        _, answer = answers[0]  # of the only task
        if isinstance(answer, ConfigurationError):
            raise answer
        if isinstance(answer, Reading):
            raise ReadingRefused(answer)
        if isinstance(answer, ChildFailed):
            raise ConfigurationError(f"the outputs of coalitions could not be scored: {answer}")
        return answer
