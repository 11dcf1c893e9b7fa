"""Dual potentials of optimal transport on a client's samples, and the values of samples computed from them.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, equations 10 and 11 and section
4.3, after Just et al., "LAVA: Data Valuation without Pre-Specified Learning Algorithms", ICLR 2023.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from flsv.functional.transport.cost import (
    ClassStatistics,
    Covariance,
    check_pair,
    label_embedding,
    squared_costs,
)
from flsv.utilities.declared import NonNegative, Positive, checked
from flsv.utilities.errors import ConfigurationError

BYTES_PER_BLOCK = 64 * 2**20
MAX_COST_BYTES = 800 * 2**20
STAGE_FACTOR = 0.7  # of the regularization, from one stage to the next
ITERATIONS_PER_STAGE = 20
MAX_FINAL_ITERATIONS = 5000
# Iterations between two checks of the error, since each check waits for the device.
ITERATIONS_PER_CHECK = 20
MAX_ERROR = 1e-4  # largest error of potentials, in eps; the error is estimated from the marginals' relative error
MAX_OMEGA = 1.99
MAX_LOG_SCALING = 200.0  # largest logarithm of a scaling, so that its exponential stays finite
SMALLEST_EPS = (
    1e-5  # relative to the largest cost; with a smaller eps, float32 potentials are rounding errors
)
TINY = 1e-300
MIN_MASS = 1e-200  # smaller masses are set to 0, since products with denormal numbers are slow
#: A stage's result: the logarithms of the row and the column scalings, ``[m]`` and ``[m2]``, the number of iterations,
#: and the remaining error in eps. ``Finish`` computes it from a plan and the largest number of iterations.
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
            f"potential: expected a vector of at least one number, but got shape {list(potential.shape)}."
        )
    count = len(potential)
    if count == 1:
        return torch.zeros_like(potential)
    centered = potential.double() - potential.double().mean()
    gradient = centered * (count / (count - 1))
    return gradient.to(potential.dtype)


def self_potential(cost: Tensor, eps: float) -> Tensor:
    """Compute the entropic dual potential ``[m]`` of samples towards themselves. Overwrite ``cost [m, m]``."""
    # All stages, also the last, update both sides at once. With a small eps almost no mass moves, so the two sides'
    # potentials would differ after alternating updates.
    potential, _ = _potentials(cost, eps, _scale_both)
    return potential


def entropic_potentials(cost: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute the entropic dual potentials ``[m]`` and ``[m2]``, shifted to equal means. Overwrite ``cost [m, m2]``."""
    # eps decreases in stages. A stage takes one step in logarithms, which cannot overflow, and continues with faster
    # products. It updates both sides at once by half of the step. Alternating updates would favor one side if hardly
    # any mass determines the potentials, as in the offset between distant clusters. Only the last stage alternates,
    # until the potentials are within 1e-4 eps of their limit, or warns after 5000 iterations.
    return _potentials(cost, eps, _scale_in_turn)


def _potentials(
    cost: Tensor,
    eps: float,
    finish: Finish,
) -> tuple[Tensor, Tensor]:
    """Compute the dual potentials ``[m]``, ``[m2]`` of entropic transport, in stages of falling regularization."""
    # The paper takes the exact linear program's potentials. Between samples and an interpolating measure these are
    # degenerate: the solver chooses among many. Entropic ones are unique up to a constant, and debiasing removes the
    # entropy's bias towards the samples' center (Feydy et al., AISTATS 2019).
    _check_size(cost)
    largest = float(cost.max())
    if largest == 0:
        return cost.new_zeros(cost.shape[0]), cost.new_zeros(cost.shape[1])

    # Costs are relative to the largest one, so that float32 suffices at any scale of the data.
    relative_cost = cost.div_(largest)
    final_eps = max(eps / largest, SMALLEST_EPS)
    dtype = torch.float32 if cost.device.type == "mps" else torch.float64
    plan = torch.empty_like(cost, dtype=dtype)
    f, g = _approach(relative_cost, plan, final_eps)
    f, g = _converge(relative_cost, plan, f, g, final_eps, finish)
    shift = (g.mean() - f.mean()) / 2
    first_potential = largest * (f + shift)
    second_potential = largest * (g - shift)
    return first_potential.to(cost.dtype), second_potential.to(cost.dtype)


