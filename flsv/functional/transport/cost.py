"""The ground cost between labeled samples, with a label term from class statistics, and checks of samples.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, equation 9 and section 4.1, after
Alvarez-Melis and Fusi, "Geometric Dataset Distances via Optimal Transport", NeurIPS 2020.

Each of the S points that a client returns is a mean of m/S of its m samples. For S below m/2 the attack in
``docs/results/fedbary.md`` hardly finds a near copy of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flsv.functional.distances import squared_distances
from flsv.utilities.declared import NonNegative, checked
from flsv.utilities.errors import ConfigurationError


def check_points(x: Tensor, name: str = "x") -> None:
    """Raise ConfigurationError unless ``x`` is a non-empty float tensor ``[m, d]`` of finite numbers."""
    if x.ndim != 2 or not x.is_floating_point():
        raise ConfigurationError(
            f"{name}: expected a float tensor [samples, features], got {list(x.shape)} of {x.dtype}. Flatten "
            f"images with {name}.flatten(1).float()."
        )
    if len(x) == 0:
        raise ConfigurationError(
            f"{name} is empty, but a distribution needs at least one sample. Remove the empty one."
        )
    is_invalid = ~torch.isfinite(x)
    num_invalid = int(is_invalid.any(1).sum())
    if num_invalid:
        raise ConfigurationError(
            f"{name}: {num_invalid} of {len(x)} rows hold NaN or infinite values, so distances are not defined. Remove "
            "or impute them."
        )


def check_pair(
    x: Tensor,
    x2: Tensor,
    name: str = "x",
    name2: str = "x2",
) -> None:
    """Raise ConfigurationError unless ``x`` and ``x2`` pass :func:`check_points` and have as many features."""
    check_points(x, name)
    check_points(x2, name2)
    if x.shape[1] != x2.shape[1]:
        raise ConfigurationError(
            f"{name} has {x.shape[1]} features, but {name2} has {x2.shape[1]}. Use the same pixels, projection or "
            "network for both."
        )


def check_labels(y: Tensor, x: Tensor) -> None:
    """Raise ConfigurationError unless ``y`` has one integer class per row of ``x``."""
    is_integer = not y.is_floating_point() and not y.is_complex()
    if not is_integer or y.shape != x.shape[:1]:
        raise ConfigurationError(
            f"y: expected {len(x)} integer classes, one per sample, but got shape {list(y.shape)} of {y.dtype}."
        )


def safe_support(samples: int) -> int:
    """Return how many points a client may return: the largest integer below half its number of samples."""
    return max(0, (samples - 1) // 2)


def check_support(
    support: int,
    samples: int,
    owner: str = "the client",
) -> None:
    """Raise ConfigurationError unless each of ``support`` returned points is a mean of more than two of the
    ``samples``.
    """
    limit = safe_support(samples)
    if support <= limit:
        return
    if limit:
        advice = f"Set support={limit} or less"
    else:
        advice = "Exclude this client"
    raise ConfigurationError(
        f"support={support}: {owner} has only {samples} samples, which can be reconstructed from half as many "
        f"interpolated points or more (docs/results/fedbary.md). {advice}, or set allow_reconstruction=True."
    )


Covariance = Literal["diag", "full", "none"]


@dataclass(frozen=True)
class ClassStatistics:
    """Means and covariances of the classes of one data set, see :func:`class_statistics`.

    Attributes:
        labels: ``[V]`` int64, the classes that are present, ascending.
        counts: ``[V]`` int64, the classes' numbers of samples.
        means: ``[V, d]``, the classes' means.
        deviations: depending on ``covariance``: ``"diag"``: the classes' standard deviations ``[V, d]``. ``"full"``:
            the square roots of their covariances ``[V, d, d]``. ``"none"``: None. 0 for a class with one sample.
    """

    labels: Tensor
    counts: Tensor
    means: Tensor
    deviations: Tensor | None

    def to(self, device: torch.device) -> ClassStatistics:
        """Return the statistics on a device."""
        deviations = self.deviations
        if deviations is not None:
            deviations = deviations.to(device)
        return ClassStatistics(
            labels=self.labels.to(device),
            counts=self.counts.to(device),
            means=self.means.to(device),
            deviations=deviations,
        )

    def index(self, y: Tensor) -> Tensor:
        """Find each label's row in the tensors of these statistics.

        Args:
            y: the labels, ``[m]``.

        Returns:
            int64 ``[m]``, the labels' positions in ``labels``.

        Raises:
            ConfigurationError: a label is not in these statistics.
        """
        y = y.to(self.labels)
        last_position = len(self.labels) - 1
        position = torch.searchsorted(self.labels, y).clamp(max=last_position)
        is_unknown = self.labels[position] != y
        unknown = y[is_unknown].unique().tolist()
        if unknown:
            raise ConfigurationError(
                f"classes {unknown} are missing in the statistics, which have {self.labels.tolist()}. Compute the "
                "statistics from the same labels."
            )
        return position


@checked
def class_statistics(
    x: Tensor,
    y: Tensor,
    *,
    covariance: Covariance = "diag",
) -> ClassStatistics:
    """Compute the mean and the deviation of each class that is present.

    Covariances divide by a class's number of samples, so that they do not change if every sample is repeated.

    Args:
        x: the samples' features, ``[m, d]``.
        y: the samples' integer classes, ``[m]``.
        covariance: ``"diag"``: standard deviations. ``"full"``: square roots of the covariances. ``"none"``: means
            only.

    Returns:
        The statistics, in the dtype of ``x`` (computed in float64).

    Raises:
        ConfigurationError: samples or labels are empty, not finite or of wrong shapes, or ``covariance`` is unknown.

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
    labels, positions, counts = y.long().unique(return_inverse=True, return_counts=True)
    data = x.detach().double()
    divisors = counts[:, None]
    sums = data.new_zeros(len(labels), x.shape[1])
    means = sums.index_add_(0, positions, data) / divisors

    deviations = None
    if covariance == "diag":
        squares = (data - means[positions]).square_()
        sums_of_squares = torch.zeros_like(means).index_add_(0, positions, squares)
        deviations = (sums_of_squares / divisors).sqrt_().to(x.dtype)
    elif covariance == "full":
        deviations = _covariance_roots(data, positions, means).to(x.dtype)
    return ClassStatistics(labels, counts, means=means.to(x.dtype), deviations=deviations)


