"""Dual potentials of the client's samples, and the calibrated gradient made of them.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, equations 10 and 11, after Just
et al., "LAVA: Data Valuation without Pre-Specified Learning Algorithms", ICLR 2023.

The paper takes the potentials of the exact linear programme. Against an interpolant, which sits on the transport rays,
these are degenerate: many are optimal, and the solver's choice is arbitrary. Ours are debiased entropic potentials
(Feydy et al., "Interpolating between Optimal Transport and MMD using Sinkhorn Divergences", AISTATS 2019): unique up to
a constant, and without the pull of the entropy towards the centre of the cloud.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flsv.arguments import check_number
from flsv.errors import ConfigurationError
from flsv.functional.transport.cost import label_augmented_cost
from flsv.functional.transport.statistics import Covariance

BLOCK_BYTES = 64 * 2**20
MAX_BYTES = 800 * 2**20
STAGE_ITERATIONS = 20
LAST_ITERATIONS = 300
TOLERANCE = 1e-4  # mean relative error of the client's marginal
SMALLEST_EPS = 1e-5  # of the largest cost: below, float32 potentials are rounding
TINY = 1e-30


def calibrated_gradient(potential: Tensor) -> Tensor:
    """f_l - sum_{j != l} f_j / (m - 1) (eq. 11): how the distance changes if sample l gets more mass.

    Positive means harmful: more of this sample would push the distributions apart. (The caption of the paper's figure 2
    says the opposite of its section 4.3; this is the latter.)

    Args:
        potential: ``[m]`` dual potential f on the samples, up to a constant.

    Returns:
        ``[m]``, which sum to 0; 0 for a single sample.

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


def debiased_potential(
    x: Tensor,
    x2: Tensor,
    *,
    blur: float = 0.1,
    scaling: float = 0.7,
    y: Tensor | None = None,
    y2: Tensor | None = None,
    covariance: Covariance = "diag",
    label_weight: float = 1.0,
) -> Tensor:
    """f_xy - f_xx on the samples of ``x``: entropic potential towards ``x2`` less the one towards themselves.

    The regularisation eps is annealed from the largest cost down to ``blur`` times the mean cost between ``x`` and
    ``x2`` (p = 2), by ``scaling`` a stage.

    Args:
        x: ``[m, d]`` samples.
        x2: ``[m2, d]`` samples, or points of an interpolating measure.
        blur: final eps, relative to the mean squared cost, so that it means the same at any scale of the data.
        scaling: factor of eps from stage to stage, in (0, 1).
        y: ``[m]`` integer classes; None on either side leaves the label term out.
        y2: ``[m2]``.
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
    check_number("debiased_potential", "blur", blur, least=0)
    cost = label_augmented_cost(x, y, x2, y2, covariance=covariance, label_weight=label_weight)
    eps = blur * float(cost.mean(dtype=torch.float64))
    cross, _ = entropic_potentials(cost, eps, scaling)
    del cost
    cost = label_augmented_cost(x, y, x, y, covariance=covariance, label_weight=label_weight)
    return cross - self_potential(cost, eps, scaling)


def self_potential(cost: Tensor, eps: float, scaling: float) -> Tensor:
    """The entropic potential ``[m]`` of a set towards itself, from its costs ``[m, m]`` (overwritten)."""
    f, g = entropic_potentials(cost, eps, scaling)
    return (f + g) / 2


def entropic_potentials(cost: Tensor, eps: float, scaling: float) -> tuple[Tensor, Tensor]:
    """Potentials f ``[m]`` and g ``[m2]``, of equal mean, for equally heavy samples at costs ``[m, m2]`` (overwritten).

    A stage sets eps, takes one step in logarithms (which cannot overflow), and goes on with products with the plan's
    matrix, which are much faster. Both sides move half-way at once (in turns, the offset between far-apart
    clusters, which hardly any mass determines, would favour one side); only the last stage, which is solved to
    tolerance, goes in turns, which converges faster.
    """
    if not eps >= 0 or not 0 < scaling < 1:
        raise ConfigurationError(f"eps={eps}, scaling={scaling}: expected blur of at least 0 and scaling in (0, 1).")
    if cost.numel() * cost.element_size() > MAX_BYTES:
        raise ConfigurationError(
            f"{cost.shape[0]} samples against {cost.shape[1]}: the cost matrix takes more than {MAX_BYTES >> 20} MiB. "
            f"Value the samples in random parts of at most {math.isqrt(MAX_BYTES // cost.element_size())}."
        )
    m, m2 = cost.shape
    largest = float(cost.max())
    if largest == 0:
        return cost.new_zeros(m), cost.new_zeros(m2)
    # Relative to the largest cost, so that float32 does at any scale of the data.
    cost, last = cost.div_(largest), max(eps / largest, SMALLEST_EPS)
    f, g, eps, plan = cost.new_zeros(m), cost.new_zeros(m2), max(1.0, last), torch.empty_like(cost)
    while True:
        f, g = (f + _soft_minimum(cost, g, eps)) / 2, (g + _soft_minimum(cost.T, f, eps)) / 2
        torch.sub(g, cost, out=plan).add_(f[:, None]).div_(eps).exp_()
        u, v = torch.ones_like(f), torch.ones_like(g)
        for _ in range(STAGE_ITERATIONS if eps > last else LAST_ITERATIONS):
            if eps > last:
                rows, columns = (plan @ v / m2).clamp(min=TINY), (u @ plan / m).clamp(min=TINY)
                error = (u * rows - 1).abs().mean()
                u, v = (u / rows).sqrt(), (v / columns).sqrt()
            else:
                v = m / (u @ plan).clamp(min=TINY)
                rows = (plan @ v / m2).clamp(min=TINY)
                error = (u * rows - 1).abs().mean()
                u = 1 / rows
            if error < TOLERANCE:
                break
        f, g = f + eps * u.log(), g + eps * v.log()
        if eps == last:
            break
        eps = max(eps * scaling, last)
    shift = (g.mean() - f.mean()) / 2
    return largest * (f + shift), largest * (g - shift)


def _soft_minimum(cost: Tensor, other: Tensor, eps: float) -> Tensor:
    """-eps log mean_j exp((other_j - cost_ij) / eps), a block of rows at a time."""
    rows = max(1, BLOCK_BYTES // (cost.element_size() * cost.shape[1]))
    parts = [torch.logsumexp((other - block) / eps, 1) for block in cost.split(rows)]
    return -eps * (torch.cat(parts) - math.log(cost.shape[1]))
