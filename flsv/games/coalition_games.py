"""CoalitionGames: the coalition games of every round of a fit."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor

from flsv.core import ALONE, Ranks, Round
from flsv.games.coalition_utility import CoalitionTable, CoalitionUtility, Weighting
from flsv.games.module_copies import ScoringCopies
from flsv.games.own_validation import OwnValidation
from flsv.games.vector_evaluator import UtilityMetric, VectorEvaluator
from flsv.scores.performance import ModelScore, PerformanceMeasure, evaluator_key


class CoalitionGames:
    """Factory of coalition games, one object for all rounds of a fit.

    :meth:`begin` sets the round, whose clients are the players.

    Args:
        evaluators: ``{key: evaluator}`` on the server's validation set, with the keys of
            :func:`flsv.scores.performance.evaluator_key`. That of the evaluator of classifiers is None.
        server_lr: the server's learning rate, the factor of the members' average update in a coalition's model.
        ranks: the processes among which the evaluations are divided. All of them must call the games with the same
            arguments.
        own_validation: the comparison of copies' validations with those of the run. None: there is no comparison.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from flsv.core.parameter_space import ParameterSpace
        >>> module = nn.Linear(2, 2, bias=False)
        >>> space = ParameterSpace(module)
        >>> from flsv.games import ModelEvaluator
        >>> batches = [(torch.eye(2), torch.tensor([0, 1]))]
        >>> games = CoalitionGames({None: ModelEvaluator(module, space, batches, num_classes=2)})
        >>> models = torch.tensor([[1.0, 0, 0, 1], [-3.0, 0, 0, -3]])
        >>> games.begin(Round(0, torch.arange(2), torch.tensor([9, 1]), torch.zeros(4), models, space))
        >>> masks = torch.tensor([[False, False], [True, False]])
        >>> games.utility("accuracy")(masks), games.utility("per_class_accuracy")(masks)[1]
        (tensor([0.5000, 1.0000], dtype=torch.float64), tensor([1., 1.], dtype=torch.float64))
        >>> games.evaluations
        2
    """

    def __init__(
        self,
        evaluators: Mapping[Hashable, VectorEvaluator],
        *,
        server_lr: float = 1.0,
        ranks: Ranks = ALONE,
        own_validation: OwnValidation | None = None,
    ) -> None:
        self.own_validation = own_validation
        self.server_lr = server_lr
        self._evaluators_by_key = evaluators
        self._ranks = ranks
        self._round: Round | None = None
        # {name of the loss: (model, gradient of the loss at the model)}
        self._gradient_by_loss: dict[str, tuple[Tensor, Tensor]] = {}
        # {name of the loss: its slopes along the round's updates}
        self._slopes_by_loss: dict[str, Tensor] = {}
        # {key of the evaluator: scores of the round's coalitions}
        self._tables_by_evaluator: dict[Hashable, CoalitionTable] = {}
        self._evaluations_of_earlier_rounds = 0

    @property
    def round(self) -> Round:
        """The current round."""
        if self._round is None:
            raise RuntimeError("CoalitionGames: no round has begun. Call begin(round) first.")
        return self._round

    @property
    def evaluations(self) -> int:
        """Number of models that were evaluated in the current round."""
        return self.total_evaluations - self._evaluations_of_earlier_rounds

    @property
    def total_evaluations(self) -> int:
        """Sum of :attr:`evaluations` over this fit's rounds so far."""
        total = self._evaluations_of_earlier_rounds
        for table in self._tables_by_evaluator.values():
            total += table.evaluations
        return total

    def begin(self, round: Round) -> None:
        """Make ``round`` the current round, and forget the scores of the previous round's models."""
        self._change_round(round)
        for copies in self._copies():
            copies.begin_round()

    def end(self) -> None:
        """Forget the current round, and release its vectors."""
        self._change_round(None)
        self._gradient_by_loss = {}
        for copies in self._copies():
            copies.end_round()

    def _copies(self) -> list[ScoringCopies]:
        evaluators = self._evaluators_by_key.values()
        return [evaluator.copies for evaluator in evaluators if evaluator.copies is not None]

    def _change_round(self, round: Round | None) -> None:
        self._evaluations_of_earlier_rounds = self.total_evaluations
        self._round = round
        self._tables_by_evaluator = {}
        self._slopes_by_loss = {}

    def evaluator_of(self, metric: PerformanceMeasure) -> Any:
        """Return the evaluator that computes the performance measure ``metric``."""
        key = evaluator_key(metric)
        if key not in self._evaluators_by_key:
            raise RuntimeError(f"CoalitionGames: no evaluator computes {metric!r}.")
        return self._evaluators_by_key[key]

    def utility(
        self,
        metric: UtilityMetric | PerformanceMeasure = "accuracy",
        weighting: Weighting = "uniform",
    ) -> CoalitionUtility:
        """Make a game of the current round, with the arguments of :class:`CoalitionUtility`.

        The games of a round share their evaluations.
        """
        key = evaluator_key(metric)
        evaluator = self.evaluator_of(metric)
        # Games whose metrics have one evaluator share a table: no coalition is evaluated twice.
        if key not in self._tables_by_evaluator:
            self._tables_by_evaluator[key] = CoalitionTable(self.round, evaluator, self._ranks)
        return CoalitionUtility(
            self.round,
            evaluator,
            metric=metric,
            weighting=weighting,
            server_lr=self.server_lr,
            table=self._tables_by_evaluator[key],
        )

    def table_of(self, round: Round, metric: PerformanceMeasure) -> CoalitionTable:
        """Make a table of coalitions' scores by ``metric`` for a round other than the current one.

        The table's evaluations count in :attr:`evaluations`.
        """
        table = CoalitionTable(round, self.evaluator_of(metric))
        self._tables_by_evaluator[object()] = table
        return table

    def gradient(self, vector: Tensor, loss: PerformanceMeasure = "negative_loss") -> Tensor:
        """Compute the validation loss's gradient at a model.

        The last gradient of each loss is cached as long as ``vector`` is the same tensor object.

        Args:
            vector: ``[P]``, the model.
            loss: the loss to differentiate, see :func:`flsv.scores.performance.loss_measure`.

        Returns:
            The gradient with respect to the P' parameters, the leading entries of the vector, float64 ``[P']``.
        """
        name = _loss_name(loss)
        if name in self._gradient_by_loss:
            last_vector, last_gradient = self._gradient_by_loss[name]
            if last_vector is vector:
                return last_gradient

        gradient = self.evaluator_of(loss).gradient(vector, name)
        self._gradient_by_loss[name] = vector, gradient
        return gradient

    def slopes(self, loss: PerformanceMeasure = "negative_loss") -> Tensor:
        """Compute the validation loss's slopes along the k updates, once per round. They are the dot products ``[k]``
        of the updates with the :meth:`gradient` at the global model.
        """
        name = _loss_name(loss)
        if name not in self._slopes_by_loss:
            gradient = self.gradient(self.round.global_vector, loss)
            self._slopes_by_loss[name] = self.round.matrix.dot(gradient).cpu()
        return self._slopes_by_loss[name]


def _loss_name(loss: PerformanceMeasure) -> str:
    return loss.name if isinstance(loss, ModelScore) else loss
