"""CoalitionGames: the coalition games of every round of a fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from flsv.core import ALONE, Ranks, Round
from flsv.functional.shapley.predicted_outputs import ValuesFromOutputs
from flsv.games.coalition_utility import CoalitionTable, CoalitionUtility, Weighting
from flsv.games.module_copies import ScoringCopies
from flsv.games.own_validation import OwnValidation
from flsv.games.vector_evaluator import UtilityMetric, VectorEvaluator
from flsv.scores.performance import Measure, as_measure


class CoalitionGames:
    """Factory of coalition games, one object for all rounds of a fit.

    :meth:`begin` sets the round, whose clients are the players.

    Args:
        evaluators: the evaluators of models. The first that computes a measure is taken.
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
        >>> games = CoalitionGames([ModelEvaluator(module, space, batches, num_classes=2)])
        >>> models = torch.tensor([[1.0, 0, 0, 1], [-3.0, 0, 0, -3]])
        >>> games.begin(Round(0, torch.arange(2), torch.tensor([9, 1]), torch.zeros(4), models, space))
        >>> masks = torch.tensor([[False, False], [True, False]])
        >>> games.utility("accuracy")(masks), games.utility("per_class_accuracy")(masks)[1]
        (tensor([0.5000, 1.0000], dtype=torch.float64), tensor([1., 1.], dtype=torch.float64))
        >>> games.evaluations
        2
    """

    _round: Round | None = None
    _evaluations_of_earlier_rounds = 0

    def __init__(
        self,
        evaluators: Iterable[VectorEvaluator],
        *,
        server_lr: float = 1.0,
        ranks: Ranks = ALONE,
        own_validation: OwnValidation | None = None,
    ) -> None:
        self.own_validation = own_validation
        self.server_lr = server_lr
        self._evaluators = list(evaluators)
        self._ranks = ranks
        # {name of the loss: (model, gradient of the loss at the model)}
        self._gradient_by_loss: dict[str, tuple[Tensor, Tensor]] = {}
        # {name of the loss: its slopes along the round's updates}
        self._slopes_by_loss: dict[str, Tensor] = {}
        # {evaluator: scores of the round's coalitions}
        self._tables_by_evaluator: dict[object, CoalitionTable] = {}

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
        return [evaluator.copies for evaluator in self._evaluators if evaluator.copies is not None]

    def _change_round(self, round: Round | None) -> None:
        self._evaluations_of_earlier_rounds = self.total_evaluations
        self._round = round
        self._tables_by_evaluator = {}
        self._slopes_by_loss = {}

    def evaluator_of(self, metric: str | Measure) -> Any:
        """Return the evaluator that computes the performance measure ``metric``."""
        measure = as_measure(metric)
        for evaluator in self._evaluators:
            if evaluator.computes(measure):
                return evaluator
        raise RuntimeError(f"CoalitionGames: no evaluator computes {metric!r}.")

    def output_measure(self, measure: Measure) -> ValuesFromOutputs | None:
        """Return the object that computes Shapley values by ``measure`` from models' outputs. None: it is not computed
        from outputs.
        """
        evaluator: VectorEvaluator = self.evaluator_of(measure)
        return evaluator.output_measure(measure)

    def utility(
        self,
        metric: UtilityMetric | Measure = "accuracy",
        weighting: Weighting = "uniform",
    ) -> CoalitionUtility:
        """Make a game of the current round, with the arguments of :class:`CoalitionUtility`.

        The games of a round share their evaluations.
        """
        evaluator = self.evaluator_of(metric)
        # Games whose metrics have one evaluator share a table: no coalition is evaluated twice.
        if evaluator not in self._tables_by_evaluator:
            table = CoalitionTable(self.round, evaluator, self._ranks)
            self._tables_by_evaluator[evaluator] = table
        return CoalitionUtility(
            self.round,
            evaluator,
            metric=metric,
            weighting=weighting,
            server_lr=self.server_lr,
            table=self._tables_by_evaluator[evaluator],
        )

    def table_of(self, round: Round, metric: Measure) -> CoalitionTable:
        """Make a table of coalitions' scores by ``metric`` for a round other than the current one.

        The table's evaluations count in :attr:`evaluations`.
        """
        table = CoalitionTable(round, self.evaluator_of(metric))
        self._tables_by_evaluator[object()] = table
        return table

    def gradient(self, vector: Tensor, loss: str | Measure = "negative_loss") -> Tensor:
        """Compute the validation loss's gradient at a model.

        The last gradient of each loss is cached as long as ``vector`` is the same tensor object.

        Args:
            vector: ``[P]``, the model.
            loss: the loss to differentiate, see :func:`flsv.scores.performance.loss_measure`.

        Returns:
            The gradient with respect to the P' parameters, the leading entries of the vector, float64 ``[P']``.
        """
        name = as_measure(loss).name
        if name in self._gradient_by_loss:
            last_vector, last_gradient = self._gradient_by_loss[name]
            if last_vector is vector:
                return last_gradient

        gradient = self.evaluator_of(loss).gradient(vector, name)
        self._gradient_by_loss[name] = vector, gradient
        return gradient

    def slopes(self, loss: str | Measure = "negative_loss") -> Tensor:
        """Compute the validation loss's slopes along the k updates, once per round. They are the dot products ``[k]``
        of the updates with the :meth:`gradient` at the global model.
        """
        name = as_measure(loss).name
        if name not in self._slopes_by_loss:
            gradient = self.gradient(self.round.global_vector, loss)
            self._slopes_by_loss[name] = self.round.matrix.dot(gradient).cpu()
        return self._slopes_by_loss[name]