def _approach(cost: Tensor, plan: Tensor, final_eps: float) -> tuple[Tensor, Tensor]:
    # The plan is overwritten.
    m, m2 = cost.shape
    f = plan.new_zeros(m)
    g = plan.new_zeros(m2)
    eps = max(1.0, final_eps)
    while eps > final_eps:
        f, g = _half_step(cost, f, g, eps)
        _write_plan(plan, cost, f, g, eps)
        u, v, _, _ = _scale_both(plan, ITERATIONS_PER_STAGE)
        f = f + eps * u
        g = g + eps * v
        eps = max(eps * STAGE_FACTOR, final_eps)
    return f, g


def _converge(
    cost: Tensor,
    plan: Tensor,
    f: Tensor,
    g: Tensor,
    eps: float,
    finish: Finish,
) -> tuple[Tensor, Tensor]:
    # The plan is overwritten.
    iterations_left = MAX_FINAL_ITERATIONS
    error = math.inf
    while error >= MAX_ERROR and iterations_left > 0:
        f, g = _half_step(cost, f, g, eps)
        _write_plan(plan, cost, f, g, eps)
        u, v, steps, error = finish(plan, iterations_left)
        f = f + eps * u
        g = g + eps * v
        iterations_left -= steps
    if error >= MAX_ERROR:
        _warn_of_error(error, eps)
    return f, g


def _warn_of_error(error: float, eps: float) -> None:
    warnings.warn(
        f"The potentials of optimal transport have not converged after {MAX_FINAL_ITERATIONS} iterations. Their "
        f"error may be {error:.0e} eps instead of {MAX_ERROR:.0e} eps, since the regularization is small "
        f"({eps:.1e} of the largest cost). Raise eps (blur), or scale the features down.",
        stacklevel=6,
    )


