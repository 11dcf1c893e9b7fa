"""LAVA: values of samples from one dual of the transport between labeled data sets.

Just et al., "LAVA: Data Valuation without Pre-Specified Learning Algorithms", ICLR 2023. The ground cost is C((x, y),
(x', y')) = d(x, x') + c W_d(mu(. | y), mu'(. | y')): the distance of two labels is the transport distance between their
classes' samples (Alvarez-Melis and Fusi, "Geometric Dataset Distances via Optimal Transport", NeurIPS 2020). A sample's
value is the calibrated gradient of the dual at that sample.

As in the settings of the public code (p = 2, exact inner transport, debiased, eps = 0.1), d is half the squared
Euclidean distance and the dual is entropic, less the dual towards the client's own samples (Feydy et al., AISTATS
2019).

Departures: the duals are solved to tolerance, or there is a warning, whereas GeomLoss makes one pass of annealing; the
inner distance is exact by the network simplex, whereas GeomLoss's is entropic. The port in opendataval, which is the
code that was compared, halves the inner distance twice, so that its weight of 1 is ``label_weight=0.5`` here, and omits
the self-term when it asks for the dual.

:func:`direct_values` is another estimator with the same access, this package's own.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flsv.functional.distances import squared_distances
from flsv.functional.transport.checks import Scaling, check_labeled
from flsv.functional.transport.class_statistics import class_statistics
from flsv.functional.transport.cost import label_augmented_cost
from flsv.functional.transport.potentials import calibrated_gradient, entropic_potentials, self_potential
from flsv.functional.transport.wasserstein import wasserstein_distance
from flsv.utilities.declared import NonNegative, Positive, checked

Inner = Literal["exact", "gaussian"]


@checked
def lava(
    x: Tensor,
    y: Tensor,
    x2: Tensor,
    y2: Tensor,
    *,
    inner: Inner = "exact",
    label_weight: NonNegative = 1.0,
    eps: Positive = 0.1,
    scaling: Scaling = 0.7,
) -> Tensor:
    """Compute LAVA's values: calibrated gradients of the debiased dual.

    The ground cost is |x - x'|^2 / 2 + c W_2^2(class of y, class of y') / 2.

    Args:
        x: ``[m, d]`` features of the client's samples.
        y: ``[m]`` their integer classes.
        x2: ``[m2, d]`` the validation samples.
        y2: ``[m2]`` integer classes of ``x2``. Classes are compared by their samples, not by their numbers.
        inner: the distance between classes, see :func:`class_distances`.
        label_weight: c, at least 0; 0 leaves the labels out.
        eps: entropic regularization, in half squared feature units, above 0; at least 1e-5 of the largest cost is
            used.
        scaling: factor of eps from stage to stage, in (0, 1).

    Returns:
        ``[m]`` in half squared feature units, sums to 0; positive means harmful.

    Raises:
        ConfigurationError: wrong samples, labels or settings, or a cost matrix above 800 MiB.

    Example:
        >>> x = torch.tensor([[0.0], [0.1], [5.0], [5.1], [0.05]])
        >>> lava(x, torch.tensor([0, 0, 1, 1, 1]), x[:4], torch.tensor([0, 0, 1, 1])).argmax()  # mislabeled
        tensor(4)
    """
    check_labeled(x, y, x2, y2)
    settings = inner, label_weight
    potential, _ = entropic_potentials(_cost(x, y, x2, y2, *settings), eps, scaling)
    return calibrated_gradient(potential - self_potential(_cost(x, y, x, y, *settings), eps, scaling))


@checked
def class_distances(x: Tensor, y: Tensor, x2: Tensor, y2: Tensor, *, inner: Inner = "exact") -> Tensor:
    """Compute squared 2-Wasserstein distances between the classes of two sides.

    Args:
        x: ``[m, d]`` samples of one side.
        y: ``[m]`` their integer classes, of which V are present.
        x2: ``[m2, d]`` samples of the other side; the same tensors as ``x`` and ``y`` are solved once per pair.
        y2: ``[m2]`` their classes, of which V2 are present.
        inner: ``"exact"``: between the samples, a linear programme for each pair of classes (under a second for ten
            classes of 100 samples; the time grows with the cube of a class's size). ``"gaussian"``: between the
            Gaussians fitted to them, |m - m'|^2 + tr(S + S' - 2 (S^(1/2) S' S^(1/2))^(1/2)) (Bures), for large classes
            of few features.

    Returns:
        ``[V, V2]`` float64 in squared feature units, classes ascending.

    Raises:
        ConfigurationError: wrong samples or labels, or an unknown ``inner``.

    Example:
        >>> x, y = torch.tensor([[0.0], [2.0], [5.0], [7.0]]), torch.tensor([0, 0, 1, 1])
        >>> class_distances(x, y, x, y)
        tensor([[ 0., 25.],
                [25.,  0.]], dtype=torch.float64)
    """
    check_labeled(x, y, x2, y2)
    if inner == "gaussian":
        return _bures(x, y, x2, y2)
    same = x is x2 and y is y2
    left, right = ([points.double()[classes == c] for c in classes.unique()] for points, classes in ((x, y), (x2, y2)))
    result = torch.zeros(len(left), len(right), dtype=torch.float64)
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            if same and j <= i:
                result[i, j] = result[j, i]
            else:
                result[i, j] = wasserstein_distance(a, b).square()
    return result.to(x.device)


def _bures(x: Tensor, y: Tensor, x2: Tensor, y2: Tensor) -> Tensor:
    """Compute the Bures distances between the Gaussians fitted to the classes.

    With roots R, R' of the covariances the last term is the nuclear norm of R R'.
    """
    first, other = (class_statistics(points.double(), c, covariance="full") for points, c in ((x, y), (x2, y2)))
    assert first.deviations is not None
    assert other.deviations is not None
    cross = torch.stack([torch.linalg.matrix_norm(root @ other.deviations, ord="nuc") for root in first.deviations])
    traces = [roots.square().sum((1, 2)) for roots in (first.deviations, other.deviations)]
    spread = traces[0][:, None] + traces[1] - 2 * cross
    return squared_distances(first.means, other.means) + spread.clamp(min=0)


def _cost(x: Tensor, y: Tensor, x2: Tensor, y2: Tensor, inner: Inner, label_weight: float) -> Tensor:
    """Compute the ground cost ``[m, m2]`` of features and classes."""
    cost = label_augmented_cost(x, None, x2, None).div_(2)
    if label_weight > 0:
        between = (label_weight / 2 * class_distances(x, y, x2, y2, inner=inner)).to(cost)
        rows, columns = (classes.unique(return_inverse=True)[1] for classes in (y, y2))
        cost += between[rows][:, columns]
    return cost