def _covariance_roots(data: Tensor, positions: Tensor, means: Tensor) -> Tensor:
    # [M, d, d]
    roots = []
    for position, mean in enumerate(means):
        samples_of_class = data[positions == position]
        roots.append(_covariance_root(samples_of_class - mean))
    return torch.stack(roots)


def _covariance_root(centered: Tensor) -> Tensor:
    """Compute the square root ``[d, d]`` of the covariance of centered samples ``[m, d]``."""
    covariance = centered.T @ centered / len(centered)
    eigenvalues, vectors = torch.linalg.eigh(covariance)
    roots = eigenvalues.clamp(min=0).sqrt()
    return (vectors * roots) @ vectors.T


CHUNK_BYTES = 256 * 2**20
BYTES_PER_ELEMENT = 16  # of a cost matrix while it is computed: two float64
MAX_EMBEDDED_COVARIANCE = 4096


def squared_costs(x: Tensor, x2: Tensor) -> Tensor:
    """Compute the squared distances ``[m, m2]`` between samples, in the dtype of ``x``, a block of rows at a time."""
    check_pair(x, x2)
    num_rows = max(1, CHUNK_BYTES // (BYTES_PER_ELEMENT * len(x2)))
    costs = x.new_empty(len(x), len(x2))
    for begin in range(0, len(x), num_rows):
        rows = slice(begin, begin + num_rows)
        costs[rows] = squared_distances(x[rows], x2).to(x.dtype)
    return costs


@checked
def label_embedding(
    x: Tensor,
    y: Tensor | None,
    *,
    covariance: Covariance = "diag",
    label_weight: NonNegative = 1.0,
    statistics: ClassStatistics | None = None,
) -> Tensor:
    """Embed labeled samples as points whose squared distances are the costs between them.

    The cost between a sample x of class y and a sample x' of class y' is

        |x - x'|^2 + w (|m_y - m_y'|^2 + |s_y - s_y'|^2)

    with m and s the classes' means and deviations, see :func:`class_statistics`. The weight w is an addition to the
    paper: without it raw features dominate the label term, and label noise is not detected. Statistics are computed for
    each data set separately, so a class that is missing in one is far from all its classes.

    The point of a sample is [x; sqrt(w) m_y; sqrt(w) s_y]. With these points, a method without labels, such as
    :class:`TransportClient`, takes labels into account. An embedded sample reveals its features and its class's mean
    and deviation. A :class:`TransportClient` sends only averages of several embedded samples.

    Args:
        x: the samples' features, ``[m, d]``.
        y: the samples' integer classes, ``[m]``. None: the points are ``x`` itself.
        covariance: the deviations s of a class: ``"diag"``: standard deviations, with d' = 3 d. ``"full"``: the square
            root of the covariance, with d' = 2 d + d^2. ``"none"``: no deviations, with d' = 2 d.
        label_weight: the weight w of the label term, at least 0. The same for both data sets.
        statistics: the class statistics of ``x`` and ``y``. None: they are computed.

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
    if covariance == "full":
        _check_num_features(x.shape[1])
    if statistics is None:
        statistics = class_statistics(x, y, covariance=covariance)
    return _embedded(x, statistics, statistics.index(y), scale=label_weight**0.5)


def _embedded(x: Tensor, statistics: ClassStatistics, classes: Tensor, scale: float) -> Tensor:
    means = statistics.means[classes]
    parts = [x, scale * means.to(x)]
    if statistics.deviations is not None:
        deviations = statistics.deviations.flatten(1)[classes]
        parts.append(scale * deviations.to(x))
    return torch.cat(parts, 1)


def _check_num_features(num_features: int) -> None:
    covariance_size = num_features**2
    if covariance_size > MAX_EMBEDDED_COVARIANCE:
        raise ConfigurationError(
            f'covariance="full" with {num_features} features would add {covariance_size} numbers to each point, more '
            f'than {MAX_EMBEDDED_COVARIANCE}. Use covariance="diag", or fewer features (such as PCA to 50).'
        )
