"""The ground cost between labeled samples, and the vectors whose squared distance it is.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, equation 9 and the stacked vector
[x; m_y; vec(Sigma_y^(1/2))] of section 4.1. The squared distance of two stacked vectors is |x - x'|^2 plus a number
that depends on the two labels only, so the vectors (of length d^2 and more) are never built for a cost matrix.

The weight w of the label term is an addition: with w = 1 raw features dominate it, and label noise stays invisible (the
paper's own finding). Each side uses its own class statistics; a class that the other side lacks is far from all of the
other side's classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.functional.distances import squared_distances
from flsv.functional.transport.checks import check_labels, check_pair, check_points
from flsv.functional.transport.class_statistics import ClassStatistics, Covariance, class_statistics, label_distance
from flsv.utilities.declared import NonNegative, checked
from flsv.utilities.errors import ConfigurationError

CHUNK_BYTES = 256 * 2**20
MAX_EMBEDDED_COVARIANCE = 4096


@checked
def label_augmented_cost(
    x: Tensor,
    y: Tensor | None,
    x2: Tensor,
    y2: Tensor | None,
    *,
    covariance: Covariance = "diag",
    label_weight: NonNegative = 1.0,
) -> Tensor:
    """Compute the ground cost of features and labels between all samples of two sides.

        |x - x'|^2 + w (|m_y - m_y'|^2 + |s_y - s_y'|^2)

    with m and s the means and deviations of :func:`class_statistics`.

    Args:
        x: ``[m, d]`` features of one side.
        y: ``[m]`` integer classes of ``x``; None on either side leaves the label term out.
        x2: ``[m2, d]`` features of the other side.
        y2: ``[m2]`` integer classes of ``x2``.
        covariance: how a class's spread enters: ``"diag"``, ``"full"`` or ``"none"``.
        label_weight: w, at least 0.

    Returns:
        ``[m, m2]`` costs in squared feature units, in the dtype of ``x``; exactly 0 between equal samples.

    Raises:
        ConfigurationError: a side is empty, has NaN or infinite rows, other features than the other side, labels that
            do not fit, or a negative weight.

    Example:
        >>> x, y = torch.tensor([[0.0], [2.0], [4.0]]), torch.tensor([0, 0, 1])
        >>> label_augmented_cost(x, y, x[:1], y[:1], label_weight=2.0)  # class 0: mean 1, deviation 1, against 0 and 0
        tensor([[ 4.],
                [ 8.],
                [48.]])
        >>> label_augmented_cost(x, None, x[:1], y[:1]).T
        tensor([[ 0.,  4., 16.]])
    """
    check_pair(x, x2)
    labels = None
    if y is not None and y2 is not None and label_weight > 0:
        check_labels(y, x)
        check_labels(y2, x2, "y2")
        first = class_statistics(x, y, covariance=covariance)
        other = class_statistics(x2, y2, covariance=covariance)
        between = label_weight * label_distance(first, other).to(x.dtype)
        labels = first.index(y), between[:, other.index(y2)]
    chunk = max(1, CHUNK_BYTES // (16 * len(x2)))
    result = x.new_empty(len(x), len(x2))
    for start in range(0, len(x), chunk):
        rows = slice(start, start + chunk)
        result[rows] = squared_distances(x[rows], x2).to(x.dtype)
        if labels is not None:
            result[rows] += labels[1][labels[0][rows]]
    return result


@checked
def label_embedding(
    x: Tensor,
    y: Tensor | None,
    *,
    covariance: Covariance = "diag",
    label_weight: NonNegative = 1.0,
    statistics: ClassStatistics | None = None,
) -> Tensor:
    """Embed labeled samples as points whose squared distances are :func:`label_augmented_cost`'s.

    The points are [x; sqrt(w) m_y; sqrt(w) s_y]. In this form labels pass through any method for points, such as
    :class:`TransportClient`. An embedded sample reveals its features and its class's mean and deviation; the protocol
    sends averages of several samples.

    Args:
        x: ``[m, d]`` features.
        y: ``[m]`` integer classes; None: ``x`` as it is.
        covariance: ``"diag"`` (d' = 3 d), ``"none"`` (2 d) or ``"full"`` (2 d + d^2).
        label_weight: w, at least 0; the same on both sides.
        statistics: the class statistics of ``x`` and ``y``; None: they are computed.

    Returns:
        ``[m, d']``, in the dtype of ``x``.

    Raises:
        ConfigurationError: wrong input, or a full covariance of more than 64 features.

    Example:
        >>> x, y = torch.tensor([[0.0], [2.0], [4.0]]), torch.tensor([0, 0, 1])
        >>> label_embedding(x, y, label_weight=4.0)
        tensor([[0., 2., 2.],
                [2., 2., 2.],
                [4., 8., 0.]])
    """
    check_points(x)
    if y is None:
        return x
    check_labels(y, x)
    size = x.shape[1] ** 2
    if covariance == "full" and size > MAX_EMBEDDED_COVARIANCE:
        raise ConfigurationError(
            f'covariance="full" with {x.shape[1]} features would make points of {size} more numbers, above '
            f'{MAX_EMBEDDED_COVARIANCE}. Use covariance="diag", or fewer features (PCA to 50, say).'
        )
    known = class_statistics(x, y, covariance=covariance) if statistics is None else statistics
    index, scale = known.index(y), label_weight**0.5
    parts = [x, scale * known.means[index].to(x)]
    if known.deviations is not None:
        parts.append(scale * known.deviations.flatten(1)[index].to(x))
    return torch.cat(parts, 1)
