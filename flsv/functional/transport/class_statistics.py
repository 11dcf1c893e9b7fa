"""Class statistics: the mean and covariance of each class, for the label term of the ground cost.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, equation 9, after Alvarez-Melis
and Fusi, "Geometric Dataset Distances via Optimal Transport", NeurIPS 2020.

Covariances divide by a class's number of samples, not by this number minus one, so that they do not change if every
sample is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flsv.functional.distances import squared_distances
from flsv.functional.transport.checks import check_labels, check_points
from flsv.utilities.declared import checked
from flsv.utilities.errors import ConfigurationError

Covariance = Literal["diag", "full", "none"]


@dataclass(frozen=True)
class ClassStatistics:
    """Means and covariances of the classes of one data set, see :func:`class_statistics`.

    Attributes:
        labels: ``[V]`` int64, the classes that are present, ascending.
        counts: ``[V]`` int64, the classes' numbers of samples.
        means: ``[V, d]``, the classes' means.
        deviations: depending on ``covariance``: ``"diag"``: the classes' standard deviations ``[V, d]``; ``"full"``:
            the square roots of their covariances ``[V, d, d]``; ``"none"``: None. 0 for a class with one sample.
    """

    labels: Tensor
    counts: Tensor
    means: Tensor
    deviations: Tensor | None

    def to(self, device: torch.device) -> ClassStatistics:
        """Return the statistics on a device."""
        deviations = None if self.deviations is None else self.deviations.to(device)
        return ClassStatistics(self.labels.to(device), self.counts.to(device), self.means.to(device), deviations)

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
    """Compute the mean and the deviation of each class that is present.

    Args:
        x: the samples' features, ``[m, d]``.
        y: the samples' integer classes, ``[m]``.
        covariance: ``"diag"``: standard deviations; ``"full"``: square roots of the covariances; ``"none"``: means
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
    """Compute the squared distances between the classes of two data sets.

    The squared distance of two classes y and y' with means m and covariances Sigma is

        |m_y - m_y'|^2 + |Sigma_y^(1/2) - Sigma_y'^(1/2)|^2,

    the squared Euclidean distance of the paper's stacked vectors. If the covariances commute, it is the squared
    2-Wasserstein distance of the Gaussians fitted to the classes.

    Args:
        a: the statistics of one data set, with Va classes.
        b: the statistics of the other data set, with Vb classes and the same kind of covariance.

    Returns:
        ``[Va, Vb]``, in squared feature units.

    Raises:
        ConfigurationError: only one of the statistics has covariances.

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


def _root(centered: Tensor) -> Tensor:
    """Compute the square root ``[d, d]`` of the covariance of centered samples ``[m, d]``."""
    values, vectors = torch.linalg.eigh(centered.T @ centered / len(centered))
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T
