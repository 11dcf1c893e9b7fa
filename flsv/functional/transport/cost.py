"""The ground cost between labeled samples, and vectors whose squared distances are this cost.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, equation 9 and section 4.1. The
paper stacks the features x of a sample with label y, the mean m_y of its class, and the square root of the class's
covariance Sigma_y to a vector [x; m_y; vec(Sigma_y^(1/2))]. The squared distance of two such vectors is |x - x'|^2 plus
a label term that depends on the two labels only. A cost matrix is therefore computed without the vectors, which have
more than d^2 entries for d features.

The weight of the label term is an addition to the paper: without a weight, raw features dominate the label term and
label noise is not detected, as the paper itself finds. The class statistics are computed for each data set separately,
so a class that one data set lacks is far from all classes of that data set.
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
    """Compute the ground cost of features and labels between all samples of two data sets.

    The cost between a sample x of class y and a sample x' of class y' is

        |x - x'|^2 + w (|m_y - m_y'|^2 + |s_y - s_y'|^2)

    with m and s the classes' means and deviations, see :func:`class_statistics`.

    Args:
        x: the features of the first data set, ``[m, d]``.
        y: the integer classes of ``x``, ``[m]``. The label term is left out if ``y`` or ``y2`` is None.
        x2: the features of the second data set, ``[m2, d]``.
        y2: the integer classes of ``x2``, ``[m2]``.
        covariance: the deviations s of a class: ``"diag"``: standard deviations; ``"full"``: the square root of the
            covariance; ``"none"``: no deviations.
        label_weight: the weight w of the label term, at least 0.

    Returns:
        ``[m, m2]`` costs in squared feature units, in the dtype of ``x``; exactly 0 between equal samples.

    Raises:
        ConfigurationError: samples or labels are empty, not finite or of wrong shapes, or an option is out of range.

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
    """Embed labeled samples as points whose squared distances are the costs of :func:`label_augmented_cost`.

    The point of a sample with features x and label y is [x; sqrt(w) m_y; sqrt(w) s_y], with m and s the classes' means
    and deviations. With these points, a method that knows no labels, such as :class:`TransportClient`, takes labels
    into account. An embedded sample reveals its features and its class's mean and deviation; a
    :class:`TransportClient` sends only averages of several embedded samples.

    Args:
        x: the samples' features, ``[m, d]``.
        y: the samples' integer classes, ``[m]``; None: the points are ``x`` itself.
        covariance: the deviations s, see :func:`label_augmented_cost`. The points have d' = 3 d numbers for ``"diag"``,
            2 d for ``"none"``, and 2 d + d^2 for ``"full"``.
        label_weight: the weight w of the label term, at least 0; the same for both data sets.
        statistics: the class statistics of ``x`` and ``y``; None: they are computed.

    Returns:
        The points, ``[m, d']``, in the dtype of ``x``.

    Raises:
        ConfigurationError: samples or labels are empty, not finite or of wrong shapes, an option is out of range, or
            ``covariance="full"`` with more than 64 features.

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
