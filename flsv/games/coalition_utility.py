"""CoalitionUtility: how good the model would be with only some of a round's updates.

The game is from Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, definition 4.1,
with uniform weights. Fixed weights are from line 12 of Algorithm 1 in Guo et al., "A Fair Contribution Measurement
Method for Federated Learning", Sensors 24(15), 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flsv.core import ALONE, Ranks, Round
from flsv.functional.shapley.game import coalition_keys, first_positions
from flsv.games.performance import ModelScore, undefined_untrained
from flsv.games.vector_evaluator import Build, Scores, UtilityMetric, VectorEvaluator
from flsv.utilities.declared import Positive, checked
from flsv.utilities.errors import ConfigurationError


class Renormalized(NamedTuple):
    """Weights ``[k]`` that are divided by their sum over each coalition's members."""

    weights: Tensor


#: A sum of weights that differs from 1 by at most this much counts as 1.
_ROUNDING = 1e-12

Weighting = Literal["uniform", "samples"] | Tensor | Renormalized


class CoalitionModels:
    """Builder of the models of a round's coalitions, for one way of weighting the updates."""

    def __init__(self, round: Round, weighting: Weighting, server_lr: float) -> None:
        self._round, self._server_lr = round, server_lr
        self._normalized = not isinstance(weighting, Tensor)
        self._weights = _client_weights(round, weighting)
        # Equal for two objects of one round if each coalition has the same model in both.
        self.key = (self._normalized, server_lr, self._weights.numpy().tobytes())

    def weights(self, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the clients' weights in K coalitions: for parameters and for buffers, float64 ``[K, k]`` each."""
        own = masks * self._weights
        total = torch.zeros(len(masks), dtype=torch.float64)
        # Column by column: the rounding of sum(-1) depends on the number of rows.
        for column in own.unbind(1):
            total = total + column
        shares = own / torch.where(total > 0, total, 1.0)[:, None]
        return self._server_lr * (shares if self._normalized else own), shares

    def builder(self, masks: Tensor) -> Build:
        """Return a function ``build(i, out)`` that writes the model of coalition ``masks[i]`` into ``out [P]``."""
        # A model is x + sum_i w_i (x_i - s_i), with x the global model, x_i client i's model, s_i the model it started
        # from. It is computed from the clients' models, so that no second matrix, of updates, is needed.
        cut, start, models = (
            self._round.space.num_parameters,
            self._round.global_vector,
            self._round.client_vectors,
        )
        starts = self._round.matrix.starts
        common = all(each is start for each in starts)
        parameters, buffers = models[:, :cut].T, models[:, cut:].T
        exact_weights, exact_shares = self.weights(masks)
        parameter_weights, buffer_weights = exact_weights.to(start), exact_shares.to(start)
        remainders = (1 - exact_weights.sum(1)).tolist()
        has_members = buffer_weights.any(1).tolist()

        def build(index: int, out: Tensor) -> None:
            # A product of one shape per model, rather than one of masks and updates: how a matrix product sums
            # depends on the number of rows, and CUDA may do it in TF32. It is cheap beside a pass over the data.
            if not has_members[index]:
                out.copy_(start)
                return
            mine = torch.mv(parameters, parameter_weights[index], out=out[:cut])
            if not common:
                mine.add_(start[:cut])
                for weight, each in zip(exact_weights[index].tolist(), starts):
                    if weight:
                        mine.sub_(each[:cut], alpha=weight)
            elif abs(remainders[index]) > _ROUNDING:
                mine.add_(start[:cut], alpha=remainders[index])
            if cut < len(out):
                torch.mv(buffers, buffer_weights[index], out=out[cut:])

        return build


def _client_weights(round: Round, weighting: Weighting) -> Tensor:
    if isinstance(weighting, Renormalized):
        weighting = weighting.weights
    if isinstance(weighting, Tensor):
        weights = weighting.detach().to("cpu", torch.float64)
        if weights.shape != (len(round),) or not bool((weights.isfinite() & (weights >= 0)).all()):
            raise ConfigurationError(
                f"CoalitionUtility(weighting=...): expected {len(round)} weights, finite and not negative, one for "
                f"each client of the round; got {weights.tolist()}."
            )
        return weights
    if weighting == "uniform":
        return torch.ones(len(round), dtype=torch.float64)
    return round.num_samples.to("cpu", torch.float64)


class CoalitionTable:
    """Table of the scores of a round's coalitions, each of which is evaluated once.

    Games that differ in the performance measure share all scores. Games that differ in the weighting share only the
    empty coalition's.

    Args:
        round: the round whose clients are the players.
        evaluator: the evaluator of the coalitions' models.
        ranks: the processes among which the evaluations are divided. Each gets all scores. If clients score the models,
            they are not divided.

    Attributes:
        evaluations: the number of models evaluated so far.
    """

    def __init__(self, round: Round, evaluator: VectorEvaluator, ranks: Ranks = ALONE) -> None:
        self.round, self.evaluator = round, evaluator
        self._ranks = ALONE if evaluator.asks_clients else ranks
        self._rows: dict[tuple[object, int | bytes], int] = {}
        self._scores: Scores | None = None

    @property
    def evaluations(self) -> int:
        return len(self._rows)

    def scores(self, models: CoalitionModels, masks: Tensor) -> Scores:
        """Return the scores of the K coalitions in ``masks``, bool ``[K, k]`` on the CPU.

        Coalitions that are not in the table yet are evaluated, with models that ``models`` builds, and added.
        """
        has_members = masks.any(1).tolist()
        keys = [
            (models.key if some else None, mask)
            for mask, some in zip(coalition_keys(masks), has_members)
        ]
        new = first_positions(keys, self._rows)
        order = list(new.values())
        if order or self._scores is None:
            new_scores = self.evaluate(models.builder(masks[order]), len(order))
            self._scores = (
                new_scores if self._scores is None else Scores.cat([self._scores, new_scores])
            )
            # Stored last: after an error the coalitions can be evaluated again.
            self._rows |= {key: len(self._rows) + place for place, key in enumerate(new)}
        return self._scores[torch.tensor([self._rows[key] for key in keys], dtype=torch.int64)]

    def evaluate(self, build: Build, count: int) -> Scores:
        """Evaluate ``count`` models, divided among the ranks, and return their scores without storing them."""
        rank, size = self._ranks.rank, self._ranks.size
        if size == 1 or count < size:
            return self.evaluator.evaluate(build, count)
        mine = range(rank, count, size)
        part = self.evaluator.evaluate(lambda index, out: build(mine[index], out), len(mine))
        parts = self._ranks.all_gather(part, "scores of coalitions")
        order = torch.tensor([index for r in range(size) for index in range(r, count, size)])
        return Scores.cat(parts)[order.argsort()]


#: A performance measure of models, or several names of classifiers' scores, each of which gives a column of utilities.
Measure = str | ModelScore | Sequence[str]


@checked
class CoalitionUtility:
    """Coalition game of a round's cohort.

    The model of coalition S is x + server_lr * sum_{i in S} w_i(S) d_i, with x the round's global model, d_i client i's
    update (a row of ``round.state_updates``) and w_i(S) its weight in S. It is x itself if S is empty or its weights
    sum to 0. Buffers (BatchNorm's statistics) are averages of the members' own with weights that sum to 1 inside S,
    without ``server_lr``, because other sums can make a running variance negative.

    Each model is computed by a matrix-vector product of its own, so it is bitwise identical whatever the other
    coalitions of the call are. At any time only one model (CPU) or one chunk of models (CUDA) is in memory.

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
        self.metric, self.num_players, self.table = (
            metric,
            len(round),
            table or CoalitionTable(round, evaluator),
        )
        self._models = CoalitionModels(round, weighting, server_lr)

    @property
    def evaluations(self) -> int:
        """Number of models evaluated for the table, which several games may share."""
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
    """Convert K models' scores to utilities (higher is better), ``[K]``, or ``[K, M]`` for M classes or several
    names.
    """
    if isinstance(metric, ModelScore):
        return metric.utility(scores.value(metric.name))
    if isinstance(metric, str):
        return scores.value(metric)
    return torch.stack([scores.value(name) for name in metric], 1)


def check_untrained(asking: str, measure: Measure, scores: Scores) -> None:
    """Raise ConfigurationError if the untrained model's score or outputs are not finite, so that no value would be."""
    numbers = [utility_of(scores, measure)]
    if scores.outputs is not None:
        numbers.append(scores.outputs)
    if not all(number.isfinite().all() for number in numbers):
        name = measure if isinstance(measure, str | ModelScore) else ", ".join(measure)
        raise undefined_untrained(asking, name, scores.outputs)
