"""FedBary: values of a client's samples, computed with the validation samples or with the points a client receives.

After Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, section 4.3. LAVA
(:func:`lava`) differs: it uses a single dual potential of features and labels together.

The paper's potential does not detect label noise, for two reasons. Clean samples' distances to other samples vary by
more than a wrong label adds. And if labels enter the potential of the samples towards themselves, mislabeled samples
compensate for each other. The potential f(from -> to) is therefore split into parts, all with the same regularization
eps. For a sample with features x and label y they are

    features:  f(x -> validation) - f(x -> x), from the features alone,
    labels:    f((x, y) -> validation) - f(x -> validation), the effect of the label for the same features,
    both:      features + 2 labels.

The part "labels" has an offset for each class that depends on the two data sets' class shares only. With it, whole
classes of a client with other class shares would be flagged. So the mean over the sample's own class is subtracted from
"labels" and "both"; "features" is equation 11 unchanged. As a consequence, a class whose labels are all wrong is not
detected.

A client without the validation samples replaces them by gamma, the points that the server has sent to it (see
:mod:`flsv.functional.transport.federated`), whose first d coordinates are features.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from flsv.functional.transport.checks import Scaling, check_pair
from flsv.functional.transport.class_statistics import ClassStatistics, Covariance
from flsv.functional.transport.cost import label_augmented_cost, label_embedding
from flsv.functional.transport.potentials import calibrated_gradient, entropic_potentials, self_potential
from flsv.utilities.declared import NonNegative, Positive, checked
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
    """Compute the values (calibrated gradients) of a client's samples from these and the validation samples.

    Args:
        x: the features of the client's samples, ``[m, d]``.
        y: the integer classes of the client's samples, ``[m]``. If ``y`` or ``y2`` is None, only features count.
        x2: the features of the validation samples, ``[m2, d]``.
        y2: the integer classes of the validation samples, ``[m2]``.
        part: the part of a sample that is valued: its ``"features"`` alone; its ``"labels"``, given the features; or
            ``"both"``.
        blur: the regularization, as a fraction of the mean squared feature distance between ``x`` and ``x2``; above 0.
        scaling: see :func:`debiased_potential`.
        covariance: see :func:`label_augmented_cost`.
        label_weight: the weight of the label term, see :func:`label_augmented_cost`. If the label term is much larger
            than feature distances, the values depend on the two data sets' class shares instead of on wrong labels; 0.5
            to 1 suits PCA features.

    Returns:
        The samples' values, ``[m]``, in squared feature units, which sum to 0; positive means harmful.

    Raises:
        ConfigurationError: samples or labels are empty, not finite or of wrong shapes, an option is out of range, or
            ``part="labels"`` without labels.

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
    """Compute the values (calibrated gradients) of a client's samples at the client, without the validation samples.

    They are replaced by the points that the server has sent to the client, see :class:`TransportClient`.

    Args:
        x: the features of the client's samples, ``[m, d]``.
        y: the integer classes of the client's samples, ``[m]``; None: only features count.
        gamma: ``[S, d']``, the points from the :class:`TransportServer`, if client and server use the samples'
            :func:`label_embedding`, with d' coordinates, in place of the samples. If ``y`` is None, only the first d
            coordinates are used, and d' may be d.
        part: as for :func:`direct_values`.
        blur: the regularization, as a fraction of the mean squared distance between the features of ``x`` and
            ``gamma``; above 0.
        scaling: see :func:`debiased_potential`.
        covariance: the same as in the label embedding.
        label_weight: the same as in the label embedding; see :func:`direct_values`.
        statistics: the client's class statistics; None: they are computed.

    Returns:
        The samples' values, ``[m]``, in squared feature units, which sum to 0; positive means harmful.

    Raises:
        ConfigurationError: samples or labels are empty, not finite or of wrong shapes, an option is out of range,
            ``part="labels"`` without labels, or ``gamma`` does not have the dimension of the embedding.

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
    """Compute the samples' values for one choice of ``part``."""
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
