"""FedBary: values of a client's samples, with access to the validation samples or through the protocol.

After Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, section 4.3. It differs
from LAVA, which takes one dual of features and labels together: :func:`lava`.

The paper's potential does not detect label noise: how near a sample's features are to others varies more between clean
samples than a wrong label adds, and a self-term with labels lets mislabeled samples explain each other. So the
potential is split into parts, all at one eps:

    features:  f(x -> validation) - f(x -> x), on the features alone,
    labels:    f((x, y) -> validation) - f(x -> validation), what the label adds for the same features,
    both:      features + 2 labels.

The label's part has an offset per class, which depends on the two sides' class shares and not on the sample: it would
flag whole classes of a client whose shares differ. So "labels" and "both" are relative to the mean of the sample's own
class; "features" is equation 11 unchanged. (A class whose labels are all wrong is thus not detected by its labels.)

Through the protocol "validation" is gamma, whose first d coordinates are the features' own interpolating measure.
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
    """Compute calibrated gradients of the client's samples against the validation samples themselves.

    Args:
        x: ``[m, d]`` the client's samples.
        y: ``[m]`` their integer classes; None on either side: features only.
        x2: ``[m2, d]`` the validation samples.
        y2: ``[m2]`` their classes.
        part: ``"features"``, ``"labels"`` or ``"both"``, see :mod:`flsv.functional.transport.fedbary`.
        blur: eps, relative to the mean squared feature distance between both sides; above 0.
        scaling: see :func:`debiased_potential`.
        covariance: see :func:`label_augmented_cost`.
        label_weight: w of :func:`label_augmented_cost`. If the label term is much larger than feature distances,
            the class shares of both sides decide instead of the labels: on PCA features 0.5 to 1 is good, more is not.

    Returns:
        ``[m]`` in squared feature units, sums to 0; positive means harmful.

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
    """Compute calibrated gradients of the client's samples against the points that the protocol has sent to it.

    It needs no access to the samples of others.

    Args:
        x: ``[m, d]`` the client's samples.
        y: ``[m]`` their integer classes; None: features only.
        gamma: ``[S, d']`` points that the client has received: gamma (or eta_Q) of a protocol whose sides passed their
            :func:`label_embedding`. Without ``y`` it may be of features only (d' = d); else its
            first d coordinates are used.
        part: ``"features"``, ``"labels"`` or ``"both"``, see :mod:`flsv.functional.transport.fedbary`.
        blur: eps, relative to the mean squared feature distance between ``x`` and ``gamma``; above 0.
        scaling: see :func:`debiased_potential`.
        covariance: as in the protocol's embeddings.
        label_weight: as in the protocol's embeddings; see :func:`direct_values`.
        statistics: the client's class statistics; None: they are computed.

    Returns:
        ``[m]`` in squared feature units, sums to 0; positive means harmful.

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
    """Compute the calibrated gradient of the parts; one cost matrix is in memory at a time."""
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
