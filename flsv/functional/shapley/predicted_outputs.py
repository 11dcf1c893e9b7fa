r"""Shapley values from predicted outputs: the utilities of coalitions that were never trained.

Training a federation for every coalition of its n clients costs 2^n trainings. Scores of single clients are cheap, but
do not show on which samples a model is right. So this module predicts the *outputs* of an untrained coalition's model
for every validation sample, from those of the trained coalitions, and scores them.

A federation's model is approximately a function of the mixture of data on which it was trained. Let w_S be the members'
shares of the weight of coalition S, a point of the simplex. Its corners are single clients, and the grand coalition is
an inner point. Two predictions are made:

- *interpolation*: a Gaussian process over these points with the kernel

  .. math:: k(S, T) = 4 \langle w_S, w_T \rangle + \exp(-|w_S - w_T|^2 / 0.5)

  and an unknown constant mean, the same for every output: the outputs of S are a fixed linear combination of the
  trained coalitions' outputs, whose coefficients :func:`interpolation_weights` returns. For classifiers the centered
  logits are interpolated, see :func:`cap_logits`.
- *ensemble*: the mean of the outputs of the members' own models (for classifiers, of their probabilities), weighted by
  w_S. This is SaFE (Kumar et al., PMC9890952, 2022). Ensemble games are those of Rozemberczki and Sarkar (CIKM 2021).

The value is the mean of the two games' Shapley values. Their difference shows where the prediction is bad. Trained
coalitions keep their own utility in both games, so that the values are exact if all coalitions were trained.

The interpolation is flsv's own method. ``docs/results/predicted.md`` compares the values with those of retrained
coalitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Generator, Tensor

from flsv.functional.joint_shares import CaseValues
from flsv.functional.shapley.exact import (
    coalition_chunks,
    exact_shapley,
    shapley_of_table,
    weights_by_size,
)
from flsv.functional.shapley.game import ShapleyEstimate, coalition_keys
from flsv.functional.shapley.halving_games import halving_predictions
from flsv.functional.shapley.halvings import has_halvings
from flsv.functional.shapley.mixtures import Prediction, TrainedOutputs, ensemble, interpolation
from flsv.functional.shapley.surrogate import joint_shapley

#: Up to this number of players all 2^n coalitions are predicted. With more players so many coalitions are drawn.
MAX_PREDICTED_PLAYERS = 16
NUM_DRAWN_COALITIONS = 2**14
#: As many coalitions are predicted at once as have this number of outputs together, or some more, for which the trained
#: outputs are read once, if their outputs fit into memory.
OUTPUTS_PER_CHUNK = 2**19
MIN_COALITIONS_PER_CHUNK = 8
MAX_OUTPUTS_PER_CHUNK = 2**25
#: Number of bootstrap resamples of the validation samples, for a measure that is not a mean over samples.
NUM_RESAMPLES = 20
#: The largest number of scores on resamples that are computed. Each takes milliseconds.
MAX_RESAMPLED_SCORES = 1500
#: The largest number of utilities in memory at once.
UTILITIES_PER_CHUNK = 2**22

Score = Callable[[Tensor], Tensor]
"""A function from the outputs ``[c, V, ...]`` of c models for V samples to their utilities ``[c]`` or ``[c, M]``."""


@dataclass(frozen=True, eq=False)
class PredictedValues(ShapleyEstimate):
    """Shapley values from predicted outputs.

    Attributes:
        disagreement: ``[n]`` or ``[n, M]``, the value of the interpolated game minus that of the ensemble's game. With
            halves, the values' standard deviation over the games, times the root of 2. If it is large, the prediction
            is bad.
    """

    disagreement: Tensor


class ValuesFromOutputs(Protocol):
    """Protocol of what computes Shapley values from the outputs of trained coalitions: an :class:`OutputMeasure`, or
    clients who score models themselves.
    """

    def shapley(
        self,
        trained: Tensor,
        utilities: Sequence[Tensor],
        outputs: Iterable[Tensor],
        weights: Tensor,
    ) -> list[PredictedValues]:
        """Compute Shapley values after several rounds, from the utilities and outputs of each round, with the arguments
        of :func:`predicted_shapley`.
        """
        ...


@dataclass(frozen=True, eq=False)
class OutputMeasure:
    """A performance measure of models, as a function of their outputs for V validation samples.

    Attributes:
        utility: a function from outputs ``[c, V, ...]`` to utilities ``[c]`` or ``[c, M]``.
        logits: whether the outputs are logits.
        is_bounded: whether predictions are limited to the range of the trained coalitions' outputs.
        order: int64 ``[V]``, the order of the samples in the outputs that the functions get. None: that of the outputs
            of the trained coalitions.
        by_sample: a function from outputs to utilities ``[c, R]`` on parts of the samples: on each sample if the
            measure is a mean over samples, else on bootstrap resamples, drawn with replacement. None: not known.
        is_resampled: whether ``by_sample`` is of resamples.
        strata: int64 ``[V]``, the stratum of each sample. Resamples keep the sizes of strata, such as those of the
            classes.
    """

    utility: Score
    logits: bool
    is_bounded: bool = False
    order: Tensor | None = None
    by_sample: Score | None = None
    is_resampled: bool = False
    strata: Tensor | None = None

    def shapley(
        self,
        trained: Tensor,
        utilities: Sequence[Tensor],
        outputs: Iterable[Tensor],
        weights: Tensor,
    ) -> list[PredictedValues]:
        """Compute Shapley values after several rounds, see :class:`ValuesFromOutputs`."""
        return values_of_rounds(trained, utilities, outputs, weights, measure=self)

    def shapley_by_sample(
        self, trained: Tensor, outputs: Tensor, weights: Tensor
    ) -> CaseValues | None:
        """Compute the Shapley values on each part of the validation samples.

        Args:
            trained: bool ``[T, n]``, the trained coalitions, see :func:`predicted_shapley`.
            outputs: ``[T, V, ...]``, the outputs of their models. The empty coalition's model is among these.
            weights: ``[n]``, the clients' weights in the federation's average.

        Returns:
            The values. None if they are not known, their computation would take too long, or a score is not finite.
        """
        if self.by_sample is None or self._is_expensive(num_clients=trained.shape[1]):
            return None
        utilities = self.by_sample(outputs if self.order is None else outputs[:, self.order])
        if not utilities.isfinite().all():
            return None
        # Predicted outputs, too, are brought into this order before they are scored.
        measure_of_parts = replace(self, utility=self.by_sample)
        values = case_values(trained, utilities, outputs, weights, measure_of_parts)
        if self.order is not None:
            values = values[:, self.order.argsort()]  # the original order
        return CaseValues(values, self.strata, self.is_resampled)

    def _is_expensive(self, num_clients: int) -> bool:
        if num_clients > MAX_PREDICTED_PLAYERS:
            return True
        return self.is_resampled and NUM_RESAMPLES * 2**num_clients > MAX_RESAMPLED_SCORES


def predictions_for(trained: TrainedOutputs) -> list[Prediction]:
    """Return the predictions of untrained coalitions' outputs: by interpolation and by ensemble, or with halvings those
    of :mod:`flsv.functional.shapley.halving_games`.
    """
    if has_halvings(trained.masks):
        return halving_predictions(trained)
    return [interpolation(trained), ensemble(trained)]


def count_predictions(trained: Tensor, logits: bool) -> int:
    """Return how many outputs are predicted, if ``trained [T, n]`` are the trained coalitions: of all others, or of as
    many as are drawn, by each prediction.
    """
    num_trained, num_players = trained.shape
    are_drawn = num_players > MAX_PREDICTED_PLAYERS
    num_coalitions = NUM_DRAWN_COALITIONS if are_drawn else 2**num_players
    num_predictions = 4 if logits and has_halvings(trained) else 2
    return num_predictions * (num_coalitions - num_trained)


class PredictedGame:
    """Game with P predicted utilities per coalition, from masks ``[K, n]`` to ``[K, P * M]``. Trained coalitions have
    their own utilities P times, others the scores of predicted outputs.
    """

    # The M utilities by the first prediction come first. A ValueError is raised if shapes do not fit, a number is not
    # finite, or a required coalition is missing.

    def __init__(
        self,
        trained: Tensor,
        utilities: Tensor,
        outputs: Tensor,
        weights: Tensor,
        measure: OutputMeasure,
    ) -> None:
        utilities = torch.as_tensor(utilities).detach()
        utilities = utilities.double().cpu()
        _check_trained(trained, utilities, outputs, weights)
        rows = utilities.reshape(len(trained), -1)
        self._utilities = dict(zip(coalition_keys(trained.cpu()), rows))
        self._num_games = rows.shape[1]
        self._score = measure.utility
        self._coalitions_per_chunk = _coalitions_per_chunk(outputs[0].numel())

        members = _outputs_with_members(trained, outputs, weights, measure)
        self._predictions = predictions_for(members)
        self.num_predictions = len(self._predictions)
        # The range of each sample's outputs, which no prediction leaves.
        self._range = None
        if measure.is_bounded:
            self._range = members.ordered(members.outputs).aminmax(dim=0)

    def __call__(self, masks: Tensor) -> Tensor:
        keys = coalition_keys(masks.cpu())
        utilities = torch.empty(len(masks), self.num_predictions, self._num_games).double()
        untrained = []
        for position, key in enumerate(keys):
            if key in self._utilities:
                utilities[position] = self._utilities[key]
            else:
                untrained.append(position)

        if untrained:
            for positions in torch.tensor(untrained).split(self._coalitions_per_chunk):
                predicted_utilities = self._predicted_utilities(masks[positions])
                shape = (len(positions), self.num_predictions, self._num_games)
                utilities[positions] = predicted_utilities.view(shape)
        return utilities.flatten(1)

    def _predicted_utilities(self, masks: Tensor) -> Tensor:
        """Return the utilities ``[c, P, ...]`` of c coalitions by each prediction."""
        utilities = []
        for predict in self._predictions:
            outputs = predict(masks)
            if self._range is not None:
                outputs = outputs.clamp(*self._range)
            scores = self._score(outputs)
            utilities.append(scores.double().cpu())
        return torch.stack(utilities, 1)


def _coalitions_per_chunk(num_outputs: int) -> int:
    """Return how many coalitions of ``num_outputs`` are predicted at once."""
    num_outputs = max(1, num_outputs)
    max_coalitions = MAX_OUTPUTS_PER_CHUNK // num_outputs
    min_coalitions = min(MIN_COALITIONS_PER_CHUNK, max_coalitions)
    return max(OUTPUTS_PER_CHUNK // num_outputs, min_coalitions, 1)


def _outputs_with_members(
    trained: Tensor,
    outputs: Tensor,
    weights: Tensor,
    measure: OutputMeasure,
) -> TrainedOutputs:
    """Return the outputs of all trained coalitions but the empty one."""
    has_members = trained.any(1)
    return TrainedOutputs(
        masks=trained[has_members].cpu(),
        outputs=outputs[has_members.to(outputs.device)],
        weights=weights,
        logits=measure.logits,
        order=measure.order,
    )


def _check_trained(
    trained: Tensor,
    utilities: Tensor,
    outputs: Tensor,
    weights: Tensor,
) -> None:
    """Raise ValueError unless shapes fit, numbers are finite and the required coalitions are included."""
    count, num_players = trained.shape
    lengths = (len(utilities), len(outputs), len(weights))
    if trained.dtype != torch.bool or lengths != (count, count, num_players):
        raise ValueError(
            f"expected trained bool [T, n], T utilities and outputs, and n weights, but got {list(trained.shape)}, "
            f"{list(utilities.shape)}, {list(outputs.shape)} and {list(weights.shape)}."
        )
    if not utilities.isfinite().all() or not outputs.isfinite().all():
        raise ValueError("expected finite utilities and outputs of the trained coalitions.")
    sizes = trained.sum(1)
    has_all_singles = trained[sizes == 1].any(0).all()
    has_ends = {0, num_players} <= set(sizes.tolist())
    if not has_ends or not has_all_singles:
        raise ValueError(
            "expected the empty coalition, the grand coalition and each player alone among the trained coalitions."
        )


def predicted_shapley(
    trained: Tensor,
    utilities: Tensor,
    outputs: Tensor,
    weights: Tensor,
    score: Score,
    *,
    logits: bool,
    generator: Generator | None = None,
) -> PredictedValues:
    """Compute Shapley values from the outputs of a few trained coalitions. The outputs of all others are predicted.

    Args:
        trained: bool ``[T, n]``, the trained coalitions, at least the empty and the grand one, and each player alone.
            Train all or no coalitions of each size, or complementary halves, see
            :func:`flsv.functional.choose_halvings`. Otherwise the values favor the members of trained coalitions.
        utilities: ``[T]`` or ``[T, M]``, the trained coalitions' own utilities, such as accuracies.
        outputs: ``[T, V, ...]``, their models' outputs for V validation samples, for classifiers logits ``[T, V, M]``.
        weights: ``[n]``, the weights with which the federation averages its clients, such as numbers of samples.
        score: a function from outputs ``[c, V, ...]`` to utilities ``[c]`` or ``[c, M]``, in the utilities' unit.
        logits: whether the outputs are logits. False for regressions.
        generator: the generator that draws coalitions of more than 16 players. None: one with seed 0.

    Returns:
        The values, float64 ``[n]`` or ``[n, M]``, and the two predictions' ``disagreement``, of the same shape. Up to
        16 players they are computed from all 2^n coalitions, with ``stderr`` 0, otherwise from 16,384 drawn ones by
        :func:`flsv.functional.surrogate_shapley`, with its standard error.

    Raises:
        ValueError: the shapes do not fit, a number is not finite, or a required coalition is missing.

    Example:
        Two clients know one class each. Only their coalition is right on both samples.

        >>> logits = torch.tensor([[[0.0, 0], [0, 0]], [[4, 0], [4, 0]], [[0, 4], [0, 4]], [[2, 0], [0, 2]]])
        >>> trained = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]]).bool()
        >>> accuracy = lambda outputs: (outputs.argmax(-1) == torch.arange(2)).double().mean(1)
        >>> predicted_shapley(trained, accuracy(logits), logits, torch.ones(2), accuracy, logits=True).values
        tensor([0.2500, 0.2500], dtype=torch.float64)
    """
    (values,) = values_of_rounds(
        trained,
        utilities=[torch.as_tensor(utilities)],
        outputs=[outputs],
        weights=weights,
        measure=OutputMeasure(score, logits),
        generator=generator,
    )
    return values


def values_of_rounds(
    trained: Tensor,
    utilities: Sequence[Tensor],
    outputs: Iterable[Tensor],
    weights: Tensor,
    measure: OutputMeasure,
    generator: Generator | None = None,
) -> list[PredictedValues]:
    """Compute the values of :func:`predicted_shapley` after each of several rounds, from the ``utilities`` and
    ``outputs`` of each round.
    """
    num_players = trained.shape[1]
    games = (
        PredictedGame(trained, round_utilities, round_outputs, weights, measure)
        for round_utilities, round_outputs in zip(utilities, outputs)
    )
    if num_players <= MAX_PREDICTED_PLAYERS:
        estimates = [exact_shapley(game, num_players) for game in games]
    else:
        estimates = _joint_estimates(games, num_players, len(utilities), generator)
    game_shape = utilities[0].shape[1:]
    return [_mean_of_predictions(estimate, game_shape) for estimate in estimates]


def _joint_estimates(
    games: Iterable[PredictedGame],
    num_players: int,
    num_games: int,
    generator: Generator | None,
) -> list[ShapleyEstimate]:
    """Estimate the values of games of many players from the same drawn coalitions."""

    def joint_utility(masks: Tensor) -> Tensor:
        # This is called once, with all coalitions. So each game is made, played and forgotten.
        return torch.cat([game(masks) for game in games], dim=1)

    if generator is None:
        generator = torch.Generator().manual_seed(0)
    # With 100 players its error is a fifth of that of permutation sampling with 65,536 coalitions.
    joint_estimate = joint_shapley(
        joint_utility,
        num_players,
        budget=NUM_DRAWN_COALITIONS,
        generator=generator,
        num_parts=num_games,
    )
    values_by_game = joint_estimate.values.chunk(num_games, dim=1)
    stderr_by_game = joint_estimate.stderr.chunk(num_games, dim=1)
    return [
        ShapleyEstimate(values, stderr, joint_estimate.evaluations)
        for values, stderr in zip(values_by_game, stderr_by_game)
    ]


def case_values(
    trained: Tensor,
    utilities: Tensor,
    outputs: Tensor,
    weights: Tensor,
    measure: OutputMeasure,
) -> Tensor:
    """Compute the Shapley values of R games at once, float64 ``[n, R]``.

    Args:
        trained: bool ``[T, n]``, the trained coalitions, see :func:`predicted_shapley`.
        utilities: ``[T, R]``, their utilities in each game.
        outputs: ``[T, V, ...]``, their models' outputs, see :func:`predicted_shapley`.
        weights: ``[n]``, the clients' weights in the federation's average.
        measure: the measure of R utilities ``[c, R]``, such as one for each sample.
    """
    game = PredictedGame(trained, utilities, outputs, weights, measure)
    num_games = utilities.shape[1]
    num_players = trained.shape[1]
    values = torch.zeros(num_players, num_games, dtype=torch.float64)
    chunk_size = max(1, UTILITIES_PER_CHUNK // (game.num_predictions * num_games))
    for masks in coalition_chunks(num_players, chunk_size):
        predictions = game(masks).view(len(masks), game.num_predictions, num_games)
        values += _shapley_weights(masks).T @ predictions.mean(1)
    return values


def _shapley_weights(masks: Tensor) -> Tensor:
    """Return the weight of each coalition's utility in each player's Shapley value, float64 ``[K, n]``."""
    sizes_of_others = masks.sum(1, keepdim=True) - masks.long()
    weights = weights_by_size(masks.shape[1])[sizes_of_others]
    return torch.where(masks, weights, -weights)


def values_of_tables(tables: Tensor) -> PredictedValues:
    """Compute Shapley values from all coalitions' utilities by interpolation and by ensemble, ``[2^n, 2]`` or ``[2^n,
    2, M]``.
    """
    values = shapley_of_table(tables.double().flatten(1))
    estimate = ShapleyEstimate(values, torch.zeros_like(values), len(tables))
    return _mean_of_predictions(estimate, tables.shape[2:])


def _mean_of_predictions(estimate: ShapleyEstimate, game_shape: Sequence[int]) -> PredictedValues:
    """Average the values ``[n, P * M]`` of a game by P predictions. The game has the shape ``[M]``, or ``[]`` if M is
    1.
    """
    num_players = len(estimate.values)
    shape = (num_players, -1, *game_shape)
    values_by_prediction = estimate.values.double().view(shape)
    stderr_by_prediction = estimate.stderr.double().view(shape)
    num_predictions = values_by_prediction.shape[1]
    if num_predictions == 2:
        by_interpolation, by_ensemble = values_by_prediction.unbind(1)
        disagreement = by_interpolation - by_ensemble
    else:
        # The factor makes this, for two predictions, the absolute value of their difference.
        disagreement = math.sqrt(2) * values_by_prediction.std(1)
    return PredictedValues(
        values=values_by_prediction.mean(1),
        stderr=stderr_by_prediction.square().mean(1).sqrt(),
        evaluations=estimate.evaluations,
        disagreement=disagreement,
    )


def favors_nobody(trained: Tensor) -> bool:
    """Return whether outputs of the other coalitions can be predicted without favor: each player alone is among the
    ``trained`` ones, with all or no coalitions of every other size, or with complementary halves.
    """
    return has_complete_sizes(trained) or has_halvings(trained)


def has_complete_sizes(trained: Tensor) -> bool:
    """Return whether ``trained`` contains each player alone, and all or no coalitions of every other size."""
    num_players = trained.shape[1]
    sizes = trained.sum(1)
    counts = torch.bincount(sizes, minlength=num_players + 1).tolist()
    has_all_singles = counts[1] == num_players
    if not has_all_singles:
        return False
    full_counts = [math.comb(num_players, size) for size in range(num_players + 1)]
    return all(count in (0, full) for count, full in zip(counts, full_counts))
