"""CoalitionUtility: the performance of the models that are aggregated from only some of a round's updates.

The game is from Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, definition 4.1,
with uniform weights. Fixed weights are from line 12 of Algorithm 1 in Guo et al., "A Fair Contribution Measurement
Method for Federated Learning", Sensors 24(15), 2024.
"""

from __future__ import annotations

from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flsv.core import ALONE, Ranks, Round
from flsv.functional.shapley.game import coalition_keys, first_positions
from flsv.games.vector_evaluator import Build, Scores, UtilityMetric, VectorEvaluator
from flsv.scores.performance import Measure, as_measure, undefined_untrained
from flsv.utilities.declared import Positive, checked
from flsv.utilities.errors import ConfigurationError


class Renormalized(NamedTuple):
    """Weights ``[k]`` that are divided by their sum over the members of each coalition."""

    weights: Tensor


#: A sum of weights counts as 1 if it differs from 1 by at most this number.
_WEIGHT_TOLERANCE = 1e-12

Weighting = Literal["uniform", "samples"] | Tensor | Renormalized


class CoalitionModels:
    """Builder of the models of a round's coalitions, with one kind of weights of the updates."""

    def __init__(
        self,
        round: Round,
        weighting: Weighting,
        server_lr: float,
    ) -> None:
        self._round = round
        self._server_lr = server_lr
        self._is_normalized = not isinstance(weighting, Tensor)
        self._weights = _client_weights(round, weighting)
        # Two objects of one round have equal keys if they build the same model for each coalition.
        weight_bytes = self._weights.numpy().tobytes()
        self.key = (self._is_normalized, server_lr, weight_bytes)

    def weights(self, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the clients' weights in K coalitions, once for parameters and once for buffers, float64 ``[K, k]``
        each.
        """
        member_weights = masks * self._weights
        total = torch.zeros(len(masks), dtype=torch.float64)
        # The columns are added one by one, because the rounding of sum(-1) depends on the number of rows.
        for column in member_weights.unbind(1):
            total = total + column

        divisor = torch.where(total > 0, total, 1.0)  # no NaN for a coalition without weight
        shares = member_weights / divisor[:, None]
        parameter_weights = shares if self._is_normalized else member_weights
        # Buffers are averaged, without server_lr.
        return self._server_lr * parameter_weights, shares

    def builder(self, masks: Tensor) -> Build:
        """Return a function ``build(i, out)`` that writes the model of coalition ``masks[i]`` into ``out [P]``."""
        # A model is x + sum_i w_i (x_i - s_i), with x the global model, x_i client i's model, s_i the model it started
        # from. It is computed from the clients' models, so that no second matrix, of updates, is needed.
        num_parameters = self._round.space.num_parameters  # before the buffers in a vector
        global_model = self._round.global_vector
        client_models = self._round.client_vectors  # [k, P]
        client_parameters = client_models[:, :num_parameters].T
        client_buffers = client_models[:, num_parameters:].T

        exact_weights, exact_buffer_weights = self.weights(masks)  # float64 [K, k]
        weights_of_global_model = (1 - exact_weights.sum(1)).tolist()
        # In the models' dtype and on their device.
        parameter_weights = exact_weights.to(global_model)
        buffer_weights = exact_buffer_weights.to(global_model)
        has_members = buffer_weights.any(1).tolist()

        def build(index: int, out: Tensor) -> None:
            # Each model is a product of one shape. In one product of all masks and updates, the rounding would depend
            # on the number of masks, and CUDA may use TF32. The cost is small compared with a pass over the data.
            if not has_members[index]:
                out.copy_(global_model)
                return
            parameters = out[:num_parameters]
            torch.mv(client_parameters, parameter_weights[index], out=parameters)
            self._add_initial_models(
                parameters, exact_weights[index], weights_of_global_model[index]
            )
            if num_parameters < len(out):
                torch.mv(client_buffers, buffer_weights[index], out=out[num_parameters:])

        return build

    def _add_initial_models(self, out: Tensor, weights: Tensor, global_weight: float) -> None:
        """Add x - sum_i w_i s_i to ``out``, which is ``global_weight`` * x if all started from the global model x."""
        global_parameters = self._round.global_vector[: len(out)]
        initial_models = self._round.matrix.starts
        if all(model is self._round.global_vector for model in initial_models):
            if abs(global_weight) > _WEIGHT_TOLERANCE:
                out.add_(global_parameters, alpha=global_weight)
            return
        out.add_(global_parameters)
        for weight, model in zip(weights.tolist(), initial_models):
            if weight:
                out.sub_(model[: len(out)], alpha=weight)


def _client_weights(round: Round, weighting: Weighting) -> Tensor:
    """Return a weight per client of the round, float64 ``[k]``."""
    if isinstance(weighting, Renormalized):
        return _checked_weights(weighting.weights, len(round))
    if isinstance(weighting, Tensor):
        return _checked_weights(weighting, len(round))
    if weighting == "uniform":
        return torch.ones(len(round), dtype=torch.float64)
    return round.num_samples.to("cpu", torch.float64)


def _checked_weights(weights: Tensor, num_clients: int) -> Tensor:
    weights = weights.detach().to("cpu", torch.float64)
    is_valid = weights.isfinite() & (weights >= 0)
    if weights.shape != (num_clients,) or not is_valid.all():
        raise ConfigurationError(
            f"CoalitionUtility(weighting=...): expected {num_clients} weights, finite and not negative, one for "
            f"each client of the round; got {weights.tolist()}."
        )
    return weights


#: The key of the :class:`CoalitionModels`, or None for the empty coalition, and the key of the coalition's mask.
CoalitionKey = tuple[object, int | bytes]


def _keys_of(models: CoalitionModels, masks: Tensor) -> list[CoalitionKey]:
    keys: list[CoalitionKey] = []
    has_members = masks.any(1).tolist()
    for mask_key, is_not_empty in zip(coalition_keys(masks), has_members):
        # The empty coalition's model is the global model, however updates are weighted.
        weighting_key = models.key if is_not_empty else None
        keys.append((weighting_key, mask_key))
    return keys


class CoalitionTable:
    """Table of the scores of a round's coalitions, each of which is evaluated once.

    Games with different performance measures share all scores. Games with different weightings share only the score of
    the empty coalition.

    Args:
        round: the round whose clients are the players.
        evaluator: the evaluator of the coalitions' models.
        ranks: the processes among which the evaluations are divided. All of them get all scores. If clients score the
            models, the evaluations are not divided.

    Attributes:
        evaluations: the number of models evaluated so far.
    """

    _scores: Scores | None = None

    def __init__(
        self,
        round: Round,
        evaluator: VectorEvaluator,
        ranks: Ranks = ALONE,
    ) -> None:
        self.round = round
        self.evaluator = evaluator
        self._ranks = ALONE if evaluator.requests_from_clients else ranks
        # {coalition: row of the scores}
        self._row_by_coalition: dict[CoalitionKey, int] = {}

    @property
    def evaluations(self) -> int:
        return len(self._row_by_coalition)

    def scores(self, models: CoalitionModels, masks: Tensor) -> Scores:
        """Return the scores of the K coalitions in ``masks``, bool ``[K, k]`` on the CPU.

        Coalitions that are not in the table yet are evaluated, with models that ``models`` builds, and added.
        """
        keys = _keys_of(models, masks)
        # Of each coalition that is not in the table, {key: its position in masks}.
        new_positions = first_positions(keys, self._row_by_coalition)
        new_masks = masks[list(new_positions.values())]
        if len(new_masks) or self._scores is None:
            build = models.builder(new_masks)
            new_scores = self.evaluate(build, len(new_masks))
            if self._scores is None:
                self._scores = new_scores
            else:
                self._scores = Scores.cat([self._scores, new_scores])
            # The rows are stored after the evaluation, so that coalitions can be evaluated again after an error.
            for key in new_positions:
                self._row_by_coalition[key] = len(self._row_by_coalition)

        rows = [self._row_by_coalition[key] for key in keys]
        return self._scores[torch.tensor(rows, dtype=torch.int64)]

    def evaluate(self, build: Build, count: int) -> Scores:
        """Evaluate ``count`` models, divided among the ranks, and return their scores without storing them."""
        num_ranks = self._ranks.size
        if num_ranks == 1 or count < num_ranks:
            return self.evaluator.evaluate(build, count)

        # Rank r of R evaluates the models r, r + R, r + 2 R, ...
        indices_by_rank = [range(rank, count, num_ranks) for rank in range(num_ranks)]
        scores_of_rank = self._scores_or_error(build, indices_by_rank[self._ranks.rank])
        scores_by_rank = self._ranks.all_gather(scores_of_rank, "scores of coalitions")
        for rank, scores_or_error in enumerate(scores_by_rank):
            if isinstance(scores_or_error, str):
                raise RuntimeError(f"rank {rank}: {scores_or_error}")

        scores = Scores.cat(scores_by_rank)
        model_of_row = torch.tensor(list(chain.from_iterable(indices_by_rank)))
        row_of_model = model_of_row.argsort()
        return scores[row_of_model]

    def _scores_or_error(self, build: Build, indices: range) -> Scores | str:
        """Evaluate the models with these indices. Return an error as a text, since the other ranks wait for an
        answer.
        """

        def build_of_rank(position: int, out: Tensor) -> None:
            build(indices[position], out)

        try:
            return self.evaluator.evaluate(build_of_rank, len(indices))
        except Exception as error:
            return f"{type(error).__name__}: {error}"


@checked
class CoalitionUtility:
    """Coalition game of a round's cohort.

    The model of coalition S is x + server_lr * sum_{i in S} w_i(S) d_i, with x the round's global model, d_i client i's
    update (a row of ``round.state_updates``) and w_i(S) its weight in S. It is x itself if S is empty or its weights
    sum to 0. Buffers (BatchNorm's statistics) are averages of the members' buffers, with weights that sum to 1 inside
    S and without ``server_lr``, because other sums can make a running variance negative.

    Each model is computed by a matrix-vector product of its own, so it does not depend on the other coalitions of the
    call, to the bit. At any time only one model (CPU) or one chunk of models (CUDA) is in memory.

    Args:
        round: the round whose clients are the players, in the order of ``client_ids``.
        evaluator: evaluator of models on the server's validation set.
        metric: the performance measure, see :mod:`flsv.scores.performance`. A :class:`ModelEvaluator` gives
            ``"accuracy"``, ``"balanced_accuracy"`` (mean over the classes with samples), ``"negative_loss"`` (minus
            the mean cross-entropy, nats) and ``"per_class_accuracy"`` (0 for classes without samples). More is better.
            Any other measure is a :class:`flsv.scores.Measure`.
        weighting: the weights w_i(S): ``"uniform"`` for 1/|S|, ``"samples"`` for n_i / sum_{j in S} n_j, with n_i the
            samples of client i, a tensor of fixed weights w_i ``[k]``, which are not renormalized inside S, or
            ``Renormalized(weights)`` for w_i / sum_{j in S} w_j (equation 4 of Guo et al.).
        server_lr: the server's learning rate: the factor of the members' weighted mean update.
        table: the table that stores the coalitions' scores, which several games of a round may share. None: a new
            table.

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
        >>> coalitions = torch.tensor([[True, False], [False, True], [True, True]])
        >>> CoalitionUtility(round, evaluator)(coalitions)
        tensor([1., 0., 0.], dtype=torch.float64)
        >>> utility = CoalitionUtility(round, evaluator, weighting="samples")
        >>> utility(coalitions), utility.evaluations
        (tensor([1., 0., 1.], dtype=torch.float64), 3)
    """

    def __init__(
        self,
        round: Round,
        evaluator: VectorEvaluator,
        *,
        metric: UtilityMetric | Measure = "accuracy",
        weighting: Weighting = "uniform",
        server_lr: Positive = 1.0,
        table: CoalitionTable | None = None,
    ) -> None:
        self.metric = metric
        self.num_players = len(round)
        self.table = table or CoalitionTable(round, evaluator)
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
        has_column_per_player = masks.ndim == 2 and masks.shape[1] == self.num_players
        if masks.dtype != torch.bool or not has_column_per_player:
            raise ValueError(
                f"expected masks bool [K, {self.num_players}], got {masks.dtype} {list(masks.shape)}: a row per "
                "coalition, a column per player."
            )
        scores = self.table.scores(self._models, masks.cpu())
        return utility_of(scores, self.metric)


def utility_of(scores: Scores, metric: str | Measure) -> Tensor:
    """Convert the scores of K models to utilities, of which more is better, ``[K]``, or ``[K, M]`` for a score per
    class.
    """
    measure = as_measure(metric)
    return measure.utility(scores.value(measure.name))


def check_untrained(requester: str, measure: Measure, scores: Scores) -> None:
    """Raise ConfigurationError if the untrained model's score or outputs are not finite. All values would be NaN."""
    tensors = [utility_of(scores, measure)]
    if scores.outputs is not None:
        tensors.append(scores.outputs)
    if all(tensor.isfinite().all() for tensor in tensors):
        return
    raise undefined_untrained(requester, measure, scores.outputs)
