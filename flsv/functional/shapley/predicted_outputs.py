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

from flsv.functional.shapley.exact import exact_shapley, shapley_of_table
from flsv.functional.shapley.game import ShapleyEstimate, coalition_keys
from flsv.functional.shapley.permutation import permutation_shapley

#: Factor of the inner product in the kernel, and the squared width of its Gaussian part.
LINEAR, WIDTH = 4.0, 0.5
#: The variance that is added to the kernel's diagonal.
NOISE = 1e-3
#: The largest norm of a model's centered logits, as a multiple of the median over the single clients' models.
CAP = 1.5
#: The least probability of a class in an ensemble.
LEAST = 1e-6
#: The largest number of players whose 2^n coalitions are all predicted; with more, orders of the players are drawn.
MOST_PREDICTED = 16
#: The most numbers of predicted outputs that are in memory at once.
CHUNK = 2**19

Score = Callable[[Tensor], Tensor]
"""A function from the outputs ``[c, V, ...]`` of c models for V samples to their utilities ``[c]`` or ``[c, M]``."""


def coalition_shares(masks: Tensor, weights: Tensor) -> Tensor:
    """Compute each member's share of its coalition's total weight, float64 ``[K, n]``. 0 in the empty coalition."""
    own = masks.double() * weights.double().cpu()
    return own / own.sum(1, keepdim=True).clamp_min(1e-300)


def interpolation_weights(masks: Tensor, trained: Tensor, weights: Tensor) -> Tensor:
    """Compute the Gaussian process's coefficients of trained coalitions' outputs, ``[K, T]``. They predict the outputs
    of the coalitions ``masks`` from those of ``trained``. Rows sum to 1.
    """
    points, at = coalition_shares(trained, weights), coalition_shares(masks, weights)
    inverse = torch.linalg.inv(
        _kernel(points, points) + NOISE * torch.eye(len(points), dtype=torch.float64)
    )
    mean = inverse.sum(0) / inverse.sum()
    centered = inverse - inverse.sum(1, keepdim=True) * mean
    return mean + _kernel(at, points) @ centered


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    return LINEAR * a @ b.T + torch.exp(-torch.cdist(a, b).square() / WIDTH)


def cap_logits(logits: Tensor, singles: Tensor) -> Tensor:
    """Center logits ``[T, V, ..., M]`` of T models, and scale large ones down. A model's mean norm gets at most 1.5
    times the median of the models that the mask ``singles`` selects.
    """
    # A client could multiply its last layer by ten: no score of its model would change, but it would rule every
    # interpolation.
    centered = logits - logits.mean(-1, keepdim=True)
    norms = centered.norm(dim=-1).flatten(1).mean(1)
    limit = CAP * norms[singles].median()
    factor = (limit / norms.clamp_min(1e-300)).clamp(max=1)
    return centered * factor.view(-1, *[1] * (logits.ndim - 1))


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
        utilities = torch.as_tensor(utilities).detach().double().cpu()
        count, n = trained.shape
        if trained.dtype != torch.bool or (len(utilities), len(outputs), len(weights)) != (
            count,
            count,
            n,
        ):
            raise ValueError(
                f"expected trained bool [T, n], T utilities and outputs, and n weights; got {list(trained.shape)}, "
                f"{list(utilities.shape)}, {list(outputs.shape)} and {list(weights.shape)}."
            )
        if not utilities.isfinite().all() or not outputs.isfinite().all():
            raise ValueError("expected finite utilities and outputs of the trained coalitions.")
        sizes = trained.sum(1)
        alone = sizes == 1
        if not {0, n} <= set(sizes.tolist()) or not trained[alone].any(0).all():
            raise ValueError(
                "expected the empty and the grand coalition, and each player alone, among the trained."
            )
        self._known = dict(zip(coalition_keys(trained.cpu()), utilities.reshape(count, -1)))
        self._weights, self._score = weights, score
        self._trained, self._shape = trained[sizes > 0].cpu(), outputs.shape[1:]
        given = outputs[sizes > 0]
        given = cap_logits(given, alone[sizes > 0]) if logits else given
        self._outputs = given.flatten(1)
        order = trained[alone].int().argmax(1).argsort()
        own = outputs[alone][order]
        self._logits, self._own = logits, (own.softmax(-1) if logits else own).flatten(1)

    def __call__(self, masks: Tensor) -> Tensor:
        keys = coalition_keys(masks.cpu())
        missing = torch.tensor([place for place, key in enumerate(keys) if key not in self._known])
        width = len(next(iter(self._known.values())))
        found = torch.empty(len(masks), 2, width, dtype=torch.float64)
        for place, key in enumerate(keys):
            if key in self._known:
                found[place] = self._known[key]
        if len(missing):
            for part in missing.split(max(1, CHUNK // max(1, self._outputs.shape[1]))):
                interpolated, ensemble = (
                    self._score(each).double().cpu() for each in self._predict(masks[part])
                )
                found[part] = torch.stack([interpolated, ensemble], 1).view(len(part), 2, width)
        return found.flatten(1)

    def _predict(self, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Predict outputs ``[c, V, ...]`` of c coalitions by interpolation and by ensemble."""
        mixing = interpolation_weights(masks, self._trained, self._weights).to(self._outputs)
        interpolated = (mixing @ self._outputs).view(-1, *self._shape)
        ensemble = (coalition_shares(masks, self._weights).to(self._own) @ self._own).view(
            -1, *self._shape
        )
        return interpolated, ensemble.clamp_min(LEAST).log() if self._logits else ensemble


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
        generator: the generator that draws orders of the players if there are more than 16. None: one with seed 0.

    Returns:
        The values, float64 ``[n]`` or ``[n, M]``, and the two predictions' ``disagreement``, of the same shape. Up to
        16 players they are computed from all 2^n coalitions, with ``stderr`` 0. Beyond that from 65,536 coalitions
        along drawn orders, with the standard error of the drawing.

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
    n = trained.shape[1]
    game = PredictedGame(trained, utilities, outputs, weights, score, logits=logits)
    if n <= MOST_PREDICTED:
        found = exact_shapley(game, n)
    else:
        found = permutation_shapley(
            game,
            n,
            budget=2**MOST_PREDICTED,
            generator=generator or torch.Generator().manual_seed(0),
        )
    stderr = found.stderr.double().view(n, 2, -1).square().mean(1).sqrt()
    both = found.values.double().view(n, 2, *torch.as_tensor(utilities).shape[1:])
    return _mean(both, stderr.view(both[:, 0].shape), found.evaluations)


def values_of_tables(tables: Tensor) -> PredictedValues:
    """Compute Shapley values from all coalitions' utilities by interpolation and by ensemble, ``[2^n, 2]`` or ``[2^n,
    2, M]``.
    """
    both = shapley_of_table(tables.double().flatten(1)).view(-1, *tables.shape[1:])
    return _mean(both, torch.zeros_like(both[:, 0]), len(tables))


def _mean(both: Tensor, stderr: Tensor, evaluations: int) -> PredictedValues:
    return PredictedValues(both.mean(1), stderr, evaluations, disagreement=both[:, 0] - both[:, 1])


def whole_layers(trained: Tensor) -> bool:
    """Return whether ``trained`` contains each player alone, and all or no coalitions of every other size."""
    n, counts = (
        trained.shape[1],
        torch.bincount(trained.sum(1), minlength=trained.shape[1] + 1).tolist(),
    )
    return counts[1] == n and all(
        count in (0, math.comb(n, size)) for size, count in enumerate(counts)
    )
