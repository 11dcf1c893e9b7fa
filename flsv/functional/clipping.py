"""Clip what a client can claim, the length of its update and its number of samples.

Nobody can check either from outside, and both can be made larger at will: Bagdasaryan et al., "How To Backdoor
Federated Learning", AISTATS 2020, send several times an update, and whoever writes each sample down three times has
three times as many. What is linear in them pays for that. Norms are bounded for robustness by Sun et al., "Can You
Really Backdoor Federated Learning?", arXiv:1911.07963, 2019, at a constant; here the bound on a claim c_i is relative
to the cohort, whose median half of it has to be wrong to move at will:

    min(c_i, cap median_j c_j).

Those below the bound may still come up to it, and those above gain nothing by going further.
"""

from __future__ import annotations

import torch
from torch import Tensor


def length_factors(norms: Tensor, cap: float) -> Tensor:
    """By how much updates are multiplied so that none is longer than the bound.

    Args:
        norms: ``[k]``, not negative. The median is that of the finite ones above 0.
        cap: the bound, in medians.

    Returns:
        float64 ``[k]`` in (0, 1], on the CPU.

    Example:
        >>> length_factors(torch.tensor([1.0, 2.0, 8.0, 0.0]), cap=2.0)
        tensor([1.0000, 1.0000, 0.5000, 1.0000], dtype=torch.float64)
    """
    norms = norms.detach().cpu().double()
    known = (norms > 0) & norms.isfinite()
    factors = torch.ones_like(norms)
    if known.any():
        factors[known] = (cap * norms[known].quantile(0.5) / norms[known]).clamp_max(1)
    return factors


def counted(num_samples: Tensor, cap: float | None) -> Tensor:
    """The numbers of samples that count, of those that clients tell.

    Args:
        num_samples: integers ``[k]``.
        cap: the bound, in medians, rounded up to a whole number; None: there is none.

    Returns:
        ``[k]``, of the same type.

    Example:
        >>> counted(torch.tensor([10, 20, 90]), cap=1.5)
        tensor([10, 20, 30])
    """
    if cap is None or not len(num_samples):
        return num_samples
    bound = (cap * num_samples.double().quantile(0.5)).ceil()
    return num_samples.clamp_max(bound.to(num_samples.dtype))


def shortened(rows: Tensor, start: Tensor, factors: Tensor, end: int) -> Tensor:
    """Models whose updates are multiplied.

    Args:
        rows: ``[k, P]``, models. They are not changed.
        start: ``[P]``, which they started from, or ``[k, P]``.
        factors: ``[k]``.
        end: how many leading entries are parameters: the others are not multiplied.

    Returns:
        ``[k, P]``, ``rows`` itself where all factors are 1; rows of a factor of 1 are equal to the bit.

    Example:
        >>> shortened(torch.tensor([[3.0, 7.0], [2.0, 7.0]]), torch.ones(2), torch.tensor([0.5, 1.0]), end=1)
        tensor([[2., 7.],
                [2., 7.]])
    """
    changed = (factors != 1).nonzero().flatten().tolist()
    if not changed:
        return rows
    result, starts = rows.clone(), start.expand_as(rows)
    for i in changed:
        own = starts[i, :end]
        result[i, :end].sub_(own).mul_(float(factors[i])).add_(own)
    return result
