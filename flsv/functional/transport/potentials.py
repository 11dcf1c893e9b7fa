"""Dual potentials of the client's samples, and the calibrated gradient made of them.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, equations 10 and 11, after Just
et al., "LAVA: Data Valuation without Pre-Specified Learning Algorithms", ICLR 2023.

The paper takes the potentials of the exact linear programme. Against an interpolant, which lies on the transport rays,
these are degenerate: many are optimal, and the solver's choice is arbitrary. Here potentials are debiased and entropic
(Feydy et al., "Interpolating between Optimal Transport and MMD using Sinkhorn Divergences", AISTATS 2019): unique up to
a constant, and without the pull of the entropy towards the center of the cloud.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from flsv.functional.transport.checks import Scaling
from flsv.functional.transport.class_statistics import Covariance
from flsv.functional.transport.cost import label_augmented_cost
from flsv.utilities.declared import NonNegative, checked
from flsv.utilities.errors import ConfigurationError

BLOCK_BYTES = 64 * 2**20
MAX_BYTES = 800 * 2**20
STAGE_ITERATIONS = 20
LAST_ITERATIONS = 5000
BLOCK = 20  # iterations between two checks of the error, each of which waits for the device
TOLERANCE = 1e-4  # of potentials, in eps: the mean relative error of the marginals over 1 - the rate at which it falls
MOST_OMEGA = 1.99
FARTHEST = 200.0  # largest logarithm of a scaling, so that its exponential stays finite
SMALLEST_EPS = 1e-5  # relative to the largest cost: below, float32 potentials are rounding errors
TINY = 1e-300
NO_MASS = 1e-200  # below: products with it would be denormal numbers, which are slow
#: Logarithms of the scalings of rows and of columns, the iterations spent, and the remaining error.
Finished = tuple[Tensor, Tensor, int, float]
Finish = Callable[[Tensor, int], Finished]


def calibrated_gradient(potential: Tensor) -> Tensor:
    """Compute how the distance changes if a sample gets more mass (eq. 11).

        f_l - sum_{j != l} f_j / (m - 1)

    Positive means harmful: more of this sample would push the distributions apart. (The caption of the paper's figure 2
    says the opposite of its section 4.3, which is followed here.)

    Args:
        potential: ``[m]`` dual potential f on the samples, up to a constant.

    Returns:
        ``[m]``, sums to 0; 0 for a single sample.

    Raises:
        ConfigurationError: not a vector of at least one number.

    Example:
        >>> calibrated_gradient(torch.tensor([1.0, 2.0, 6.0]))
        tensor([-3.0000, -1.5000,  4.5000])
    """
    if potential.ndim != 1 or len(potential) == 0:
        raise ConfigurationError(f"potential: expected a vector of at least one number, got {list(potential.shape)}.")
    if len(potential) == 1:
        return torch.zeros_like(potential)
    f = potential.double()
    return ((f - f.mean()) * (len(f) / (len(f) - 1))).to(potential.dtype)


@checked
def debiased_potential(
    x: Tensor,
    x2: Tensor,
    *,
    blur: NonNegative = 0.1,
    scaling: Scaling = 0.7,
    y: Tensor | None = None,
    y2: Tensor | None = None,
    covariance: Covariance = "diag",
    label_weight: NonNegative = 1.0,
) -> Tensor:
    """Compute the debiased entropic potential f_xy - f_xx on the samples of ``x``.

    It is the potential towards ``x2`` less the potential of ``x`` towards itself.

    The regularization eps is annealed from the largest cost down to ``blur`` times the mean cost between ``x`` and
    ``x2`` (p = 2), by ``scaling`` a stage.

    Args:
        x: ``[m, d]`` samples.
        x2: ``[m2, d]`` samples, or points of an interpolating measure.
        blur: final eps, relative to the mean squared cost, so that it is independent of the scale of the data.
        scaling: factor of eps from stage to stage, in (0, 1).
        y: ``[m]`` integer classes; None on either side leaves the label term out.
        y2: ``[m2]`` integer classes of ``x2``.
        covariance: see :func:`label_augmented_cost`.
        label_weight: see :func:`label_augmented_cost`.

    Returns:
        ``[m]`` in squared feature units and the dtype of ``x``; 0 where both sides are equal sets.

    Raises:
        ConfigurationError: wrong samples, labels or settings, or a cost matrix above 800 MiB.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [2.0], [9.0]])
        >>> debiased_potential(x, x[:3]).argmax()
        tensor(3)
    """
    if y is None or y2 is None:
        y = y2 = None
    cost = label_augmented_cost(x, y, x2, y2, covariance=covariance, label_weight=label_weight)
    eps = blur * float(cost.mean(dtype=torch.float64))
    cross, _ = entropic_potentials(cost, eps, scaling)
    del cost
    cost = label_augmented_cost(x, y, x, y, covariance=covariance, label_weight=label_weight)
    return cross - self_potential(cost, eps, scaling)


def self_potential(cost: Tensor, eps: float, scaling: float) -> Tensor:
    """Compute the entropic potential ``[m]`` of a set towards itself, from its costs ``[m, m]`` (overwritten).

    The two sides are the same set, so the last stage goes half-way, too: where eps is small, next to no mass moves, and
    alternating turns would keep the two sides apart.
    """
    return _potentials(cost, eps, scaling, _half_way)[0]


def entropic_potentials(cost: Tensor, eps: float, scaling: float) -> tuple[Tensor, Tensor]:
    """Compute potentials f ``[m]`` and g ``[m2]``, of equal mean, for equally heavy samples.

    A stage sets eps, takes one step in logarithms (which cannot overflow), and continues with products with the plan's
    matrix in double precision, which are much faster. Both sides move half-way at once (in turns, the offset between
    far-apart clusters, which hardly any mass determines, would favor one side); only the last stage goes in turns, with
    over-relaxation, see :func:`_over_relaxed`. It ends when the potentials are within 1e-4 eps of their limit, as
    estimated from the marginals' error and its rate of decrease; otherwise there is a warning with the error.

    Args:
        cost: ``[m, m2]``, overwritten.
        eps: the final regularization, in the unit of the costs.
        scaling: factor of eps from stage to stage, in (0, 1).
    """
    return _potentials(cost, eps, scaling, _over_relaxed)


def _potentials(cost: Tensor, eps: float, scaling: float, finish: Finish) -> tuple[Tensor, Tensor]:
    """Anneal eps from the largest cost to its final value; ``finish`` does the last stage."""
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
        u, v, steps, error = (finish if eps == last else _half_way)(plan, left if eps == last else STAGE_ITERATIONS)
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


def _half_way(plan: Tensor, iterations: int) -> Finished:
    """Move both sides at once, half of the way that their marginals ask for."""
    u, v = plan.new_ones(len(plan)), plan.new_ones(plan.shape[1])
    steps, error = 0, math.inf
    while steps < iterations and error >= TOLERANCE:
        rows, columns = (plan @ v / len(v)).clamp(min=TINY), (u @ plan / len(u)).clamp(min=TINY)
        error = float((u * rows - 1).abs().mean())
        u, v = (u / rows).sqrt(), (v / columns).sqrt()
        steps += 1
    return u.log(), v.log(), steps, error


def _over_relaxed(plan: Tensor, iterations: int) -> Finished:
    """Move the sides in turns, omega times as far as their marginals ask for.

    Thibault, Chizat, Dossal, Papadakis, "Overrelaxed Sinkhorn-Knopp Algorithm for Regularized Optimal Transport",
    Algorithms 14(5), 2021. With omega = 1 the error falls by lambda a turn, which is next to 1 where eps is small; with
    omega = 2 / (1 + (1 - lambda)^(1/2)) by omega - 1 (Young). Lambda is estimated from how the error falls.
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
            # Far from the limit such a long stride leads away from it; turns with omega = 1 never do.
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
    """Compute -eps log mean_j exp((other_j - cost_ij) / eps), a block of rows at a time."""
    rows = max(1, BLOCK_BYTES // (cost.element_size() * cost.shape[1]))
    parts = [torch.logsumexp((other - block) / eps, 1) for block in cost.split(rows)]
    return -eps * (torch.cat(parts) - math.log(cost.shape[1]))
