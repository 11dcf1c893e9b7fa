"""Values of a client's samples: with access to the validation samples, or through the protocol.

After Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, section 4.3. It is not
LAVA, which takes one dual of features and labels together: that is :func:`lava`.

The paper's potential sees no label noise: how near a sample's features are to others varies more between clean samples
than a wrong label adds, and a self-term with labels lets mislabeled samples explain each other. So the potential is
taken apart, all at one eps:

    features:  f(x -> validation) - f(x -> x), on the features alone,
    labels:    f((x, y) -> validation) - f(x -> validation), what the label adds for the same features,
    both:      features + 2 labels.

What a label adds has an offset per class, which says how the sides' class shares differ and nothing of the sample: it
would flag whole classes of a client with shares of its own. So "labels" and "both" are relative to the mean of the
sample's own class; "features" is equation 11 as it is. (A class that is wrong as a whole is thus not seen by its
labels.)

Through the protocol "validation" is gamma, whose first d coordinates are the features' own interpolating measure.

Values of single samples: LAVA, and KNN-Shapley.

LAVA as published: values of samples from one dual of the transport between labeled data sets.

Just et al., "LAVA: Data Valuation without Pre-Specified Learning Algorithms", ICLR 2023. The ground cost is
C((x, y), (x', y')) = d(x, x') + c W_d(mu(. | y), mu'(. | y')): the distance of two labels is the transport distance
between their classes' samples (Alvarez-Melis and Fusi, "Geometric Dataset Distances via Optimal Transport", NeurIPS
2020). A sample's value is the calibrated gradient of the dual at that sample.

As in the settings of the public code (p = 2, exact inner transport, debiased, eps = 0.1), d is half the squared
Euclidean distance and the dual is entropic, less the dual towards the client's own samples (Feydy et al., AISTATS
2019).

Departures: the duals are solved to tolerance, or there is a warning, where GeomLoss makes one pass of annealing; the
inner distance is exact by the network simplex, where GeomLoss's is entropic. The port in opendataval, which is the code
that was compared, halves the inner distance twice, so that its weight of 1 is ``label_weight=0.5`` here, and leaves the
self-term out when it asks for the dual.

:func:`direct_values` is our own estimator with the same access, and another method.

Exact Shapley values of a k-nearest-neighbor classifier: the usual baseline of data valuation.

Jia et al., "Efficient Task-Specific Data Valuation for Nearest Neighbor Algorithms", VLDB 2019, Theorem 1. For one
validation sample and the training samples in order of distance a_1, ..., a_m,

    s(a_m) = [y(a_m) = y] min(k, m) / (m k),
    s(a_i) = s(a_{i+1}) + ([y(a_i) = y] - [y(a_{i+1}) = y]) / k * min(k, i) / i,

and a value is the mean over the validation samples. (The paper's first line, [.] / m, is for k <= m.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from flsv.functional.transport.cost import (
    ClassStatistics,
    Covariance,
    Scaling,
    check_labeled,
    check_pair,
    class_statistics,
    label_augmented_cost,
    label_embedding,
    squared_distances,
)
from flsv.functional.transport.solvers import (
    calibrated_gradient,
    entropic_potentials,
    self_potential,
    wasserstein_distance,
)
from flsv.utilities.declared import Count, NonNegative, Positive, checked
from flsv.utilities.errors import ConfigurationError

Part = Literal["features", "labels", "both"]

LABEL_EMPHASIS = 2.0


@checked
def direct_values(
    x: Tensor,
    y: Tensor | None,
    x2: Tensor,
    y2: Tensor | None,
    *,
    part: Part = "both",
    blur: Positive = 0.1,
    scaling: Scaling = 0.7,
    covariance: Covariance = "diag",
    label_weight: NonNegative = 1.0,
) -> Tensor:
    """Calibrated gradients of the client's samples against the validation samples themselves.

    Args:
        x: ``[m, d]`` the client's samples.
        y: ``[m]`` their integer classes; None on either side: features only.
        x2: ``[m2, d]`` the validation samples.
        y2: ``[m2]`` their classes.
        part: ``"features"``, ``"labels"`` or ``"both"``, see the file's docstring.
        blur: eps, relative to the mean squared feature distance between both sides; above 0.
        scaling: see :func:`debiased_potential`.
        covariance: see :func:`label_augmented_cost`.
        label_weight: w of :func:`label_augmented_cost`. Where the label term dwarfs feature distances, both sides'
            class shares decide instead of the labels: on PCA features 0.5 to 1 serve, more does not.

    Returns:
        ``[m]`` in squared feature units, which sum to 0; positive means harmful.

    Raises:
        ConfigurationError: wrong samples, labels or settings, or ``part="labels"`` without labels.

    Example:
        >>> x = torch.tensor([[0.0], [0.1], [5.0], [5.1], [0.05]])
        >>> direct_values(x, torch.tensor([0, 0, 1, 1, 1]), x[:4], torch.tensor([0, 0, 1, 1])).argmax()  # mislabeled
        tensor(4)
    """
    labeled = partial(label_augmented_cost, x, y, x2, y2, covariance=covariance, label_weight=label_weight)
    return _values(x, y, x2, None if y is None or y2 is None else labeled, part, blur, scaling)


@checked
def client_values(
    x: Tensor,
    y: Tensor | None,
    gamma: Tensor,
    *,
    part: Part = "both",
    blur: Positive = 0.1,
    scaling: Scaling = 0.7,
    covariance: Covariance = "diag",
    label_weight: NonNegative = 1.0,
    statistics: ClassStatistics | None = None,
) -> Tensor:
    """Calibrated gradients of the client's samples against what the protocol has sent it: no access to others' samples.

    Args:
        x: ``[m, d]`` the client's samples.
        y: ``[m]`` their integer classes; None: features only.
        gamma: ``[S, d']`` points that the client has received: gamma (or eta_Q) of a protocol whose sides passed their
            :func:`label_embedding`. Without ``y`` it may be of features only (d' = d); else its
            first d coordinates are used.
        part: ``"features"``, ``"labels"`` or ``"both"``, see the file's docstring.
        blur: eps, relative to the mean squared feature distance between ``x`` and ``gamma``; above 0.
        scaling: see :func:`debiased_potential`.
        covariance: as in the protocol's embeddings.
        label_weight: as in the protocol's embeddings; see :func:`direct_values`.
        statistics: of the client's classes, where they are known already.

    Returns:
        ``[m]`` in squared feature units, which sum to 0; positive means harmful.

    Raises:
        ConfigurationError: wrong samples, labels or settings, ``part="labels"`` without labels, or a gamma of other
            dimension than the embedding.

    Example:
        >>> x, y = torch.tensor([[0.0], [0.1], [5.0], [5.1], [0.05]]), torch.tensor([0, 0, 1, 1, 1])
        >>> client_values(x, y, label_embedding(x[:4], y[:4])).argmax()
        tensor(4)
    """
    points = label_embedding(x, y, covariance=covariance, label_weight=label_weight, statistics=statistics)
    features = gamma[:, : x.shape[1]]
    if y is not None or gamma.shape[1] < x.shape[1]:
        check_pair(points, gamma, "the samples (embedded)", "gamma")
    labeled = partial(label_augmented_cost, points, None, gamma, None)
    return _values(x, y, features, None if y is None else labeled, part, blur, scaling)


def _values(
    x: Tensor,
    y: Tensor | None,
    x2: Tensor,
    labeled: Callable[[], Tensor] | None,
    part: Part,
    blur: float,
    scaling: float,
) -> Tensor:
    """Calibrated gradient of the parts; cost matrices live one at a time."""
    if part == "labels" and labeled is None:
        raise ConfigurationError('part="labels" needs classes on both sides. Pass them, or part="features".')
    cost = label_augmented_cost(x, None, x2, None)
    eps = blur * float(cost.mean(dtype=torch.float64))
    features, _ = entropic_potentials(cost, eps, scaling)
    value = torch.zeros_like(features)
    if part != "labels":
        value = features - self_potential(label_augmented_cost(x, None, x, None), eps, scaling)
    if part != "features" and labeled is not None and y is not None:
        labels = entropic_potentials(labeled(), eps, scaling)[0] - features
        value = value + (labels if part == "labels" else LABEL_EMPHASIS * labels)
        _, index, counts = y.unique(return_inverse=True, return_counts=True)
        value = value - (torch.zeros_like(value[: len(counts)]).index_add_(0, index, value) / counts)[index]
    return calibrated_gradient(value)


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
    """Calibrated gradients of the debiased dual on |x - x'|^2 / 2 + c W_2^2(class of y, class of y') / 2.

    Args:
        x: ``[m, d]`` the client's samples, in the features that the distances are to be taken in.
        y: ``[m]`` their integer classes.
        x2: ``[m2, d]`` the validation samples.
        y2: ``[m2]`` their classes. Classes are compared by their samples, not by their numbers.
        inner: the distance between classes, see :func:`class_distances`.
        label_weight: c, at least 0; 0 leaves the labels out.
        eps: entropic regularization, in half squared feature units, above 0. Below 1e-5 of the largest cost that is
            what is used.
        scaling: factor of eps from stage to stage, in (0, 1).

    Returns:
        ``[m]`` in half squared feature units, which sum to 0; positive means harmful.

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
    """Squared 2-Wasserstein distances between the classes of two sides.

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
        ConfigurationError: wrong samples or labels, or another ``inner``.

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
    """With roots R, R' of the covariances the last term is the nuclear norm of R R'."""
    first, other = (class_statistics(points.double(), c, covariance="full") for points, c in ((x, y), (x2, y2)))
    assert first.deviations is not None
    assert other.deviations is not None
    cross = torch.stack([torch.linalg.matrix_norm(root @ other.deviations, ord="nuc") for root in first.deviations])
    traces = [roots.square().sum((1, 2)) for roots in (first.deviations, other.deviations)]
    spread = traces[0][:, None] + traces[1] - 2 * cross
    return squared_distances(first.means, other.means) + spread.clamp(min=0)


def _cost(x: Tensor, y: Tensor, x2: Tensor, y2: Tensor, inner: Inner, label_weight: float) -> Tensor:
    cost = label_augmented_cost(x, None, x2, None).div_(2)
    if label_weight > 0:
        between = (label_weight / 2 * class_distances(x, y, x2, y2, inner=inner)).to(cost)
        rows, columns = (classes.unique(return_inverse=True)[1] for classes in (y, y2))
        cost += between[rows][:, columns]
    return cost


CHUNK_ENTRIES = 8_000_000


@checked
def knn_shapley(x: Tensor, y: Tensor, x2: Tensor, y2: Tensor, *, k: Count = 10) -> Tensor:
    """Shapley values of the training samples for v(S) = mean share of a validation sample's k nearest with its label.

    Neighbors that S lacks (fewer than k samples) count as wrong, so v(empty) = 0.

    Args:
        x: ``[m, d]`` training samples.
        y: ``[m]`` their integer classes.
        x2: ``[m2, d]`` validation samples.
        y2: ``[m2]`` their classes.
        k: neighbors, at least 1.

    Returns:
        ``[m]`` in the dtype of ``x``; positive means useful (the opposite sign of a calibrated gradient). They sum to
        v(all samples).

    Raises:
        ConfigurationError: wrong samples, labels or k.

    Example:
        >>> x, y = torch.tensor([[0.0], [1.0], [9.0]]), torch.tensor([0, 1, 1])
        >>> knn_shapley(x, y, torch.tensor([[0.2]]), torch.tensor([0]), k=1)
        tensor([1., 0., 0.])
    """
    check_labeled(x, y, x2, y2)
    m = len(x)
    rank = torch.arange(1, m, device=x.device, dtype=torch.float64)
    step = rank.clamp(max=k) / (rank * k)
    total = torch.zeros(m, device=x.device, dtype=torch.float64)
    for rows in torch.arange(len(x2), device=x.device).split(max(1, CHUNK_ENTRIES // m)):
        order = squared_distances(x2[rows], x).argsort(dim=1, stable=True)
        match = (y[order] == y2[rows, None]).double()
        last = match[:, -1:] * (min(k, m) / (m * k))
        gains = (match[:, :-1] - match[:, 1:]) * step
        values = torch.cat([gains.flip(1).cumsum(1).flip(1) + last, last], 1)
        total.index_add_(0, order.flatten(), values.flatten())
    return (total / len(x2)).to(x.dtype)
