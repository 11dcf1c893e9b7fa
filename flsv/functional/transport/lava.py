"""LAVA: values of samples from a dual potential of the transport between two labeled data sets.

Just et al., "LAVA: Data Valuation without Pre-Specified Learning Algorithms", ICLR 2023. The ground cost between a
sample x with label y and another sample x' with label y' is C = d(x, x') + c W_d(mu(. | y), mu'(. | y')): the distance
of two labels is the transport distance W_d between the samples of their classes (Alvarez-Melis and Fusi, "Geometric
Dataset Distances via Optimal Transport", NeurIPS 2020), and c is the weight of the labels. The value of a sample is the
calibrated gradient of the dual potential at that sample.

As in the public code with its settings (p = 2, exact inner transport, debiased, eps = 0.1), d is half the squared
Euclidean distance, and the dual potential is the entropic potential towards the validation samples minus that towards
the client's own samples (Feydy et al., AISTATS 2019).

Departures from the public code, which uses GeomLoss: the potentials are iterated to a tolerance (with a warning if it
is not reached) instead of one pass of annealing, and the distance between classes is exact, by the network simplex,
instead of entropic. The values were compared with the port in opendataval. This port halves the distance between
classes twice, so that its weight of 1 is ``label_weight=0.5`` here, and omits the potential towards the client's own
samples.

:func:`direct_values`, which also needs access to both data sets, is this package's own estimator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.functional.transport.cost import Scaling, check_labeled, label_augmented_cost
from flsv.functional.transport.potentials import (
    calibrated_gradient,
    entropic_potentials,
    self_potential,
)
from flsv.functional.transport.wasserstein import wasserstein_distance
from flsv.utilities.declared import NonNegative, Positive, checked


@checked
def lava(
    x: Tensor,
    y: Tensor,
    x2: Tensor,
    y2: Tensor,
    *,
    label_weight: NonNegative = 1.0,
    eps: Positive = 0.1,
    scaling: Scaling = 0.7,
) -> Tensor:
    """Compute how much each sample of a client changes its distance from reference samples (LAVA).

    The ground cost is |x - x'|^2 / 2 + c W_2^2(class of y, class of y') / 2, with c = ``label_weight``.

    Args:
        x: the features of the client's samples, ``[m, d]``.
        y: the integer classes of the client's samples, ``[m]``.
        x2: the features of the validation samples, ``[m2, d]``.
        y2: the integer classes of the validation samples, ``[m2]``. Classes are compared by their samples, not by their
            numbers.
        label_weight: the weight c of the labels, at least 0. With 0 labels do not enter.
        eps: the entropic regularization, in half squared feature units, above 0. Values below 1e-5 of the largest cost
            count as this much.
        scaling: the factor of the regularization from one stage to the next, in (0, 1).

    Returns:
        The samples' values, ``[m]``, in half squared feature units, which sum to 0. Positive means harmful.

    Raises:
        ConfigurationError: samples or labels are empty, not finite or of wrong shapes, an option is out of range, or
            the cost matrix is larger than 800 MiB.

    Example:
        >>> x = torch.tensor([[0.0], [0.1], [5.0], [5.1], [0.05]])
        >>> lava(x, torch.tensor([0, 0, 1, 1, 1]), x[:4], torch.tensor([0, 0, 1, 1])).argmax()  # mislabeled
        tensor(4)
    """
    check_labeled(x, y, x2, y2)
    cost = _ground_cost(x, y, x2, y2, label_weight)
    potential, _ = entropic_potentials(cost, eps, scaling)
    del cost  # of [m, m2], before another [m, m]
    cost_to_itself = _ground_cost(x, y, x, y, label_weight)
    potential_to_itself = self_potential(cost_to_itself, eps, scaling)
    return calibrated_gradient(potential - potential_to_itself)


@checked
def class_distances(
    x: Tensor,
    y: Tensor,
    x2: Tensor,
    y2: Tensor,
) -> Tensor:
    """Compute squared 2-Wasserstein distances ``[V, V2]`` between two data sets' classes, both in ascending order."""
    # A linear program per pair of classes, whose time grows with the cube of a class's size. If both sides are the same
    # tensors, each pair is solved once.
    check_labeled(x, y, x2, y2)
    is_symmetric = x is x2 and y is y2
    points_by_class = _points_by_class(x, y)
    points2_by_class = _points_by_class(x2, y2)
    distances = torch.zeros(len(points_by_class), len(points2_by_class)).double()
    for row, points in enumerate(points_by_class):
        for column, points2 in enumerate(points2_by_class):
            if is_symmetric and column == row:
                continue  # the distance of a class to itself stays 0
            if is_symmetric and column < row:
                distances[row, column] = distances[column, row]
            else:
                distance = wasserstein_distance(points, points2)
                distances[row, column] = distance.square()
    return distances.to(x.device)


def _points_by_class(x: Tensor, y: Tensor) -> list[Tensor]:
    """Return the points ``[m_c, d]`` of each class c that is present, ascending, float64."""
    points = x.double()
    return [points[y == label] for label in y.unique()]


def _ground_cost(
    x: Tensor,
    y: Tensor,
    x2: Tensor,
    y2: Tensor,
    label_weight: float,
) -> Tensor:
    """Compute the ground cost ``[m, m2]`` of features and classes."""
    # Half the squared distance, for features and labels alike.
    cost = label_augmented_cost(x, y=None, x2=x2, y2=None).div_(2)
    if label_weight > 0:
        class_costs = label_weight / 2 * class_distances(x, y, x2, y2)
        _, classes = y.unique(return_inverse=True)
        _, classes2 = y2.unique(return_inverse=True)
        # class_costs [V, V2] become [m, m2]: the costs between the labels of two samples.
        cost += class_costs.to(cost)[classes][:, classes2]
    return cost
