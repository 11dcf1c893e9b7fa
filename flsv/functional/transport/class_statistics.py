"""Class statistics: each class as a Gaussian, for the label part of the ground distance.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, equation 9, after Alvarez-Melis
and Fusi, "Geometric Dataset Distances via Optimal Transport", NeurIPS 2020.

Statistics divide by the class count, not by one less: they do not change if a whole data set is repeated.
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
        """Find the row of each label of ``y`` ``[m]``: int64 ``[m]``.

        Raises:
            ConfigurationError: a label that is not in these statistics.
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
    """Compute mean and deviation of every class that is present.

    Args:
        x: ``[m, d]`` features.
        y: ``[m]`` integer classes.
        covariance: ``"diag"``: standard deviations; ``"full"``: square roots of the covariances; ``"none"``: means
            only.

    Returns:
        The statistics, in the dtype of ``x`` (computed in float64).

    Raises:
        ConfigurationError: empty, non-finite or badly shaped input, or an unknown ``covariance``.

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
    """Compute the squared distances between the classes of two sides.

        |m_y - m_y'|^2 + |Sigma_y^(1/2) - Sigma_y'^(1/2)|^2

    is the distance of the vectors that the paper stacks; for commuting covariances it is the squared 2-Wasserstein
    distance of the Gaussians fitted to the classes.

    Args:
        a: statistics of one side, with Va classes.
        b: statistics of the other side, with Vb classes and the same kind of covariance.

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


def _root(centered: Tensor) -> Tensor:
    """Compute the square root of the covariance of centered rows; 0 for a single row."""
    values, vectors = torch.linalg.eigh(centered.T @ centered / len(centered))
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T
