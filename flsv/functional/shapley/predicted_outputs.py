r"""Shapley values from predicted outputs: the utilities of coalitions that were never trained.

Training a federation for every coalition of its n clients costs 2^n trainings. A score of each client alone is cheap,
but does not show on which samples a model is right. Outputs do. So this module predicts the *outputs* that a missing
coalition's model would have on every validation sample, from those of the coalitions that were trained, and scores
them.

A federation's model is, nearly, a function of the mixture of data that it was trained on. Let w_S be the members'
shares of the weight of coalition S, a point of the simplex. Its corners are single clients, and all clients are an
inner point. Two predictions are made:

- *interpolation*: a Gaussian process over these points with the kernel

  .. math:: k(S, T) = 4 \langle w_S, w_T \rangle + \exp(-|w_S - w_T|^2 / 0.5)

  and an unknown constant mean, the same for every output: the outputs of S are a fixed linear combination of the
  trained coalitions' outputs, whose coefficients :func:`interpolation_weights` returns. Of classifiers the centered
  logits are interpolated, see :func:`cap_logits`.
- *ensemble*: the mean of the outputs of the members' own models, weighted by w_S. Of classifiers, of their
  probabilities. This is SaFE (Kumar et al., PMC9890952, 2022). Ensemble games are those of Rozemberczki and Sarkar
  (CIKM 2021).

The value is the mean of the two games' Shapley values. Their difference shows where the prediction is bad. Trained
coalitions keep their own utility in both games, so that the values are exact if all coalitions were trained.

The interpolation is this package's own. ``docs/results/predicted.md`` has how far the values lie from those of
retrained coalitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from flsv.functional.shapley.exact import all_coalitions, exact_shapley, shapley_of_table
from flsv.functional.shapley.game import ShapleyEstimate, coalition_keys
from flsv.functional.shapley.surrogate import surrogate_shapley

#: Factor of the inner product in the kernel, and the squared width of its Gaussian part.
LINEAR_FACTOR = 4.0
GAUSSIAN_WIDTH = 0.5
#: The variance that is added to the kernel's diagonal.
NOISE_VARIANCE = 1e-3
#: The largest norm of a model's centered logits, as a multiple of the median over the single clients' models.
MAX_NORM_RATIO = 1.5
#: The least probability of a class in an ensemble.
MIN_PROBABILITY = 1e-6
#: The largest number of players whose 2^n coalitions are all predicted, and how many are drawn with more.
MAX_PREDICTED_PLAYERS = 16
NUM_DRAWN_COALITIONS = 2**14
#: The most numbers of predicted outputs that are in memory at once.
OUTPUTS_PER_CHUNK = 2**19
#: The most utilities that are in memory at once.
UTILITIES_PER_CHUNK = 2**22
#: Predictions of each coalition: by interpolation, then by ensemble.
NUM_PREDICTIONS = 2
#: The smallest divisor, against 0 / 0.
TINY = 1e-300

Score = Callable[[Tensor], Tensor]
"""A function from the outputs ``[c, V, ...]`` of c models for V samples to their utilities ``[c]`` or ``[c, M]``."""


def coalition_shares(masks: Tensor, weights: Tensor) -> Tensor:
    """Compute each member's share of its coalition's total weight, float64 ``[K, n]``. 0 in the empty coalition."""
    weights = weights.double().cpu()
    member_weights = masks.double() * weights
    totals = member_weights.sum(1, keepdim=True)
    return member_weights / totals.clamp_min(TINY)


def interpolation_weights(masks: Tensor, trained: Tensor, weights: Tensor) -> Tensor:
    """Compute the Gaussian process's coefficients of trained coalitions' outputs, ``[K, T]``. They predict the outputs
    of the coalitions ``masks`` from those of ``trained``. Rows sum to 1.
    """
    trained_shares = coalition_shares(trained, weights)  # [T, n]
    shares = coalition_shares(masks, weights)  # [K, n]
    # Kriging, with A = (K_TT + noise)^-1 and outputs y [T]: the mean by generalized least squares is w^T y with
    # w = A 1 / (1^T A 1), and the prediction is w^T y + k_T^T A (y - 1 w^T y). These are the coefficients of y.
    noise = NOISE_VARIANCE * torch.eye(len(trained), dtype=torch.float64)
    kernel = _kernel(trained_shares, trained_shares)
    inverse = torch.linalg.inv(kernel + noise)  # A [T, T]

    weights_of_mean = inverse.sum(0) / inverse.sum()  # w [T]
    row_sums = inverse.sum(1, keepdim=True)  # A 1 [T, 1]
    centered = inverse - row_sums * weights_of_mean
    kernel_of_masks = _kernel(shares, trained_shares)  # k_T [K, T]
    return weights_of_mean + kernel_of_masks @ centered


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    squared_distances = torch.cdist(a, b).square()
    return LINEAR_FACTOR * a @ b.T + torch.exp(-squared_distances / GAUSSIAN_WIDTH)


def cap_logits(logits: Tensor, is_single: Tensor) -> Tensor:
    """Center logits ``[T, V, ..., M]`` of T models, and scale large ones down. A model's mean norm gets at most 1.5
    times the median of the models that the mask ``is_single`` selects.
    """
    # A client could multiply its last layer by ten: no score of its model would change, but it would rule every
    # interpolation.
    means = logits.mean(-1, keepdim=True)
    centered = logits - means
    norms = centered.norm(dim=-1)  # [T, V, ...]
    model_norms = norms.flatten(1).mean(1)  # [T]
    max_norm = MAX_NORM_RATIO * model_norms[is_single].median()
    factors = max_norm / model_norms.clamp_min(TINY)
    factors = factors.clamp(max=1)
    other_axes = [1] * (logits.ndim - 1)
    return centered * factors.view(-1, *other_axes)


@dataclass(frozen=True, eq=False)
class PredictedValues(ShapleyEstimate):
    """Shapley values from predicted outputs.

    Attributes:
        disagreement: ``[n]`` or ``[n, M]``, the value of the interpolated game minus that of the ensemble's game. Where
            it is large, the prediction is bad.
    """

    disagreement: Tensor


class PredictedGame:
    """Game with two utilities per coalition, by interpolation and by ensemble, from masks ``[K, n]`` to ``[K, 2 M]``.
    Trained coalitions have their own utilities twice, others the scores of predicted outputs.
    """

    # First the M utilities of interpolated outputs, then those of the ensemble's. Raises ValueError if shapes do
    # not fit, a number is not finite, or a needed coalition is missing.

    def __init__(
        self,
        trained: Tensor,
        utilities: Tensor,
        outputs: Tensor,
        weights: Tensor,
        score: Score,
        *,
        logits: bool,
    ) -> None:
        utilities = torch.as_tensor(utilities).detach()
        utilities = utilities.double().cpu()
        _check_trained(trained, utilities, outputs, weights)
        sizes = trained.sum(1)
        is_single = sizes == 1
        has_members = sizes > 0

        rows = utilities.reshape(len(trained), -1)
        self._utilities = dict(zip(coalition_keys(trained.cpu()), rows))
        self._weights = weights
        self._score = score
        self._logits = logits
        self._trained = trained[has_members].cpu()
        self._output_shape = outputs.shape[1:]

        # For interpolation: the outputs of all trained coalitions with members.
        outputs_to_mix = outputs[has_members]
        if logits:
            outputs_to_mix = cap_logits(outputs_to_mix, is_single=is_single[has_members])
        self._outputs = outputs_to_mix.flatten(1)

        # For ensembles: the outputs of the single players, in their order.
        players = trained[is_single].int().argmax(1)
        order = players.argsort()
        single_outputs = outputs[is_single][order]
        if logits:
            single_outputs = single_outputs.softmax(-1)
        self._single_outputs = single_outputs.flatten(1)

    def __call__(self, masks: Tensor) -> Tensor:
        keys = coalition_keys(masks.cpu())
        num_games = len(next(iter(self._utilities.values())))
        utilities = torch.empty(len(masks), NUM_PREDICTIONS, num_games).double()
        untrained = []
        for position, key in enumerate(keys):
            if key in self._utilities:
                utilities[position] = self._utilities[key]
            else:
                untrained.append(position)

        if untrained:
            num_outputs = max(1, self._outputs.shape[1])
            coalitions_per_chunk = max(1, OUTPUTS_PER_CHUNK // num_outputs)
            for positions in torch.tensor(untrained).split(coalitions_per_chunk):
                scores = self._predicted_utilities(masks[positions])
                utilities[positions] = scores.view(len(positions), NUM_PREDICTIONS, num_games)
        return utilities.flatten(1)

    def _predicted_utilities(self, masks: Tensor) -> Tensor:
        """Return the utilities ``[c, 2, ...]`` of c coalitions by interpolation and by ensemble."""
        interpolated, ensemble = self._predicted_outputs(masks)
        by_interpolation = self._score(interpolated).double().cpu()
        by_ensemble = self._score(ensemble).double().cpu()
        return torch.stack([by_interpolation, by_ensemble], 1)

    def _predicted_outputs(self, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Predict outputs ``[c, V, ...]`` of c coalitions by interpolation and by ensemble."""
        # Outputs are kept flat: [T, numbers] of the T trained coalitions, [n, numbers] of single clients.
        mixing_weights = interpolation_weights(masks, self._trained, self._weights)  # [K, T]
        interpolated = mixing_weights.to(self._outputs) @ self._outputs

        shares = coalition_shares(masks, self._weights)  # [K, n]
        ensemble = shares.to(self._single_outputs) @ self._single_outputs
        if self._logits:  # an ensemble averages probabilities
            ensemble = ensemble.clamp_min(MIN_PROBABILITY).log()
        shape = (-1, *self._output_shape)
        return interpolated.view(shape), ensemble.view(shape)


