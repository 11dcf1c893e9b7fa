"""TrainedGame: the game of coalitions whose models were trained, with the outputs from which others are predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flsv.core.fields import TrainedCoalitions
from flsv.functional.shapley.predicted_outputs import PredictedValues, predicted_shapley, values_of_tables
from flsv.games.coalition_utility import Measure, utility_of
from flsv.games.judges import ClientJudges
from flsv.games.model_evaluator import ModelEvaluator
from flsv.games.performance import ModelScore


@dataclass(frozen=True, eq=False)
class OutputScore:
    """The score of predicted outputs by a performance measure.

    Args:
        score: a function from outputs ``[c, V, ...]`` to utilities ``[c]`` or ``[c, M]``.
        logits: whether the outputs are logits, with the classes in the last dimension.
        judges: the clients, if they predict and score; then models ``[T, P]`` take the outputs' place.
    """

    score: Callable[[Tensor], Tensor]
    logits: bool
    judges: ClientJudges | None = None

    def shapley(self, trained: Tensor, utilities: Tensor, outputs: Tensor, weights: Tensor) -> PredictedValues:
        """Compute the values, see :func:`flsv.functional.predicted_shapley`."""
        if self.judges is None:
            return predicted_shapley(trained, utilities, outputs, weights, self.score, logits=self.logits)
        tables = self.judges.predict(outputs, trained, weights)
        tables = tables.view(*tables.shape[:2], *utilities.shape[1:])
        numbers = (trained.long() << torch.arange(trained.shape[1])).sum(1)
        tables[numbers] = utilities.to(tables).unsqueeze(1)  # trained coalitions keep their own
        return values_of_tables(tables)

    @staticmethod
    def of(evaluator: Any, measure: Measure) -> OutputScore | None:
        """Make the score of an evaluator's outputs; None if the evaluator keeps no outputs, as of logged values."""
        if isinstance(evaluator, ClientJudges) and evaluator.predicts:
            return OutputScore(lambda outputs: outputs, True, evaluator)
        if not isinstance(evaluator, ModelEvaluator) or evaluator.form is None:
            return None

        needs_losses = not isinstance(measure, ModelScore) and "negative_loss" in measure

        def score(outputs: Tensor) -> Tensor:
            return utility_of(evaluator.score_outputs(outputs, losses=needs_losses), measure)

        return OutputScore(score, evaluator.form.classifies)


class TrainedGame:
    """The game of a round's trained coalitions.

    Args:
        trained: the coalitions and their models.
        evaluator: the evaluator of ``measure``.
        measure: the performance measure.

    Attributes:
        by: the score of predicted outputs; None if the outputs are not kept.
        outputs: ``[K, V, ...]``, the outputs of the coalitions of the last call; None if they are not kept.
    """

    def __init__(
        self,
        trained: TrainedCoalitions,
        evaluator: Any,
        measure: str | ModelScore,
    ) -> None:
        self._trained, self._evaluator, self._measure = trained, evaluator, measure
        self.by = OutputScore.of(evaluator, measure)
        self.outputs: Tensor | None = None

    @property
    def weights(self) -> Tensor | None:
        """The clients' weights ``[n]`` in the federation's average."""
        return self._trained.weights

    def __call__(self, masks: Tensor) -> Tensor:
        """Return the utilities ``[J]`` or ``[J, M]`` of J of the coalitions, ``masks``, bool ``[J, n]``. They are NaN
        for the full coalition if it is scored only when all hooks of the round have been called."""
        if self._trained.before is not None and not self._evaluator.asks_clients:
            before = self._trained.before(self._measure)
            self.outputs = None if self.by is None else _and_nan(before.outputs)
            return _and_nan(utility_of(before, self._measure))
        keep = {} if self.by is None else {"keep": True}
        scores = self._evaluator.evaluate(self._trained.builder(masks), len(masks), **keep)
        self.outputs = scores.outputs
        return utility_of(scores, self._measure)


def _and_nan(first: Tensor) -> Tensor:
    return torch.cat([first, torch.full_like(first, torch.nan)])
