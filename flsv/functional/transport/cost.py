"""Checks of the samples that functions of this package are given, and of how many points a client may answer without
revealing one.

Each of the S points that a client returns is a mean of m/S of its m samples. Below the threshold the attack of
``tools/paper_fedbary_samples.py`` hardly finds a near copy of a sample: ``docs/results/fedbary_reconstruction.md``.

A class as a Gaussian: the label part of the ground distance.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, equation 9, after Alvarez-Melis
and Fusi, "Geometric Dataset Distances via Optimal Transport", NeurIPS 2020: the distance of two labels is the distance
of the Gaussians fitted to their classes, |m_y - m_y'|^2 + |Sigma_y^(1/2) - Sigma_y'^(1/2)|^2 (the vectors that the
paper stacks; for commuting covariances this is the squared 2-Wasserstein distance).

Statistics divide by the class count, not by one less: repeating a whole data set leaves them as they are.

The ground cost between labeled samples, and the vectors whose squared distance it is.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, equation 9 and the stacked vector
[x; m_y; vec(Sigma_y^(1/2))] of section 4.1. The squared distance of two stacked vectors is |x - x'|^2 plus a number
that depends on the two labels only, so for a cost matrix the vectors (of length d^2 and more) are never built.

We add a weight w of the label term: with w = 1 raw features drown it, and label noise stays invisible (the paper's own
finding). Each side uses its own class statistics; a class that the other side lacks is simply far from all of its.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from flsv.utilities.declared import NonNegative, checked
from flsv.utilities.errors import ConfigurationError


def check_points(x: Tensor, name: str = "x") -> None:
    """Raise unless ``x`` is a non-empty ``[m, d]`` float tensor of finite numbers."""
    if x.ndim != 2 or not x.is_floating_point():
        raise ConfigurationError(
            f"{name}: expected a float tensor [samples, features], got {list(x.shape)} of {x.dtype}. Flatten "
            f"images with {name}.flatten(1).float()."
        )
    if len(x) == 0:
        raise ConfigurationError(f"{name} is empty: a distribution needs at least one sample. Leave this side out.")
    bad = int((~torch.isfinite(x)).any(1).sum())
    if bad:
        raise ConfigurationError(
            f"{name}: {bad} of {len(x)} rows hold NaN or infinite values. Drop or impute them: they have no "
            f"distance to anything."
        )


def check_pair(x: Tensor, x2: Tensor, name: str = "x", name2: str = "x2") -> None:
    """Both sides as :func:`check_points` has it, and of one feature dimension."""
    check_points(x, name)
    check_points(x2, name2)
    if x.shape[1] != x2.shape[1]:
        raise ConfigurationError(
            f"{name} has {x.shape[1]} features and {name2} has {x2.shape[1]}: both sides must use the same "
            f"features. Take the same pixels, projection or network for both."
        )


def check_labels(y: Tensor, x: Tensor, name: str = "y") -> None:
    """Raise unless ``y`` holds one integer class per row of ``x``."""
    if y.is_floating_point() or y.is_complex() or y.shape != x.shape[:1]:
        raise ConfigurationError(
            f"{name}: expected {len(x)} integer classes, one a sample, got {list(y.shape)} of {y.dtype}."
        )


def check_labeled(x: Tensor, y: Tensor, x2: Tensor, y2: Tensor) -> None:
    """Two labeled sides."""
    check_pair(x, x2)
    check_labels(y, x)
    check_labels(y2, x2, "y2")


def safe_support(samples: int) -> int:
    """The largest S below m/2; 0 for fewer than 3 samples, which no S protects.

    Example:
        >>> [safe_support(samples) for samples in (2, 3, 60, 61)]
        [0, 1, 29, 30]
    """
    return max(0, (samples - 1) // 2)


def check_support(support: int, samples: int, who: str = "the client") -> None:
    """Raise unless every point that crosses is a mean of more than two samples.

    Args:
        support: S, points that cross.
        samples: m, of the client.
        who: holds them, for the message.

    Raises:
        ConfigurationError: S is m/2 or more.
    """
    if support <= safe_support(samples):
        return
    advice = f"Take support={safe_support(samples)} or less" if safe_support(samples) else "Leave it out"
    raise ConfigurationError(
        f"support={support}: {who} has {samples} samples, and half as many interpolated points and more give them away "
        f"(docs/results/fedbary_reconstruction.md). {advice}, or set allow_reconstruction=True."
    )


Covariance = Literal["diag", "full", "none"]
#: The place between two measures, the exponent of a distance, and the factor from one regularization to the next.
Place = Annotated[float, Gt(0), Lt(1), "0.5 is the middle of the geodesic."]
Exponent = Annotated[float, Ge(1)]
Scaling = Annotated[float, Gt(0), Lt(1)]


@dataclass(frozen=True)
class ClassStatistics:
    """Means and covariances of the classes of one side.

    Attributes:
        labels: ``[V]`` int64, the classes that are present, ascending.
        counts: ``[V]`` int64, their samples.
        means: ``[V, d]``.
        deviations: ``[V, d]`` standard deviations (``"diag"``), ``[V, d, d]`` square roots of the covariances
            (``"full"``) or None (``"none"``). A class with one sample has no covariance: its deviation is 0.
    """

    labels: Tensor
    counts: Tensor
    means: Tensor
    deviations: Tensor | None

    def index(self, y: Tensor) -> Tensor:
        """The row of each label of ``y``.

        Raises:
            ConfigurationError: a label that these statistics do not know.
        """
        y = y.to(self.labels)
        position = torch.searchsorted(self.labels, y).clamp(max=len(self.labels) - 1)
        unknown = y[self.labels[position] != y].unique().tolist()
        if unknown:
            raise ConfigurationError(
                f"classes {unknown} are not in the statistics, which know {self.labels.tolist()}. Compute "
                f"them from the same labels."
            )
        return position


@checked
def class_statistics(x: Tensor, y: Tensor, *, covariance: Covariance = "diag") -> ClassStatistics:
    """Mean and deviation of every class that is present.

    Args:
        x: ``[m, d]`` features.
        y: ``[m]`` integer classes.
        covariance: ``"diag"``: standard deviations; ``"full"``: square roots of the covariances; ``"none"``: means
            only.

    Returns:
        The statistics, in the dtype of ``x`` (computed in float64).

    Raises:
        ConfigurationError: empty, non-finite or badly shaped input, or another ``covariance``.

    Example:
        >>> s = class_statistics(torch.tensor([[0.0, 1.0], [2.0, 1.0], [5.0, 5.0]]), torch.tensor([0, 0, 3]))
        >>> s.labels, s.counts, s.means
        (tensor([0, 3]), tensor([2, 1]), tensor([[1., 1.],
                [5., 5.]]))
        >>> s.deviations
        tensor([[1., 0.],
                [0., 0.]])
    """
    check_points(x)
    check_labels(y, x)
    labels, index, counts = y.long().unique(return_inverse=True, return_counts=True)
    data = x.detach().double()
    means = data.new_zeros(len(labels), x.shape[1]).index_add_(0, index, data) / counts[:, None]
    deviations = None
    if covariance == "diag":
        squares = (data - means[index]).square_()
        deviations = (torch.zeros_like(means).index_add_(0, index, squares) / counts[:, None]).sqrt_()
    elif covariance == "full":
        deviations = torch.stack([_root(data[index == c] - means[c]) for c in range(len(labels))])
    return ClassStatistics(labels, counts, means.to(x.dtype), None if deviations is None else deviations.to(x.dtype))


def label_distance(a: ClassStatistics, b: ClassStatistics) -> Tensor:
    """Squared distances of the classes' means plus squared (Frobenius) distances of their deviations.

    Args:
        a: statistics of one side, with Va classes.
        b: of the other, with Vb classes; of the same kind of covariance.

    Returns:
        ``[Va, Vb]``, in squared feature units.

    Raises:
        ConfigurationError: one side has covariances, the other none.

    Example:
        >>> a = class_statistics(torch.tensor([[0.0], [2.0], [7.0]]), torch.tensor([0, 0, 1]))
        >>> label_distance(a, a)
        tensor([[ 0., 37.],
                [37.,  0.]])
    """
    result = squared_distances(a.means, b.means)
    if (a.deviations is None) != (b.deviations is None):
        raise ConfigurationError("the statistics have different covariances: compute both with the same covariance=...")
    if a.deviations is not None and b.deviations is not None:
        result = result + squared_distances(a.deviations.flatten(1), b.deviations.flatten(1))
    return result.to(a.means.dtype)


def squared_distances(x: Tensor, x2: Tensor) -> Tensor:
    """``[m, m2]`` squared Euclidean distances in float64; equal rows are at exactly 0."""
    left, right = x.double(), x2.double()
    origin = right.mean(0)  # Near the origin the three terms below cancel least.
    left, right = left - origin, right - origin
    norms = left.square().sum(1)[:, None] + right.square().sum(1)
    result = torch.addmm(norms, left, right.T, alpha=-2)
    # What is below the rounding of the three terms is rounding: sqrt would make 1e-7 of it.
    return result.masked_fill_(result <= 1e-13 * norms, 0.0)


def _root(centered: Tensor) -> Tensor:
    """Square root of the covariance of centered rows; 0 for a single one."""
    values, vectors = torch.linalg.eigh(centered.T @ centered / len(centered))
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


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
    """|x - x'|^2 + w (|m_y - m_y'|^2 + |s_y - s_y'|^2), with s the deviations of :func:`class_statistics`.

    Args:
        x: ``[m, d]`` features of one side.
        y: ``[m]`` its integer classes; None on either side leaves the label term out.
        x2: ``[m2, d]`` features of the other side.
        y2: ``[m2]`` its classes.
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
    """[x; sqrt(w) m_y; sqrt(w) s_y]: points whose squared distances are :func:`label_augmented_cost`'s.

    In this form labels pass through anything that works on points, such as :class:`TransportClient`. Whoever gets a
    sample's embedding gets its features and its class's mean and deviation; the protocol sends averages of several.

    Args:
        x: ``[m, d]`` features.
        y: ``[m]`` integer classes; None: ``x`` as it is.
        covariance: ``"diag"`` (d' = 3 d), ``"none"`` (2 d) or ``"full"`` (2 d + d^2).
        label_weight: w, at least 0; the same on both sides.
        statistics: of ``x`` and ``y``, where they are known already.

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