def _check_size(cost: Tensor) -> None:
    """Raise ConfigurationError if a cost matrix takes too much memory."""
    bytes_per_entry = cost.element_size()
    if cost.numel() * bytes_per_entry > MAX_COST_BYTES:
        max_mib = MAX_COST_BYTES // 2**20
        max_samples = math.isqrt(MAX_COST_BYTES // bytes_per_entry)
        raise ConfigurationError(
            f"the cost matrix of {cost.shape[0]} by {cost.shape[1]} samples takes more than {max_mib} MiB. Compute "
            f"values for random parts of at most {max_samples} samples."
        )


def _half_step(
    cost: Tensor,
    f: Tensor,
    g: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Move both potentials half of the way to the soft minima, at once."""
    next_f = _soft_minimum(cost, g, eps)
    next_g = _soft_minimum(cost.T, f, eps)
    return (f + next_f) / 2, (g + next_g) / 2


def _write_plan(
    plan: Tensor,
    cost: Tensor,
    f: Tensor,
    g: Tensor,
    eps: float,
) -> None:
    """Write exp((f_i + g_j - cost_ij) / eps) into element (i, j) of ``plan [m, m2]``, or 0 if this is tiny."""
    # This is done in place, since the matrix may take hundreds of MB.
    torch.sub(g, cost, out=plan)
    plan.add_(f[:, None])
    plan.div_(eps)
    plan.exp_()
    plan.masked_fill_(plan < MIN_MASS, 0.0)


def _scale_both(plan: Tensor, iterations: int) -> Finished:
    """Scale a plan to uniform marginals. Return the log factors of rows and columns, the number of steps and the
    error.
    """
    # Factors a_i, b_j are sought with mean_j a_i plan_ij b_j = 1 and mean_i a_i plan_ij b_j = 1.
    m, m2 = plan.shape
    row_factors = plan.new_ones(m)
    column_factors = plan.new_ones(m2)
    steps = 0
    error = math.inf
    while steps < iterations and error >= MAX_ERROR:
        row_means = (plan @ column_factors / m2).clamp(min=TINY)
        column_means = (row_factors @ plan / m).clamp(min=TINY)
        error = float((row_factors * row_means - 1).abs().mean())
        # The factors 1 / row_means make the rows uniform. The new factor is their geometric mean with the old factor.
        row_factors = (row_factors / row_means).sqrt()
        column_factors = (column_factors / column_means).sqrt()
        steps += 1
    return row_factors.log(), column_factors.log(), steps, error


def _scale_in_turn(plan: Tensor, iterations: int) -> Finished:
    """Scale a transport plan to uniform marginals, by alternating over-relaxed updates. Return the same as
    :func:`_scale_both`.
    """
    # u and v are the logarithms of the factors.
    u = plan.new_zeros(plan.shape[0])
    v = plan.new_zeros(plan.shape[1])
    relaxation = _Relaxation()
    error = math.inf
    steps = 0
    while steps < iterations:
        next_u, next_v, step_size = _over_relaxed(plan, u, v, relaxation.omega)
        steps += ITERATIONS_PER_CHECK
        if not math.isfinite(step_size):
            relaxation.restart()
            continue
        u, v = next_u, next_v
        error = relaxation.adapt(step_size)
        largest = float(torch.cat([u, v]).abs().max())
        if error < MAX_ERROR or largest > MAX_LOG_SCALING:
            break
    return u, v, steps, error


class _Relaxation:
    """The factor omega of over-relaxed updates, adapted to the rate at which their steps become smaller."""

    omega = 1.0
    max_omega = MAX_OMEGA
    step_size = math.inf

    def restart(self) -> None:
        """Begin again after steps that diverged. Far from the limit this happens, but never with omega = 1."""
        self.max_omega = 1 + (self.omega - 1) / 2
        self.omega = 1.0
        self.step_size = math.inf

    def adapt(self, step_size: float) -> float:
        """Adapt omega to the size of the latest step. Return the error, the sum of the steps that remain."""
        rate = (step_size / self.step_size) ** (1 / ITERATIONS_PER_CHECK)
        rate = max(rate, self.omega - 1)
        self.step_size = step_size
        if rate >= 1:
            return math.inf
        if rate > self.omega - 1:
            self.omega = _faster_omega(self.omega, rate, self.max_omega)
        return step_size / (1 - rate)  # the remaining steps are a geometric series


def _over_relaxed(
    plan: Tensor,
    u: Tensor,
    v: Tensor,
    omega: float,
) -> tuple[Tensor, Tensor, float]:
    # These are the iterations until the next check.
    m, m2 = plan.shape
    for _ in range(ITERATIONS_PER_CHECK):
        # The step that makes one side's marginal uniform is taken omega times.
        column_means = (u.exp() @ plan / m).clamp(min=TINY)
        step_of_v = -column_means.log() - v
        v = v + omega * step_of_v
        row_means = (plan @ v.exp() / m2).clamp(min=TINY)
        step_of_u = -row_means.log() - u
        u = u + omega * step_of_u
    return u, v, float(step_of_u.abs().mean() + step_of_v.abs().mean())


def _faster_omega(omega: float, rate: float, max_omega: float) -> float:
    """Return the best relaxation for the slowest mode, by the rate with ``omega``."""
    slowest = (rate + omega - 1) ** 2 / (omega**2 * rate)
    slowest = min(slowest, 1.0)
    best = 2 / (1 + math.sqrt(1 - slowest))
    return min(max(omega, best), max_omega)


def _soft_minimum(cost: Tensor, potential: Tensor, eps: float) -> Tensor:
    """Compute the soft minimum over j of cost_ij - potential_j for each row i."""
    num_columns = cost.shape[1]
    num_rows = max(1, BYTES_PER_BLOCK // (cost.element_size() * num_columns))
    parts = []
    for block in cost.split(num_rows):
        exponents = (potential - block) / eps
        parts.append(torch.logsumexp(exponents, 1))
    return -eps * (torch.cat(parts) - math.log(num_columns))


Part = Literal["features", "labels", "both"]
LABEL_EMPHASIS = 2.0


@checked
def client_values(
    x: Tensor,
    y: Tensor | None,
    gamma: Tensor,
    *,
    part: Part = "both",
    blur: Positive = 0.1,
    covariance: Covariance = "diag",
    label_weight: NonNegative = 1.0,
    statistics: ClassStatistics | None = None,
) -> Tensor:
    """Compute the values of a client's samples at the client, without validation samples.

    The points that the server has sent replace the validation samples, see :class:`TransportClient`.

    The paper's potential does not detect label noise: clean samples' distances vary by more than a wrong label adds,
    and mislabeled samples compensate for each other. So the potential f(from -> to) is split into

        features:  f(x -> gamma) - f(x -> x), from the features alone (equation 11),
        labels:    f((x, y) -> gamma) - f(x -> gamma), the effect of the label for the same features,
        both:      features + 2 labels.

    The mean over the sample's own class is subtracted from "labels" and "both", since it depends on the data sets'
    class shares only. As a consequence, a class whose labels are all wrong is not detected.

    Args:
        x: the features of the client's samples, ``[m, d]``.
        y: the integer classes of the client's samples, ``[m]``. None: only features count.
        gamma: ``[S, d']``, the points from the :class:`TransportServer`. Client and server must have used the
            :func:`label_embedding` of their samples, which has d' coordinates. If ``y`` is None, only the first d
            coordinates are used, and d' may be d.
        part: the part of a sample that is valued: its ``"features"`` alone, its ``"labels"`` given the features, or
            ``"both"``.
        blur: the regularization, as a fraction of the mean squared distance between the features of ``x`` and
            ``gamma``. Above 0.
        covariance: the same as in the label embedding.
        label_weight: the same as in the label embedding. If the label term is much larger than feature distances, the
            values depend on class shares instead of on wrong labels. 0.5 to 1 suits PCA features.
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
    if part == "labels" and y is None:
        raise ConfigurationError(
            'part="labels" needs classes, but y is None. Pass classes, or set part="features".'
        )
    points = label_embedding(
        x, y, covariance=covariance, label_weight=label_weight, statistics=statistics
    )
    if y is not None or gamma.shape[1] < x.shape[1]:
        check_pair(points, gamma, "the samples (embedded)", "gamma")
    return calibrated_gradient(_gradient_of_samples(x, y, points, gamma, part, blur))


def _gradient_of_samples(
    x: Tensor,
    y: Tensor | None,
    points: Tensor,
    gamma: Tensor,
    part: Part,
    blur: float,
) -> Tensor:
    """Compute how fast the distance to ``gamma`` grows with each sample's mass, ``[m]``, up to a constant factor."""
    cost = squared_costs(x, gamma[:, : x.shape[1]])
    eps = blur * float(cost.mean(dtype=torch.float64))
    feature_potential, _ = entropic_potentials(cost, eps)
    del cost  # frees [m, m2], before another matrix is made
    feature_gradient = torch.zeros_like(feature_potential)
    if part != "labels":
        feature_gradient = feature_potential - self_potential(squared_costs(x, x), eps)
    if part == "features" or y is None:
        return feature_gradient

    # With the same eps for both costs, the labels' part is the difference of their potentials.
    labeled_potential, _ = entropic_potentials(squared_costs(points, gamma), eps)
    label_gradient = labeled_potential - feature_potential
    if part == "both":
        label_gradient = LABEL_EMPHASIS * label_gradient
    return _centered_by_class(feature_gradient + label_gradient, y)


def _centered_by_class(gradient: Tensor, y: Tensor) -> Tensor:
    """Subtract the mean of each class, so that samples are compared within a class."""
    _, classes, counts = y.unique(return_inverse=True, return_counts=True)
    class_sums = gradient.new_zeros(len(counts)).index_add_(0, classes, gradient)
    class_means = class_sums / counts
    return gradient - class_means[classes]