def _check_trained(
    trained: Tensor,
    utilities: Tensor,
    outputs: Tensor,
    weights: Tensor,
) -> None:
    """Raise ValueError unless shapes fit, numbers are finite and the needed coalitions are there."""
    count, num_players = trained.shape
    if (
        trained.dtype != torch.bool
        or len(utilities) != count
        or len(outputs) != count
        or len(weights) != num_players
    ):
        raise ValueError(
            f"expected trained bool [T, n], T utilities and outputs, and n weights; got {list(trained.shape)}, "
            f"{list(utilities.shape)}, {list(outputs.shape)} and {list(weights.shape)}."
        )
    if not utilities.isfinite().all() or not outputs.isfinite().all():
        raise ValueError("expected finite utilities and outputs of the trained coalitions.")
    sizes = trained.sum(1)
    has_all_singles = trained[sizes == 1].any(0).all()
    has_ends = {0, num_players} <= set(sizes.tolist())
    if not has_ends or not has_all_singles:
        raise ValueError(
            "expected the empty and the grand coalition, and each player alone, among the trained."
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
    """Compute Shapley values from the outputs of a few trained coalitions. Those of all others are predicted.

    Args:
        trained: bool ``[T, n]``, the trained coalitions: the empty and the grand one, and each player alone, at least.
            Of each size train all coalitions or none: training some favors their members.
        utilities: ``[T]`` or ``[T, M]``, the trained coalitions' own utilities, such as accuracies.
        outputs: ``[T, V, ...]``, their models' outputs for V validation samples. Of classifiers logits ``[T, V, M]``.
        weights: ``[n]``, the weights with which the federation averages its clients, such as numbers of samples.
        score: a function from outputs ``[c, V, ...]`` to utilities ``[c]`` or ``[c, M]``, in the utilities' unit.
        logits: whether the outputs are logits. False for regressions.
        generator: the generator that draws coalitions of more than 16 players. None: one with seed 0.

    Returns:
        The values, float64 ``[n]`` or ``[n, M]``, and the two predictions' ``disagreement``, of the same shape. Up to
        16 players they are computed from all 2^n coalitions, with ``stderr`` 0. Beyond that from 16,384 drawn ones by
        :func:`flsv.functional.surrogate_shapley`, with the standard error of the drawing.

    Raises:
        ValueError: the shapes do not fit, a number is not finite, or a needed coalition is missing.

    Example:
        Two clients know one class each. Only together they are right on both samples.

        >>> logits = torch.tensor([[[0.0, 0], [0, 0]], [[4, 0], [4, 0]], [[0, 4], [0, 4]], [[2, 0], [0, 2]]])
        >>> trained = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]]).bool()
        >>> accuracy = lambda outputs: (outputs.argmax(-1) == torch.arange(2)).double().mean(1)
        >>> predicted_shapley(trained, accuracy(logits), logits, torch.ones(2), accuracy, logits=True).values
        tensor([0.2500, 0.2500], dtype=torch.float64)
    """
    num_players = trained.shape[1]
    game = PredictedGame(trained, utilities, outputs, weights, score, logits=logits)
    if num_players <= MAX_PREDICTED_PLAYERS:
        estimate = exact_shapley(game, num_players)
    else:
        if generator is None:
            generator = torch.Generator().manual_seed(0)
        # With 100 players its error is a fifth of that of 65,536 coalitions along orders of the players.
        estimate = surrogate_shapley(
            game, num_players, budget=NUM_DRAWN_COALITIONS, generator=generator
        )

    # The game has its M utilities by interpolation, then by ensemble: [n, 2 M].
    game_shape = torch.as_tensor(utilities).shape[1:]
    values_by_prediction = estimate.values.double().view(num_players, NUM_PREDICTIONS, *game_shape)
    stderr_by_prediction = estimate.stderr.double().view(values_by_prediction.shape)
    stderr = stderr_by_prediction.square().mean(1).sqrt()  # [n, M]
    return _mean_of_predictions(values_by_prediction, stderr, estimate.evaluations)


def case_values(
    trained: Tensor,
    utilities: Tensor,
    outputs: Tensor,
    weights: Tensor,
    score: Score,
    *,
    logits: bool,
) -> Tensor:
    """Compute the Shapley values of R games at once, float64 ``[n, R]``.

    Args:
        trained: bool ``[T, n]``, the trained coalitions, see :func:`predicted_shapley`.
        utilities: ``[T, R]``, their utilities in each game.
        outputs: ``[T, V, ...]``, their models' outputs, see :func:`predicted_shapley`.
        weights: ``[n]``, the clients' weights in the federation's average.
        score: a function from outputs ``[c, V, ...]`` to utilities ``[c, R]``, such as one for each sample.
        logits: whether the outputs are logits.
    """
    num_players = trained.shape[1]
    game = PredictedGame(trained, utilities, outputs, weights, score, logits=logits)

    num_games = utilities.shape[1]
    values = torch.zeros(num_players, num_games, dtype=torch.float64)
    coalitions_per_chunk = max(1, UTILITIES_PER_CHUNK // (NUM_PREDICTIONS * num_games))
    num_coalitions = 2**num_players
    for begin in range(0, num_coalitions, coalitions_per_chunk):
        end = min(begin + coalitions_per_chunk, num_coalitions)
        masks = all_coalitions(num_players, begin, end)
        predictions = game(masks).view(len(masks), NUM_PREDICTIONS, num_games)
        values += _shapley_weights(masks).T @ predictions.mean(1)
    return values


def _shapley_weights(masks: Tensor) -> Tensor:
    """Return the weight of each coalition's utility in each player's Shapley value, float64 ``[K, n]``."""
    num_players = masks.shape[1]
    sizes_of_others = masks.sum(1, keepdim=True) - masks.long()
    counts_by_size = [math.comb(num_players - 1, size) for size in range(num_players)]
    weights_by_size = [1 / (num_players * count) for count in counts_by_size]
    weights = torch.tensor(weights_by_size, dtype=torch.float64)[sizes_of_others]
    return torch.where(masks, weights, -weights)


def values_of_tables(tables: Tensor) -> PredictedValues:
    """Compute Shapley values from all coalitions' utilities by interpolation and by ensemble, ``[2^n, 2]`` or ``[2^n,
    2, M]``.
    """
    values = shapley_of_table(tables.double().flatten(1))
    values = values.view(-1, *tables.shape[1:])
    no_error = torch.zeros_like(values[:, 0])
    return _mean_of_predictions(values, no_error, len(tables))


def _mean_of_predictions(
    values_by_prediction: Tensor, stderr: Tensor, evaluations: int
) -> PredictedValues:
    """Average the values ``[n, 2, ...]`` of the two predictions."""
    by_interpolation, by_ensemble = values_by_prediction.unbind(1)
    return PredictedValues(
        values=values_by_prediction.mean(1),
        stderr=stderr,
        evaluations=evaluations,
        disagreement=by_interpolation - by_ensemble,
    )


def has_complete_sizes(trained: Tensor) -> bool:
    """Return whether ``trained`` contains each player alone, and all or no coalitions of every other size."""
    num_players = trained.shape[1]
    sizes = trained.sum(1)
    counts = torch.bincount(sizes, minlength=num_players + 1).tolist()
    lacks_single_players = counts[1] != num_players
    if lacks_single_players:
        return False
    full_counts = [math.comb(num_players, size) for size in range(num_players + 1)]
    return all(count in (0, full) for count, full in zip(counts, full_counts))
