"""CoalitionScoring: scores the models that the fit of a copy of a run trains, of one coalition or of many at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from flsv._lightning.patches import callbacks_of, find_loop, in_turn
from flsv._lightning.round_boundary import averaged_weights
from flsv._lightning.rounding import rounding_of
from flsv.data import FederatedDataModule
from flsv.games.client_evaluation import ClientEvaluator
from flsv.games.make_evaluators import make_evaluators
from flsv.games.members import Members, masks_of
from flsv.games.model_evaluator import ModelEvaluator
from flsv.games.vector_evaluator import VectorEvaluator
from flsv.models.classifier import ClassifierClient
from flsv.retraining.scoring import ModelScoring
from flsv.retraining.training_job import FitModels, FitResult, TrainingJob
from flsv.scores.performance import Measure, Measures
from flsv.server.coalition_server import AveragedCoalitions, ServedCoalitions, only_averages
from flsv.server.round_server import NoModel
from flsv.utilities.plain_values import digest
from flsv.values.coalition_files import ScoredModel, measure_name


class CoalitionScoring(L.Callback):
    """Callback that scores the models that a copied fit trains, before the first round, after the rounds that its job
    lists, and after training.

    Args:
        data: the data module of the fit.
        measures: the performance measures by which models are scored, by name.
        job: the request for the coalition that the fit trains.
        coalitions: coalitions that train at once beside it, as rows of an engine of :class:`CoalitionRows`.
        witnesses: those of which the results have the models after ``job.model_rounds``, too.
    """

    def __init__(
        self,
        data: FederatedDataModule,
        measures: Measures,
        job: TrainingJob,
        coalitions: Sequence[Members] = (),
        witnesses: Collection[Members] = (),
    ) -> None:
        self._data = data
        self._job = job
        self._measures = measures if job.scores_rounds else {}
        self._rows = list(coalitions)
        self._witnesses = witnesses
        # The servers of the coalitions that train at once.
        self._servers: AveragedCoalitions | ServedCoalitions | None = None

        members_of_fit = [job.members, *self._rows]
        self._scored: dict[Members, dict[int, ScoredModel]] = {
            members: {} for members in members_of_fit
        }
        # The models [P] themselves, after the rounds that the job names.
        self._models: dict[Members, dict[int, Tensor]] = {members: {} for members in members_of_fit}
        self._untrained: ScoredModel | None = None
        # The last finite model, if training ended because no further model was finite.
        self._last_model: ScoredModel | None = None
        self._start_hash = ""
        self._initial_model = torch.empty(0)
        self._first_updates: Mapping[int, Tensor] = {}
        self._has_last_round_ended = False
        self._has_read_logged_values = False

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._rounding = rounding_of(trainer)
        fit_loop: Any = trainer.fit_loop
        # Models are scored at the same points as in the run: before all hooks of the first round, and after Lightning
        # has ended a round.
        fit_loop.on_advance_start = in_turn(
            partial(self._begin_round, trainer), fit_loop.on_advance_start
        )
        fit_loop.on_advance_end = in_turn(
            fit_loop.on_advance_end, partial(self._end_round, trainer)
        )

    def _begin_round(self, trainer: L.Trainer) -> None:
        if self._start_hash:
            return
        module = trainer.lightning_module
        loop: Any = find_loop(callbacks_of(trainer))
        self._start_hash = hash_of_start(module)
        self._initial_model = loop.space.read(module).cpu().clone()
        self._scoring = ModelScoring(
            self._measures, partial(self._make_evaluator, trainer, loop), copies_modules=False
        )
        if self._job.scores_untrained:
            self._untrained = self._scoring.score(module)
        if self._rows:
            self._begin_rows(loop, module)

    def _begin_rows(self, loop: Any, module: L.LightningModule) -> None:
        """Let the engine train the coalitions beside that of the job."""
        federation = loop.run.info()
        masks = masks_of(self._rows, federation.num_clients)
        kind = AveragedCoalitions if only_averages(federation) else ServedCoalitions
        self._servers = kind(masks, federation)
        constants = {}
        if isinstance(module, ClassifierClient):
            constants = module.constants_of(self._rows)
        engine = loop.run.engine
        engine.train_for(self._servers, constants)
        if engine.joins_clients:  # models are small and linear, so that all are scored at once, too
            for evaluator in self._scoring.evaluators:
                if isinstance(evaluator, ModelEvaluator):
                    evaluator.score_in_chunks()

    def _make_evaluator(self, trainer: L.Trainer, loop: Any, measure: Measure) -> VectorEvaluator:
        device = trainer.lightning_module.device
        (evaluator,) = make_evaluators(
            trainer,
            loop.space,
            self._data.val_dataloader(),
            measures={"the utility": measure},
            num_classes=self._data.known_num_classes,
            seed=loop.state.seed,
            effects=self._job.effects.get(measure_name(measure)),
            make_client_evaluator=partial(
                ClientEvaluator, loop.space, loop.clients, self._data, device
            ),
        )
        return evaluator

    def _end_round(self, trainer: L.Trainer) -> None:
        round_index = trainer.current_epoch - 1
        if round_index in self._job.model_rounds:
            self._keep_models(trainer, round_index)
        # The fit has as many rounds as the run, even if a callback wants to stop it earlier.
        is_last = round_index == self._job.rounds[-1]
        trainer.should_stop = is_last
        if is_last:  # `deliver` scores the models after all hooks at the end of training
            self._has_last_round_ended = True
            trainer.fit_loop.min_epochs = 0
        elif round_index in self._job.rounds:
            module = trainer.lightning_module
            with averaged_weights(trainer, module):
                self._scored[self._job.members][round_index] = self._scoring.score(module)
            self._score_rows(trainer, round_index)

    def _keep_models(self, trainer: L.Trainer, round_index: int) -> None:
        loop: Any = find_loop(callbacks_of(trainer))
        self._models[self._job.members][round_index] = loop.state.model().cpu().clone()
        if self._servers is None:
            return
        for members, model in zip(self._rows, self._servers.models):
            if members in self._witnesses:
                self._models[members][round_index] = model.cpu().clone()

    def _score_rows(self, trainer: L.Trainer, round_index: int) -> None:
        """Score the models of the coalitions that train at once."""
        if self._servers is None:
            return
        loop: Any = find_loop(callbacks_of(trainer))
        loop.run.engine.check_model()
        models = self._scoring.score_vectors(list(self._servers.models))
        for members, model in zip(self._rows, models):
            self._scored[members][round_index] = model

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """If training ends because a round has no finite model, score the global model after the last complete round,
        unless it was scored already.
        """
        last_round = trainer.current_epoch - 1
        if not isinstance(exception, NoModel) or last_round in self._scored[self._job.members]:
            return
        loop: Any = find_loop(callbacks_of(trainer))
        last_model = loop.state.model()
        for round_index in self._job.model_rounds:
            self._models[self._job.members].setdefault(round_index, last_model.cpu().clone())
        loop.space.write(pl_module, last_model)
        self._last_model = self._scoring.score(pl_module)

    def deliver(self, trainer: L.Trainer) -> None:
        """Store and score the models after all hooks at the end of training."""
        last_round = self._job.rounds[-1]
        if not self._has_last_round_ended:
            raise RuntimeError(
                f"the fit has ended after {trainer.current_epoch} of {last_round + 1} rounds, because a callback or a "
                "hook has stopped it"
            )
        loop: Any = find_loop(callbacks_of(trainer))
        self._first_updates = loop.run.engine.first_updates
        module = trainer.lightning_module
        self._scored[self._job.members][last_round] = self._scoring.score(module)
        self._score_rows(trainer, last_round)

    def refuse_logged_values(self) -> None:
        """Note that the program reads logged values, although the fit does not validate, and raise NeedsValidation."""
        self._has_read_logged_values = True  # the program may catch the error
        raise NeedsValidation

    def result(self) -> FitResult:
        """Return the result of the job's coalition, after the end of training."""
        if not self._start_hash:
            raise RuntimeError("the fit has trained nothing")
        if self._has_read_logged_values:
            raise NeedsValidation
        members = self._job.members
        return FitResult(
            scored=self._scored_models(),
            untrained=self._untrained,
            start_hash=self._start_hash,
            models=FitModels(self._initial_model, after_round=self._models[members]),
            rounding=self._rounding,
            first_updates=self._first_updates,
        )

    def results(self) -> dict[Members, FitResult]:
        """Return the results of all coalitions, after the end of training, except those whose server would do more than
        average.
        """
        result = self.result()
        results = {self._job.members: result}
        assert self._servers is not None
        for members, needs_server in zip(self._rows, self._servers.needs_server):
            if needs_server:
                continue
            results[members] = replace(
                result,
                scored=[self._scored[members][round_index] for round_index in self._job.rounds],
                models=FitModels(self._initial_model, after_round=self._models[members]),
                first_updates={},
            )
        return results

    def _scored_models(self) -> list[ScoredModel]:
        """Return the model after each of the job's rounds. A round without a finite model has the last finite one."""
        models: list[ScoredModel] = []
        for round_index in self._job.rounds:
            model = self._scored[self._job.members].get(round_index, self._last_model)
            if model is None and models:
                model = models[-1]
            if model is not None:
                models.append(model)
        return models


def hash_of_start(module: L.LightningModule) -> str:
    """Return a hash of a module's weights before training, including frozen weights."""
    weights = {name: weight for name, weight in module.named_parameters() if not is_lazy(weight)}
    return digest(weights).hex()[:16]


class NeedsValidation(Exception):
    """Error: training reads values that only validations log."""
