r"""Coalitions as mixtures of their members' data: shares, interpolation between them, and logits of the same scale.

A federation's model is approximately a function of the mixture of data on which it was trained. Let w_S be the members'
shares of the weight of coalition S, a point of the simplex. Its corners are single clients, and the grand coalition is
an inner point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: Factor of the inner product in the kernel, and the squared width of its Gaussian part.
LINEAR_FACTOR = 4.0
GAUSSIAN_WIDTH = 0.5
#: The variance that is added to the kernel's diagonal.
NOISE_VARIANCE = 1e-3
#: The largest norm of a model's centered logits, as a multiple of the median over the single clients' models.
MAX_NORM_RATIO = 1.5
#: The smallest probability of a class in a mean of probabilities.
MIN_PROBABILITY = 1e-6
#: The smallest divisor, which avoids 0 / 0.
TINY = 1e-300

Prediction = Callable[[Tensor], Tensor]
"""A function from masks ``[c, n]`` to the outputs ``[c, V, ...]`` that these coalitions' models would have."""


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
    # A client could multiply its last layer by ten. Its model's scores would not change, but it would dominate every
    # interpolation.
    centered = center_logits(logits)
    norms = centered.norm(dim=-1)  # [T, V, ...]
    model_norms = norms.flatten(1).mean(1)  # [T]
    max_norm = MAX_NORM_RATIO * model_norms[is_single].median()
    factors = max_norm / model_norms.clamp_min(TINY)
    factors = factors.clamp(max=1)
    other_axes = [1] * (logits.ndim - 1)
    return centered * factors.view(-1, *other_axes)


def center_logits(logits: Tensor) -> Tensor:
    """Subtract each sample's mean over the classes."""
    return logits - logits.mean(-1, keepdim=True)


def mixer(outputs: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function from weights ``[c, T]`` to sums ``[c, V, ..., M]`` of the ``outputs [T, V, ..., M]``. In memory
    a sum has the samples of a class side by side, so that scores compare classes quickly.
    """
    by_class = outputs.movedim(-1, 1)  # [T, M, V, ...]
    rows = by_class.flatten(1)

    def mix(mixing_weights: Tensor) -> Tensor:
        mixtures = mixing_weights.to(rows) @ rows
        return mixtures.view(-1, *by_class.shape[1:]).movedim(1, -1)

    return mix


@dataclass(frozen=True, eq=False)
class TrainedOutputs:
    """Outputs of T trained, non-empty coalitions, from which the outputs of all others are predicted.

    Attributes:
        masks: bool ``[T, n]``, the coalitions. Each player alone is among them.
        outputs: ``[T, V, ...]``, for classifiers logits ``[T, V, ..., M]``.
        weights: ``[n]``, the players' weights in the federation's average.
        logits: whether the outputs are logits.
        order: int64 ``[V]``, the order of the samples in predictions. None: that of ``outputs``.
    """

    masks: Tensor
    outputs: Tensor
    weights: Tensor
    logits: bool
    order: Tensor | None = None

    def ordered(self, outputs: Tensor) -> Tensor:
        """Return outputs ``[T, V, ...]`` with the samples in the order of predictions."""
        return outputs if self.order is None else outputs[:, self.order]

    @property
    def is_single(self) -> Tensor:
        """Return whether a coalition is one player, bool ``[T]``."""
        return self.masks.sum(1) == 1

    @property
    def single_positions(self) -> Tensor:
        """The position of each player alone among the coalitions, ``[n]``."""
        positions = self.is_single.nonzero().flatten()
        players = self.masks[positions].int().argmax(1)
        return positions[players.argsort()]


def interpolation(trained: TrainedOutputs) -> Prediction:
    """Return the interpolation of trained coalitions' outputs, for classifiers of their capped logits."""
    outputs = trained.outputs
    if trained.logits:
        outputs = cap_logits(outputs, is_single=trained.is_single)
    mix = mixer(trained.ordered(outputs))

    def predict(masks: Tensor) -> Tensor:
        return mix(interpolation_weights(masks, trained.masks, trained.weights))

    return predict


def ensemble(trained: TrainedOutputs) -> Prediction:
    """Return the mean of the members' outputs, weighted by shares, for classifiers the logarithm of the mean of their
    probabilities.
    """
    outputs = trained.outputs[trained.single_positions]
    if trained.logits:
        outputs = outputs.softmax(-1)
    mix = mixer(trained.ordered(outputs))

    def predict(masks: Tensor) -> Tensor:
        mean = mix(coalition_shares(masks, trained.weights))
        if trained.logits:
            return mean.clamp_min(MIN_PROBABILITY).log()
        return mean

    return predict
