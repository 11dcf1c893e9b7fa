"""Dual potentials of optimal transport on a client's samples, and the values of samples made of them.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, equations 10 and 11 and section
4.3, after Just et al., "LAVA: Data Valuation without Pre-Specified Learning Algorithms", ICLR 2023.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from flsv.functional.transport.cost import (
    ClassStatistics,
    Covariance,
    Scaling,
    check_pair,
    label_augmented_cost,
    label_embedding,
)
from flsv.utilities.declared import NonNegative, Positive, checked
from flsv.utilities.errors import ConfigurationError

BLOCK_BYTES = 64 * 2**20
MAX_BYTES = 800 * 2**20
STAGE_ITERATIONS = 20
LAST_ITERATIONS = 5000
BLOCK = 20  # iterations between two checks of the error, since each check waits for the device
TOLERANCE = 1e-4  # largest error of potentials, in eps; the error is estimated from the marginals' relative error
MOST_OMEGA = 1.99
FARTHEST = 200.0  # largest logarithm of a scaling, so that its exponential stays finite
SMALLEST_EPS = (
    1e-5  # relative to the largest cost; with a smaller eps, float32 potentials are rounding errors
)
TINY = 1e-300
NO_MASS = 1e-200  # smaller masses count as 0: products with them would be denormal numbers, which are slow
#: A stage's result: the logarithms of the row and the column scalings, ``[m]`` and ``[m2]``, the number of iterations,
#: and the remaining error in eps. ``Finish`` is a function from a plan and the largest number of iterations to it.
Finished = tuple[Tensor, Tensor, int, float]
Finish = Callable[[Tensor, int], Finished]


def calibrated_gradient(potential: Tensor) -> Tensor:
    """Compute how fast the transport distance grows with each sample's mass (eq. 11).

    The calibrated gradient of sample l among m samples with the dual potentials f is

        f_l - sum_{j != l} f_j / (m - 1).

    Positive means harmful: more of this sample would increase the distance between the distributions. (This follows
    section 4.3 of the paper. The caption of its figure 2 says the opposite.)

    Args:
        potential: the dual potentials f of the samples, ``[m]``, up to a constant.

    Returns:
        ``[m]``, which sums to 0. 0 for a single sample.

    Raises:
        ConfigurationError: ``potential`` is empty or not a vector.

    Example:
        >>> calibrated_gradient(torch.tensor([1.0, 2.0, 6.0]))
        tensor([-3.0000, -1.5000,  4.5000])
    """
    if potential.ndim != 1 or len(potential) == 0:
        raise ConfigurationError(
            f"potential: expected a vector of at least one number, got {list(potential.shape)}."
        )
    if len(potential) == 1:
        return torch.zeros_like(potential)
    f = potential.double()
    return ((f - f.mean()) * (len(f) / (len(f) - 1))).to(potential.dtype)


def self_potential(cost: Tensor, eps: float, scaling: float) -> Tensor:
    """Compute the entropic dual potential ``[m]`` of samples towards themselves. Overwrite ``cost [m, m]``."""
    # All stages, also the last, update both sides at once: with a small eps almost no mass moves, and after
    # alternating updates the two sides' potentials would differ.
    return _potentials(cost, eps, scaling, _scale_both)[0]


def entropic_potentials(cost: Tensor, eps: float, scaling: float) -> tuple[Tensor, Tensor]:
    """Compute the entropic dual potentials ``[m]`` and ``[m2]``, shifted to equal means. Overwrite ``cost [m, m2]``."""
    # eps falls in stages. A stage takes one step in logarithms, which cannot overflow, and continues with faster
    # products. It updates both sides at once by half of the step: alternating would favor one side where hardly any
    # mass determines the potentials, in the offset between far-apart clusters. Only the last stage alternates, until
    # the potentials are within 1e-4 eps of their limit, or warns after 5000 iterations.
    return _potentials(cost, eps, scaling, _scale_in_turn)


def _potentials(cost: Tensor, eps: float, scaling: float, finish: Finish) -> tuple[Tensor, Tensor]:
    """Compute the dual potentials ``[m]``, ``[m2]`` of entropic transport, in stages of falling regularization."""
    # The paper takes the exact linear program's potentials. Between samples and an interpolating measure these are
    # degenerate: the solver chooses among many. Entropic ones are unique up to a constant, and debiasing removes the
    # entropy's bias towards the samples' center (Feydy et al., AISTATS 2019).
    if cost.numel() * cost.element_size() > MAX_BYTES:
        raise ConfigurationError(
            f"{cost.shape[0]} samples against {cost.shape[1]}: the cost matrix takes more than {MAX_BYTES >> 20} MiB. "
            f"Value the samples in random parts of at most {math.isqrt(MAX_BYTES // cost.element_size())}."
        )
    m, m2 = cost.shape
    largest = float(cost.max())
    if largest == 0:
        return cost.new_zeros(m), cost.new_zeros(m2)
    # Relative to the largest cost, so that float32 suffices at any scale of the data.
    cost, last = cost.div_(largest), max(eps / largest, SMALLEST_EPS)
    precise = torch.float32 if cost.device.type == "mps" else torch.float64
    plan = torch.empty_like(cost, dtype=precise)
    f, g, eps, left = plan.new_zeros(m), plan.new_zeros(m2), max(1.0, last), LAST_ITERATIONS
    while True:
        f, g = (f + _soft_minimum(cost, g, eps)) / 2, (g + _soft_minimum(cost.T, f, eps)) / 2
        torch.sub(g, cost, out=plan).add_(f[:, None]).div_(eps).exp_()
        plan.masked_fill_(plan < NO_MASS, 0.0)
        u, v, steps, error = (finish if eps == last else _scale_both)(
            plan, left if eps == last else STAGE_ITERATIONS
        )
        f, g = f + eps * u, g + eps * v
        if eps == last:
            left -= steps
            if error < TOLERANCE or left <= 0:
                break
        eps = max(eps * scaling, last)
    if error >= TOLERANCE:
        warnings.warn(
            f"The transport's potentials have not settled after {LAST_ITERATIONS} iterations: they may be off by "
            f"{error:.0e} eps, where {TOLERANCE:.0e} is aimed at. The regularization, {last:.1e} of the largest cost, "
            "is too small for them: raise eps (blur), or bring the features to a smaller scale.",
            stacklevel=4,
        )
    shift = (g.mean() - f.mean()) / 2
    return (largest * (f + shift)).to(cost.dtype), (largest * (g - shift)).to(cost.dtype)


def _scale_both(plan: Tensor, iterations: int) -> Finished:
    """Scale a transport plan to uniform marginals, by simultaneous updates of both sides. Return the log factors of
    rows and columns, the number of steps and the error.
    """
    u, v = plan.new_ones(len(plan)), plan.new_ones(plan.shape[1])
    steps, error = 0, math.inf
    while steps < iterations and error >= TOLERANCE:
        rows, columns = (plan @ v / len(v)).clamp(min=TINY), (u @ plan / len(u)).clamp(min=TINY)
        error = float((u * rows - 1).abs().mean())
        u, v = (u / rows).sqrt(), (v / columns).sqrt()
        steps += 1
    return u.log(), v.log(), steps, error


def _scale_in_turn(plan: Tensor, iterations: int) -> Finished:
    """Scale a transport plan to uniform marginals, by alternating over-relaxed updates. Return the same as
    :func:`_scale_both`.
    """
    u, v = plan.new_zeros(len(plan)), plan.new_zeros(plan.shape[1])
    omega, most, before, error, steps = 1.0, MOST_OMEGA, math.inf, math.inf, 0
    while steps < iterations:
        known = u, v
        for _ in range(BLOCK):
            down = -(u.exp() @ plan / len(u)).clamp(min=TINY).log() - v
            v = v + omega * down
            across = -(plan @ v.exp() / len(v)).clamp(min=TINY).log() - u
            u = u + omega * across
        steps += BLOCK
        step = float(across.abs().mean() + down.abs().mean())
        if not math.isfinite(step):
            # Far from the limit, over-relaxation can diverge; omega = 1 never does.
            (u, v), omega, most, before = known, 1.0, 1 + (omega - 1) / 2, math.inf
            continue
        rate = max((step / before) ** (1 / BLOCK), omega - 1)
        # The remaining steps are a geometric series.
        error = step / (1 - rate) if rate < 1 else math.inf
        if error < TOLERANCE or max(float(u.abs().max()), float(v.abs().max())) > FARTHEST:
            break
        if omega - 1 < rate < 1:
            slowest = min((rate + omega - 1) ** 2 / (omega**2 * rate), 1.0)
            omega = min(max(omega, 2 / (1 + math.sqrt(1 - slowest))), most)
        before = step
    return u, v, steps, error


def _soft_minimum(cost: Tensor, other: Tensor, eps: float) -> Tensor:
    """Compute the soft minimum over j of cost_ij - other_j for each row i."""
    rows = max(1, BLOCK_BYTES // (cost.element_size() * cost.shape[1]))
    parts = [torch.logsumexp((other - block) / eps, 1) for block in cost.split(rows)]
    return -eps * (torch.cat(parts) - math.log(cost.shape[1]))


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
    """Compute the values of a client's samples by comparison with the validation samples.

    The paper's potential does not detect label noise: clean samples' distances vary by more than a wrong label adds,
    and mislabeled samples compensate for each other. So the potential f(from -> to) is split into

        features:  f(x -> validation) - f(x -> x), from the features alone (equation 11),
        labels:    f((x, y) -> validation) - f(x -> validation), the effect of the label for the same features,
        both:      features + 2 labels.

    The mean over the sample's own class is subtracted from "labels" and "both", since it depends on the data sets'
    class shares only. As a consequence, a class whose labels are all wrong is not detected.

    Args:
        x: the features of the client's samples, ``[m, d]``.
        y: the integer classes of the client's samples, ``[m]``. If ``y`` or ``y2`` is None, only features count.
        x2: the features of the validation samples, ``[m2, d]``.
        y2: the integer classes of the validation samples, ``[m2]``.
        part: the part of a sample that is valued: its ``"features"`` alone, its ``"labels"`` given the features, or
            ``"both"``.
        blur: the regularization, as a fraction of the mean squared feature distance between ``x`` and ``x2``. Above 0.
        scaling: the factor of the regularization from one stage to the next, in (0, 1).
        covariance: see :func:`label_augmented_cost`.
        label_weight: the weight of the label term, see :func:`label_augmented_cost`. If the label term is much larger
            than feature distances, the values depend on the two data sets' class shares instead of on wrong labels. 0.5
            to 1 suits PCA features.

    Returns:
        The samples' values, ``[m]``, in squared feature units, which sum to 0. Positive means harmful.

    Raises:
        ConfigurationError: samples or labels are empty, not finite or of wrong shapes, an option is out of range, or
            ``part="labels"`` without labels.

    Example:
        >>> x = torch.tensor([[0.0], [0.1], [5.0], [5.1], [0.05]])
        >>> direct_values(x, torch.tensor([0, 0, 1, 1, 1]), x[:4], torch.tensor([0, 0, 1, 1])).argmax()  # mislabeled
        tensor(4)
    """
    labeled = partial(
        label_augmented_cost, x, y, x2, y2, covariance=covariance, label_weight=label_weight
    )
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
    """Compute the values of a client's samples at the client, without validation samples.

    The points that the server has sent replace the validation samples, see :class:`TransportClient`.

    Args:
        x: the features of the client's samples, ``[m, d]``.
        y: the integer classes of the client's samples, ``[m]``. None: only features count.
        gamma: ``[S, d']``, the points from the :class:`TransportServer`. Client and server must have used the
            :func:`label_embedding` of their samples, which has d' coordinates. If ``y`` is None, only the first d
            coordinates are used, and d' may be d.
        part: as for :func:`direct_values`.
        blur: the regularization, as a fraction of the mean squared distance between the features of ``x`` and
            ``gamma``. Above 0.
        scaling: see :func:`direct_values`.
        covariance: the same as in the label embedding.
        label_weight: the same as in the label embedding. See :func:`direct_values`.
        statistics: the client's class statistics. None: they are computed.

    Returns:
        The samples' values, ``[m]``, in squared feature units, which sum to 0. Positive means harmful.

    Raises:
        ConfigurationError: samples or labels are empty, not finite or of wrong shapes, an option is out of range,
            ``part="labels"`` without labels, or ``gamma`` does not have the dimension of the embedding.

    Example:
        >>> x, y = torch.tensor([[0.0], [0.1], [5.0], [5.1], [0.05]]), torch.tensor([0, 0, 1, 1, 1])
        >>> client_values(x, y, label_embedding(x[:4], y[:4])).argmax()
        tensor(4)
    """
    points = label_embedding(
        x, y, covariance=covariance, label_weight=label_weight, statistics=statistics
    )
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
    """Compute the samples' values for one choice of ``part``. ``labeled()`` returns the cost with labels. None: labels
    are not known.
    """
    if part == "labels" and labeled is None:
        raise ConfigurationError(
            'part="labels" needs classes on both sides. Pass them, or part="features".'
        )
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
        value = (
            value
            - (torch.zeros_like(value[: len(counts)]).index_add_(0, index, value) / counts)[index]
        )
    return calibrated_gradient(value)
