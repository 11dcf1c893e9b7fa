"""CoalitionUtility: how good the model would be with only some of a round's updates.

The game is from Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, definition 4.1,
with uniform weights. Fixed weights are from line 12 of Algorithm 1 in Guo et al., "A Fair Contribution Measurement
Method for Federated Learning", Sensors 24(15), 2024.
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

#: A performance measure of models, or several names of classifiers' scores, each of which gives a column of utilities.
Measure = str | ModelScore | Sequence[str]


@checked
class CoalitionUtility:
    """Coalition game of a round's cohort.

    The model of coalition S is x + server_lr * sum_{i in S} w_i(S) d_i, with x the round's global model, d_i client i's
    update (a row of ``round.client_updates``) and w_i(S) its weight in S. It is x itself if S is empty or its
    weights sum
    to 0. Buffers (BatchNorm's statistics) are averages of the members' own with weights that sum to 1 inside S, without
    ``server_lr``, because other sums can make a running variance negative.

    Each model is computed by a matrix-vector product of its own, so its bits do not depend on the other coalitions of
    the call. At any time only one model (CPU) or one chunk of models (CUDA) is in memory.

    Args:
        round: the round whose clients are the players, in the order of ``client_ids``.
        evaluator: evaluator of models on the server's validation set.
        metric: the performance measure, see :mod:`flsv.games.performance`. A :class:`ModelEvaluator` gives
            ``"accuracy"``, ``"balanced_accuracy"`` (mean over the classes with samples), ``"negative_loss"`` (minus
            the mean cross-entropy, nats) and ``"per_class_accuracy"`` (0 for classes without samples). More is better.
            Any other measure is a :class:`flsv.games.ModelScore`.
        weighting: the weights w_i(S): ``"uniform"`` for 1/|S|, ``"samples"`` for n_i / sum_{j in S} n_j, with n_i the
            samples of client i, a tensor of fixed weights w_i ``[k]``, which are not renormalized inside S, or
            ``Renormalized(weights)`` for w_i / sum_{j in S} w_j (equation 4 of Guo et al.).
        server_lr: the server's learning rate: the factor of the members' weighted mean update.
        table: the table that stores the coalitions' scores, shared by a round's utilities. None: a new table.

    Attributes:
        num_players: k, the number of the round's clients.
        table: the table of scores.

    Raises:
        ConfigurationError: an argument is wrong, or fixed weights are negative, not finite or not one per client.

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
        """Number of different models in the table, which several games may share."""
        return self.table.evaluations

    def __call__(self, masks: Tensor) -> Tensor:
        """Compute the utilities of coalitions.

        Args:
            masks: bool ``[K, k]``, a row for each of K coalitions, True for its members.

        Returns:
            The utilities, float64 ``[K]``, or ``[K, M]`` for per-class accuracy, on the CPU. A negative loss is NaN or
            infinite if the model's loss is.

        Raises:
            ValueError: the masks have another type or shape.
        """
        if masks.dtype != torch.bool or masks.ndim != 2 or masks.shape[1] != self.num_players:
            raise ValueError(
                f"expected masks bool [K, {self.num_players}], got {masks.dtype} {list(masks.shape)}: a row per "
                "coalition, a column per player."
            )
        return utility_of(self.table.scores(self._models, masks.cpu()), self.metric)


def utility_of(scores: Scores, metric: Measure) -> Tensor:
    """Convert K models' scores to utilities, of which more is better: ``[K]``, or ``[K, M]`` for M classes or names."""
    if isinstance(metric, ModelScore):
        return metric.utility(scores.value(metric.name))
    if isinstance(metric, str):
        return scores.value(metric)
    return torch.stack([scores.value(name) for name in metric], 1)
