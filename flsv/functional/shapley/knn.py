"""KNN-Shapley: exact Shapley values of a k-nearest-neighbor classifier, the usual baseline of data valuation.

Jia et al., "Efficient Task-Specific Data Valuation for Nearest Neighbor Algorithms", VLDB 2019, Theorem 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.functional.distances import squared_distances
from flsv.functional.transport.cost import check_labeled
from flsv.utilities.declared import Count, checked

ENTRIES_PER_CHUNK = 8_000_000


@checked
def knn_shapley(
    x: Tensor,
    y: Tensor,
    x2: Tensor,
    y2: Tensor,
    *,
    k: Count = 10,
) -> Tensor:
    """Compute Shapley values of training samples in the game of a k-nearest-neighbor classifier.

    The utility v(S) of a set S of training samples is the fraction of a validation sample's k nearest neighbors in S
    that have its label, averaged over the validation samples. If S has fewer than k samples, the missing neighbors
    count as wrong, so that v(empty) = 0. For one validation sample with label y, the training samples a_1, ..., a_m in
    order of their distance from it, with labels y(a_i), have the values

        s(a_m) = [y(a_m) = y] min(k, m) / (m k),
        s(a_i) = s(a_{i+1}) + ([y(a_i) = y] - [y(a_{i+1}) = y]) / k * min(k, i) / i,

    and the result is the mean over the validation samples. (The paper's first line, [y(a_m) = y] / m, holds for
    k <= m.)

    Args:
        x: ``[m, d]``, the features of the training samples.
        y: ``[m]``, the integer classes of the training samples.
        x2: ``[m2, d]``, the features of the validation samples.
        y2: ``[m2]``, the integer classes of the validation samples.
        k: the number of neighbors, at least 1.

    Returns:
        The training samples' values, ``[m]``, in the dtype of ``x``. Positive means useful (the opposite sign of
        :func:`flsv.functional.calibrated_gradient`). They sum to the utility of all training samples.

    Raises:
        ConfigurationError: the samples or labels are empty, not finite or of wrong shapes, or ``k`` is below 1.

    Example:
        >>> x, y = torch.tensor([[0.0], [1.0], [9.0]]), torch.tensor([0, 1, 1])
        >>> knn_shapley(x, y, torch.tensor([[0.2]]), torch.tensor([0]), k=1)
        tensor([1., 0., 0.])
    """
    check_labeled(x, y, x2, y2)
    m = len(x)
    num_rows = max(1, ENTRIES_PER_CHUNK // m)
    validation_samples = torch.arange(len(x2), device=x.device)
    total = x.new_zeros(m, dtype=torch.float64)
    for rows in validation_samples.split(num_rows):
        distances = squared_distances(x2[rows], x)
        order = distances.argsort(dim=1, stable=True)  # [rows, m], nearest training sample first
        labels = y2[rows].unsqueeze(1)
        is_match = (y[order] == labels).double()
        values = _values_by_rank(is_match, k)
        total.index_add_(0, order.flatten(), values.flatten())
    mean = total / len(x2)
    return mean.to(x.dtype)


def _values_by_rank(is_match: Tensor, k: int) -> Tensor:
    """Compute the training samples' values ``[rows, m]`` for each validation sample, nearest first."""
    # Theorem 1: s_i = s_{i+1} + (match_i - match_{i+1}) / k * min(k, i) / i, so that the value of a sample is that of
    # the next farther one plus the step between the two.
    m = is_match.shape[1]
    ranks = torch.arange(1, m, device=is_match.device)
    ranks = ranks.double()
    step_weights = ranks.clamp(max=k) / (ranks * k)  # min(k, i) / (i k)
    nearer = is_match[:, :-1]
    farther = is_match[:, 1:]
    steps = (nearer - farther) * step_weights
    farthest_first = steps.flip(1)
    sums_from_farthest = farthest_first.cumsum(1).flip(1)

    farthest_weight = min(k, m) / (m * k)
    farthest_value = is_match[:, -1:] * farthest_weight
    nearer_values = sums_from_farthest + farthest_value
    return torch.cat([nearer_values, farthest_value], 1)
