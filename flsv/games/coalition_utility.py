"""CoalitionUtility: how good the model would be with only some of a round's updates.

``CoalitionUtility(masks: bool [K, k]) -> float [K]`` is the callable that every Shapley estimator of
:mod:`flsv.functional` takes. A :class:`flsv.games.CoalitionTable` behind it builds and evaluates every coalition of the
round once for all games, and a :class:`flsv.games.ModelEvaluator` evaluates models on the server's validation set.

The game is that of Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, definition 4.1:
players are the round's cohort, U(S) is the performance of x + eta * sum_{i in S} w_i(S) d_i, and U(empty) that of x
itself, on the same set. Weights inside a coalition are uniform there; fixed weights are line 12 of Algorithm 1 in Guo
et al., "A Fair Contribution Measurement Method for Federated Learning", Sensors 24(15), 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flsv.core import Round
from flsv.games.coalition_models import CoalitionModels, Weighting
from flsv.games.coalition_table import CoalitionTable
from flsv.games.performance import ModelScore
from flsv.games.scores import Scores, UtilityMetric
from flsv.games.vector_evaluator import VectorEvaluator
from flsv.utilities.declared import Positive, checked

#: A performance measure of models; several of a classifier's scores are a column each.
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
        metric: the performance measure, see :mod:`flsv.games.performance`. A :class:`ModelEvaluator` gives
            ``"accuracy"``, ``"balanced_accuracy"`` (mean over the classes with samples), ``"negative_loss"`` (minus
            the mean cross-entropy, nats) and ``"per_class_accuracy"`` (0 for classes without samples). More is better.
            Any other measure is a :class:`flsv.games.ModelScore`.
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
        >>> from flsv.games import ModelEvaluator
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
        """Compute the utilities of coalitions.

        Args:
            masks: bool ``[K, k]``, a row per coalition: True for its members.

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
    """Return the utilities in models' scores, more is better.

    Args:
        scores: of K models.
        metric: the performance measure; several names of a classifier's scores are a column each.

    Returns:
        float64 ``[K]`` or ``[K, M]``.
    """
    if isinstance(metric, ModelScore):
        return metric.utility(scores.value(metric.name))
    if isinstance(metric, str):
        return scores.value(metric)
    return torch.stack([scores.value(name) for name in metric], 1)
