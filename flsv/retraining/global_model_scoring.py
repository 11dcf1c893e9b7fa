"""The training of one coalition's federation, and the scores of its global model."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import lightning as L
import torch

from flsv._lightning.evaluation import all_on_device
from flsv._lightning.patches import callbacks_of, in_turn
from flsv._lightning.round_boundary import model_of_validation
from flsv.core import is_loop
from flsv.core.parameter_space import ParameterSpace
from flsv.data import FederatedDataModule
from flsv.games.coalition_utility import Measure, check_untrained
from flsv.games.judges import ClientJudges
from flsv.games.make_evaluators import make_evaluators
from flsv.games.model_evaluator import ModelEvaluator
from flsv.games.performance import ModelScore
from flsv.games.vector_evaluator import Scores, VectorEvaluator
from flsv.models.classifier import ClassifierClient
from flsv.retraining.coalition_refusals import check_scored


def train_alone(
    trainer: L.Trainer,
    module: L.LightningModule,
    data: FederatedDataModule,
    scoring: GlobalModelScoring,
) -> float:
    """Fit a coalition's federation without writing files. Return the seconds of training, without evaluations."""
    callbacks: list[Any] = callbacks_of(trainer)
    for position, callback in enumerate(callbacks):
        if is_loop(callback):
            callbacks[position] = callback.without_files()  # hundreds of fits share one folder
    callbacks.insert(0, scoring)

    start_time = time.perf_counter()
    trainer.fit(module, data)
    seconds = time.perf_counter() - start_time
    if scoring.scored_round is None:
        raise RuntimeError("a trainer made for a coalition trained nothing: is its max_epochs 0?")
    return seconds - scoring.seconds


class GlobalModelScoring(L.Callback):
    """Callback that scores the global model before the first round and after selected ones."""

    def __init__(
        self,
        data: FederatedDataModule,
        measures: Sequence[Measure],
        # None: the module keeps its weights, which are stored.
        initial: dict[str, Any] | None,
        # After which the model is scored, ascending. Training ends with the last. None: once, after training.
        rounds: Sequence[int] | None = None,
        scores_untrained: bool = True,
    ) -> None:
        self._data = data
        self._measures = measures
        self.initial = initial
        self._rounds = rounds
        self._scores_untrained = scores_untrained
        # The scores before the first round and after rounds, in the order of measures.
        self.untrained_scores: list[Scores] = []
        self.scores_by_round: dict[int, list[Scores]] = {}
        self.scored_round: int | None = None
        # Whether the last round has ended.
        self.has_ended = False
        # [2, P], the model that was scored last, and the initial one.
        self.models = torch.empty(0)
        # Spent on evaluations.
        self.seconds = 0.0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.initial is None:
            self.initial = copy.deepcopy(pl_module.state_dict())
        else:
            pl_module.load_state_dict(self.initial, strict=False)  # frozen weights may be left out
        loop: Any = trainer.fit_loop
        strategy: Any = trainer.strategy
        if self._rounds is None:
            strategy.on_train_end = in_turn(strategy.on_train_end, partial(self._end, trainer))
        else:
            loop.on_advance_end = in_turn(loop.on_advance_end, partial(self._end_round, trainer))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        start_time = time.perf_counter()
        loop: Any = next(filter(is_loop, callbacks_of(trainer)), None)
        if loop is None:
            share = "all"
            seed = 0
            self.space = ParameterSpace(pl_module)
        else:
            # Making a space reads the module, which parametrizations such as a spectral norm count as a step.
            share = loop.share
            seed = loop.state.seed
            self.space = loop.space

        self._evaluators = []
        for measure in self._measures:
            evaluator = make_evaluator(trainer, self.space, self._data, measure, seed)
            self._evaluators.append(evaluator)
        for evaluator, measure in zip(self._evaluators, self._measures):
            check_scored("RetrainedUtility", share, pl_module, evaluator, measure)

        self.models = self.space.read(pl_module).expand(2, -1).clone()
        if self._scores_untrained:
            self.untrained_scores = self._evaluated(pl_module)
            for measure, scores in zip(self._measures, self.untrained_scores):
                check_untrained("retraining", measure, scores)
        self.seconds += time.perf_counter() - start_time

    def _end_round(self, trainer: L.Trainer) -> None:
        """Score the model after all hooks of a round, except the last, and end training after the last."""
        index = trainer.current_epoch - 1
        rounds = self._rounds or ()
        if index == rounds[-1]:
            self.has_ended = True
            trainer.should_stop = True
            trainer.fit_loop.min_epochs = 0
        elif index in rounds:
            module = trainer.lightning_module
            with model_of_validation(trainer, module):
                self._score(module, index)

    def _end(self, trainer: L.Trainer) -> None:
        """Score the model after all hooks at the end of training."""
        self._score(trainer.lightning_module, trainer.current_epoch - 1)

    def _evaluated(self, module: L.LightningModule) -> list[Scores]:
        weighing: AbstractContextManager[None]
        if isinstance(module, ClassifierClient):
            weighing = module.weighing_for_all()
        else:
            weighing = nullcontext()

        with weighing:
            return [evaluator.live(module, keep=True) for evaluator in self._evaluators]

    def _score(self, module: L.LightningModule, index: int) -> None:
        start_time = time.perf_counter()
        self.models[0] = self.space.read(module)

        self.scores_by_round[index] = self._evaluated(module)
        self.scored_round = index
        self.seconds += time.perf_counter() - start_time


def make_evaluator(
    trainer: L.Trainer,
    space: ParameterSpace,
    data: FederatedDataModule,
    measure: Measure,
    seed: int,
) -> VectorEvaluator:
    """Make an evaluator by ``measure`` on the server's validation set. If clients score models, it uses theirs."""
    if isinstance(measure, ModelScore) and measure.judged:
        # The loop, or what replaces it.
        loop: Any = next(
            callback for callback in callbacks_of(trainer) if hasattr(callback, "clients")
        )
        judges = ClientJudges(space, loop.clients, data, measure, trainer.lightning_module.device)
        judges.check(space.read(trainer.lightning_module))
        return judges
    if isinstance(measure, ModelScore):
        loader = data.val_dataloader()
        return make_evaluators(trainer, space, loader, {"the utility": measure}, seed=seed)[
            measure.evaluator
        ]
    evaluator = ModelEvaluator(
        trainer.lightning_module,
        space,
        all_on_device(trainer, data.val_dataloader()),
        num_classes=data.num_classes,
        context=trainer.strategy.precision_plugin.forward_context,
    )
    if measure == "negative_loss":
        evaluator.check_logits("the utility")
    return evaluator
