"""Coalition games of a round: how good the model would be with only some of the clients' updates.

``CoalitionUtility(masks: bool [K, k]) -> float [K]`` is the callable that every Shapley estimator of
:mod:`flsv.functional` plays with. Behind it a :class:`CoalitionTable` sees to it that every coalition of the round is
built and evaluated once, whoever asks, and a :class:`ModelEvaluator` evaluates models on the server's validation set.

The game is that of Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, definition 4.1:
players are the round's cohort, U(S) is the performance of x + eta * sum_{i in S} w_i(S) d_i, and U(empty) that of x
itself, on the same set. Weights inside a coalition are uniform there; fixed weights are line 12 of Algorithm 1 in Guo
et al., "A Fair Contribution Measurement Method for Federated Learning", Sensors 24(15), 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flsv.core import ALONE, Ranks, Round
from flsv.games.evaluator import ModelEvaluator
from flsv.games.gradients import GradientProducts
from flsv.games.performance import ModelScore
from flsv.games.replica import VectorEvaluator
from flsv.games.scores import Scores, UtilityMetric
from flsv.games.table import CoalitionModels, CoalitionTable, Weighting
from flsv.utilities.declared import Positive, checked

#: What models are measured by; several of a classifier's scores are a column each.
Measure = str | ModelScore | Sequence[str]


@checked
class CoalitionUtility:
    """The utility of coalitions of a round's cohort: ``utility(masks)``.

    Coalition S is the model x + server_lr * sum_{i in S} w_i(S) d_i, with d_i the clients' updates
    (``round.client_updates``). Buffers (BatchNorm's statistics) are averages of the members' own with weights that sum
    to 1 inside S, whatever ``server_lr`` and the weights' sum: moving a running variance beyond the clients' own can
    turn it negative. The empty coalition, and one whose weights sum to 0, is the global model x.

    A model is one matrix-vector product, so that its bits depend on its coalition alone; models exist one per thread
    (CPU) or a chunk (CUDA) at a time, never all.

    Args:
        round: the players are its cohort, in the order of ``client_ids``.
        evaluator: evaluates models on the server's validation set.
        metric: what they are measured by, see :mod:`flsv.games.performance`. A :class:`ModelEvaluator` gives
            ``"accuracy"``, ``"balanced_accuracy"`` (mean over the classes with samples), ``"negative_loss"`` (minus
            the mean cross-entropy, nats) and ``"per_class_accuracy"`` (0 for classes without samples). More is better.
            All else is a :class:`flsv.games.ModelScore`.
        weighting: w_i(S): ``"uniform"``, 1/|S|; ``"samples"``, n_i / sum_{j in S} n_j; or fixed weights ``[k]``, not
            renormalized inside S, or ``Renormalized(weights)``, w_i / sum_{j in S} w_j (equation 4 of Guo et al.).
        server_lr: eta, the share of the way to the average that the coalition's model moves.
        table: remembers scores; shared by the utilities of a round. None: a new one.

    Attributes:
        num_players: k.
        table: the table.

    Raises:
        ConfigurationError: a wrong argument; fixed weights that are negative or not finite or do not fit the cohort.

    Example:
        >>> from torch import nn
        >>> from flsv.core.parameter_space import ParameterSpace
        >>> module = nn.Linear(2, 2, bias=False)
        >>> space = ParameterSpace(module)
        >>> evaluator = ModelEvaluator(module, space, [(torch.eye(2), torch.tensor([0, 1]))], num_classes=2)
        >>> models = torch.tensor([[1.0, 0, 0, 1], [-3.0, 0, 0, -3]])
        >>> round = Round(0, torch.arange(2), torch.tensor([9, 1]), torch.zeros(4), models, space)
        >>> everybody_else = torch.tensor([[True, False], [False, True], [True, True]])
        >>> CoalitionUtility(round, evaluator)(everybody_else)
        tensor([1., 0., 0.], dtype=torch.float64)
        >>> utility = CoalitionUtility(round, evaluator, weighting="samples")
        >>> utility(everybody_else), utility.evaluations
        (tensor([1., 0., 1.], dtype=torch.float64), 3)
    """

    def __init__(
        self,
        round: Round,
        evaluator: VectorEvaluator,
        *,
        metric: UtilityMetric | str | ModelScore = "accuracy",
        weighting: Weighting = "uniform",
        server_lr: Positive = 1.0,
        table: CoalitionTable | None = None,
    ) -> None:
        self.metric, self.num_players, self.table = metric, len(round), table or CoalitionTable(round, evaluator)
        self._models = CoalitionModels(round, weighting, server_lr)

    @property
    def evaluations(self) -> int:
        """Distinct models that the table has evaluated, for this utility and all that share the table."""
        return self.table.evaluations

    def __call__(self, masks: Tensor) -> Tensor:
        """Utilities of coalitions.

        Args:
            masks: bool ``[K, k]``, row by row who is in the coalition.

        Returns:
            float64 ``[K]``, or ``[K, M]`` for per-class accuracy, on the CPU. NaN or infinite where the model's loss
            is.

        Raises:
            ValueError: masks of another type or shape.
        """
        if masks.dtype != torch.bool or masks.ndim != 2 or masks.shape[1] != self.num_players:
            raise ValueError(
                f"expected masks bool [K, {self.num_players}], got {masks.dtype} {list(masks.shape)}: a row per "
                "coalition, a column per player."
            )
        return utility_of(self.table.scores(self._models, masks.cpu()), self.metric)


def utility_of(scores: Scores, metric: Measure) -> Tensor:
    """More is better, float64 ``[K]`` or ``[K, M]``; by several names of a classifier's scores, a column each."""
    if isinstance(metric, ModelScore):
        return metric.utility(scores.value(metric.name))
    if isinstance(metric, str):
        return scores.value(metric)
    return torch.stack([scores.value(name) for name in metric], 1)


class CoalitionGames:
    """Makes the coalition games of every round of a fit.

    Args:
        evaluator: evaluates classifiers on the server's validation set; None where no game asks for that.
        server_lr: the share of the way to the average that a coalition's model moves.
        validated: what evaluates models of any task, by :attr:`flsv.games.ModelScore.evaluator`.
        ranks: processes that share the evaluations out; all of them play alike.

    Example:
        >>> from torch import nn
        >>> from flsv.core.parameter_space import ParameterSpace
        >>> module = nn.Linear(2, 2, bias=False)
        >>> space = ParameterSpace(module)
        >>> batches = [(torch.eye(2), torch.tensor([0, 1]))]
        >>> games = CoalitionGames(ModelEvaluator(module, space, batches, num_classes=2))
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
        evaluator: ModelEvaluator | None,
        *,
        server_lr: float = 1.0,
        validated: Mapping[Hashable, VectorEvaluator] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.evaluator, self.server_lr, self._validated, self._ranks = evaluator, server_lr, validated or {}, ranks
        self._round: Round | None = None
        self._gradients: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self._products: dict[Hashable, Any] = {}
        self._tables: dict[Hashable, CoalitionTable] = {}
        self._before = self._models = 0

    @property
    def round(self) -> Round:
        """The current one."""
        if self._round is None:
            raise RuntimeError("CoalitionGames: there is no round; call begin(round) first.")
        return self._round

    @property
    def evaluations(self) -> int:
        """Distinct models evaluated in the current round, counted for each evaluator that was asked for them."""
        assert self.round is not None  # it raises without one
        return self.total_evaluations - self._before

    @property
    def total_evaluations(self) -> int:
        """:attr:`evaluations` of all rounds of this fit so far, the current one included."""
        return self._before + sum(table.evaluations for table in self._tables.values()) + self._models

    def begin(self, round: Round) -> None:
        """Begin a round, and forget the evaluations of the one before."""
        self._before = self.total_evaluations
        self._round, self._tables, self._products, self._models = round, {}, {}, 0

    def end(self) -> None:
        """Forget the round, and let go of its vectors."""
        self._before = self.total_evaluations
        self._round, self._tables, self._products, self._models = None, {}, {}, 0
        self._gradients = {}

    def evaluator_of(self, metric: str | ModelScore) -> Any:
        """What evaluates models by this."""
        if isinstance(metric, ModelScore):
            return self._validated[metric.evaluator]
        if self.evaluator is None:
            raise RuntimeError(f"CoalitionGames: nothing here evaluates classifiers, so there is no {metric!r}.")
        return self.evaluator

    def utility(
        self,
        metric: UtilityMetric | str | ModelScore = "accuracy",
        weighting: Weighting = "uniform",
    ) -> CoalitionUtility:
        """A game of the current round; games of one round never evaluate a model twice."""
        key = metric.evaluator if isinstance(metric, ModelScore) else None
        evaluator = self.evaluator_of(metric)
        if key not in self._tables:
            self._tables[key] = CoalitionTable(self.round, evaluator, self._ranks)
        return CoalitionUtility(
            self.round,
            evaluator,
            metric=metric,
            weighting=weighting,
            server_lr=self.server_lr,
            table=self._tables[key],
        )

    def table_of(self, round: Round, metric: str | ModelScore) -> CoalitionTable:
        """A table for games of another round than the current one, such as one made of all rounds; it counts, too."""
        table = CoalitionTable(round, self.evaluator_of(metric))
        self._tables[object()] = table
        return table

    def utility_of_models(
        self, build: Callable[[int, Tensor], None], count: int, metric: str | ModelScore = "accuracy"
    ) -> Tensor:
        """float64 ``[K]`` or ``[K, M]``: of models that are there, ``build(i, out)`` writes the i-th into ``out [P]``.
        They count, too."""
        table = CoalitionTable(self.round, self.evaluator_of(metric), self._ranks)
        self._models += count
        return utility_of(table.evaluate(build, count), metric)

    def gradient(self, vector: Tensor, balanced: bool = False, loss: str | ModelScore = "negative_loss") -> Tensor:
        """float64 ``[P']``: the validation loss's gradient at a model ``[P]``, over its leading P' entries, the
        parameters; ``balanced``: of the loss in which all classes count the same. That of a round's start is worked out
        once. ``loss``: what is derived, see :func:`flsv.games.performance.loss_of`."""
        what = loss.name if isinstance(loss, ModelScore) else balanced
        if what not in self._gradients or self._gradients[what][0] is not vector:
            self._gradients[what] = vector, self.evaluator_of(loss).gradient(vector, what)
        return self._gradients[what][1]

    def slopes(self, balanced: bool = False, loss: str | ModelScore = "negative_loss") -> Tensor:
        """float64 ``[k]``: products of the current round's updates with :meth:`gradient` at its start; worked out
        once."""
        what = loss.name if isinstance(loss, ModelScore) else balanced
        if what not in self._products:
            gradient = self.gradient(self.round.global_vector, balanced, loss)
            self._products[what] = self.round.matrix.dot(gradient).cpu()
        return self._products[what]

    def gradient_products(self, order: int = 1, loss: str | ModelScore = "negative_loss") -> GradientProducts:
        """Products of the current round's updates with the validation loss's gradient (and Hessian, of a classifier's)
        at its start; worked out once."""
        if order == 1:
            return GradientProducts(self.slopes(loss=loss), None)
        if "Hessian" not in self._products:
            start, updates = self.round.global_vector, self.round.matrix
            self._products["Hessian"] = self.evaluator_of("negative_loss").gradient_products(start, updates)
        return self._products["Hessian"]
