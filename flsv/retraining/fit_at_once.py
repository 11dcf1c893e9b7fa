"""The fit of a copy of a run in which many coalitions train at once, each as a row of stacked tensors.

The copy trains the coalition of all clients, as the run does. In each round a client begins once and its batches are
loaded once. The models of all coalitions that it belongs to then take their steps on them together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
from torch import Tensor

from flsv._lightning.patches import callbacks_of, find_loop, is_loop
from flsv.data import FederatedDataModule
from flsv.games.members import Members, masks_of
from flsv.games.model_evaluator import ModelEvaluator
from flsv.models.classifier import ClassifierClient
from flsv.retraining.coalition_fit import (
    CoalitionScoring,
    callbacks_that_train,
    only_watches_clients,
    prepare_coalition_fit,
)
from flsv.retraining.copied_fits import CopyOfRun, fit_quietly, in_quiet
from flsv.retraining.price import MAX_ELEMENTS_OF_MODEL, RowTrial
from flsv.retraining.training_job import FitModels, FitResult, TrainingJob
from flsv.scores.performance import Measures
from flsv.server.coalition_server import (
    AveragedCoalitions,
    ServedCoalitions,
    metric_of_aggregator,
    only_averages,
)
from flsv.training.algorithms.base import ClientAlgorithm, is_proximal
from flsv.utilities.errors import NotBatched, reason_of
from flsv.values.coalition_files import ScoredModel
from flsv.vmap.coalition_rows import CoalitionRows


def fit_at_once(
    run_copy: CopyOfRun,
    measures: Measures,
    job: TrainingJob,
    coalitions: Sequence[Members],
    witnesses: Collection[Members],
    joins_clients: bool,
) -> dict[Members, FitResult]:
    """Train ``coalitions`` at once by one fit of a copy of the run, and return their results.

    Args:
        run_copy: the copy of the run from before its fit.
        measures: the performance measures by which models are scored, by name.
        job: the request for the coalition of all clients. That for each coalition has other members only.
        coalitions: the coalitions besides that of all clients, whose result is returned, too.
        witnesses: the coalitions whose results have the models after ``job.model_rounds``, too.
        joins_clients: whether the rows of all clients take their steps together.

    Raises:
        NotBatched: the coalitions cannot be trained at once.
        torch.OutOfMemoryError: they do not fit into the memory together.
    """
    with in_quiet() as changed_tensors, run_copy.folder.entered() as folder:
        trainer, module, data = run_copy.load()
        scoring: Any = prepare_coalition_fit(
            trainer,
            module,
            data,
            measures=measures,
            job=job,
            folder=folder,
            make_scoring=partial(ScoringAtOnce, coalitions=coalitions, witnesses=witnesses),
        )
        loop = find_loop(callbacks_of(trainer))
        loop.set_arguments(engine=partial(CoalitionRows, joins_clients=joins_clients))
        CoalitionRows.guard_first_hooks(module, data)
        fit_quietly(trainer, module, data)
        results: dict[Members, FitResult] = scoring.results()

    changes = [*changed_tensors, *run_copy.folder.changed_files]
    if changes:
        raise NotBatched(
            f"training changes {changes[0]}, which the program keeps outside of the module."
        )
    return results


def try_rows(trainer: L.Trainer) -> RowTrial:
    """Try in the fit of a copy of the run, at its first batch, whether coalitions can be trained at once."""
    loop: Any = find_loop(callbacks_of(trainer))
    num_elements = loop.space.size
    if num_elements > MAX_ELEMENTS_OF_MODEL:
        return RowTrial(f"the model has {num_elements} numbers.")
    try:
        dry_run = CoalitionRows.trial(trainer, loop)
    except Exception as error:  # whatever it is, coalitions are trained one by one
        return RowTrial(reason_of(error))
    return RowTrial(
        "",
        dry_run.megaflops,
        num_elements=num_elements,
        joins_clients=not dry_run.kind.shares_batch,
        enlarges_rounding=dry_run.enlarges_rounding,
    )


def why_not_at_once(trainer: L.Trainer) -> str:
    """Return why coalitions of a run cannot be trained in one fit. Empty: no reason is known before the fit."""
    for callback in callbacks_that_train(trainer, keeps_checkpoints=False):
        if not is_loop(callback):
            name = type(callback).__name__
            return (
                f"{name} takes part in training. If it only watches, leave it out of the training of groups: "
                f"ShadowShapley(excluded_callbacks=[{name!r}])."
            )
    return _why_not_on_server(find_loop(callbacks_of(trainer)))


def _why_not_on_server(loop: Any) -> str:
    config = loop.config
    if config.uploads:
        return f"{config.uploads[0]!r} has a state for each client and coalition."
    for role, strategy in config.strategies.items():
        if role == "client_algorithm" and only_watches_clients(loop):
            continue  # coalitions are trained without it
        if isinstance(strategy, ClientAlgorithm) and is_proximal(strategy):
            continue  # it sends nothing, since all clients start from the model of their coalition
        if strategy.sends or strategy.reports:
            return f"{strategy!r} sends or reports tensors."
    if metric_of_aggregator(config):
        return f"{config.aggregator!r} reads a metric."
    return ""


class ScoringAtOnce(CoalitionScoring):
    """Callback that scores the models of all coalitions in a fit that trains them at once."""

    def __init__(
        self,
        data: FederatedDataModule,
        measures: Measures,
        job: TrainingJob,
        coalitions: Sequence[Members],
        witnesses: Collection[Members],
    ) -> None:
        super().__init__(data, measures, job)
        self._members_by_row = list(coalitions)
        self._witnesses = witnesses
        # Whether models are small and linear, so that all coalitions' models are scored at once, too.
        self._joins_clients = False
        self._servers: AveragedCoalitions | ServedCoalitions | None = None
        self._scored: dict[Members, list[ScoredModel]] = {members: [] for members in coalitions}
        self._vectors: dict[Members, dict[int, Tensor]] = {members: {} for members in coalitions}

    def _begin_round(self, trainer: L.Trainer) -> None:
        super()._begin_round(trainer)
        if self._servers is not None:
            return
        loop: Any = find_loop(callbacks_of(trainer))
        federation = loop.run.info()
        masks = masks_of(self._members_by_row, federation.num_clients)
        kind = AveragedCoalitions if only_averages(federation) else ServedCoalitions
        self._servers = kind(masks, federation)
        constants = {}
        module = trainer.lightning_module
        if isinstance(module, ClassifierClient):
            constants = module.constants_of(self._members_by_row)
        loop.run.engine.train_for(self._servers, constants)

    def _end_round(self, trainer: L.Trainer) -> None:
        super()._end_round(trainer)
        self._check_model_of_copy(trainer)
        round_index = trainer.current_epoch - 1
        is_last = round_index == self._job.rounds[-1]
        if round_index in self._job.rounds and not is_last:
            self._score_rows()

    def _keep_model(self, trainer: L.Trainer, round_index: int) -> None:
        super()._keep_model(trainer, round_index)
        if round_index not in self._job.model_rounds:
            return
        assert self._servers is not None
        for members, model in zip(self._members_by_row, self._servers.models):
            if members in self._witnesses:
                self._vectors[members][round_index] = model.cpu().clone()

    def deliver(self, trainer: L.Trainer) -> None:
        super().deliver(trainer)
        self._check_model_of_copy(trainer)
        self._score_rows()

    def _check_model_of_copy(self, trainer: L.Trainer) -> None:
        loop: Any = find_loop(callbacks_of(trainer))
        loop.run.engine.check_model()
        self._joins_clients = loop.run.engine.joins_clients

    def _score_rows(self) -> None:
        assert self._servers is not None
        if self._joins_clients:
            for evaluator in self._scoring.evaluators:
                if isinstance(evaluator, ModelEvaluator):
                    evaluator.score_in_chunks()
        models = self._scoring.score_vectors(list(self._servers.models))
        for members, model in zip(self._members_by_row, models):
            self._scored[members].append(model)

    def results(self) -> dict[Members, FitResult]:
        """Return the results of the coalitions, after the end of training, except those whose server would do more
        than average.
        """
        result_of_all = self.result()
        results = {self._job.members: result_of_all}
        assert self._servers is not None
        for members, needs_server in zip(self._members_by_row, self._servers.needs_server):
            if needs_server:
                continue
            results[members] = replace(
                result_of_all,
                scored=self._scored[members],
                models=FitModels(self._initial_model, after_round=self._vectors[members]),
                first_updates={},
            )
        return results
