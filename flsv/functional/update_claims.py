"""What a client claims by how much it sends: the length of its update, and the number of its samples.

Nobody can check either from outside, and both can be made larger at will: Bagdasaryan et al., "How To Backdoor Federated
Learning", AISTATS 2020, send several times an update, and whoever writes each sample down three times has three times as
many. What is linear in them pays for that. Norms are bounded for robustness by Sun et al., "Can You Really Backdoor
Federated Learning?", arXiv:1911.07963, 2019; updates of one length are what CGSV is made of (Xu et al., NeurIPS 2021).
Here both are measured by the cohort's median, which half of the cohort has to be wrong to move at will:

    capped:  min(c_i, median_j c_j),    equal:  median_j c_j.

A cap leaves those below it what they may gain by coming up to it; equal claims leave nothing, and tell nothing.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Rule = Literal["told", "capped", "equal"]
RULES = ("told", "capped", "equal")


def length_factors(norms: Tensor, rule: Rule) -> Tensor:
    """By how much updates are multiplied so that their lengths keep to a rule.

    Args:
        norms: ``[k]``, not negative. The median is that of the finite ones above 0; an update of zero stays one.
        rule: ``"told"``: all factors are 1.

    Returns:
        float64 ``[k]``, on the CPU.

    Example:
        >>> length_factors(torch.tensor([1.0, 2.0, 8.0]), "capped")
        tensor([1.0000, 1.0000, 0.2500], dtype=torch.float64)
        >>> length_factors(torch.tensor([1.0, 2.0, 8.0, 0.0]), "equal")
        tensor([2.0000, 1.0000, 0.2500, 1.0000], dtype=torch.float64)
    """
    norms = norms.detach().cpu().double()
    known = (norms > 0) & norms.isfinite()
    factors = torch.ones_like(norms)
    if rule != "told" and known.any():
        ratios = norms[known].quantile(0.5) / norms[known]
        factors[known] = ratios.clamp_max(1) if rule == "capped" else ratios
    return factors


def counted(num_samples: Tensor, rule: Rule) -> Tensor:
    """The numbers of samples that count, of those that clients tell.

    Args:
        num_samples: integers ``[k]``.
        rule: of the claims. The median of an even number of them is rounded up.

    Returns:
        ``[k]``, of the same type.

    Example:
        >>> counted(torch.tensor([10, 20, 90]), "capped"), counted(torch.tensor([10, 20, 90]), "equal")
        (tensor([10, 20, 20]), tensor([20, 20, 20]))
    """
    if rule == "told" or not len(num_samples):
        return num_samples
    median = num_samples.double().quantile(0.5).ceil().to(num_samples.dtype)
    return num_samples.clamp_max(median) if rule == "capped" else median.expand_as(num_samples).clone()


def of_length(rows: Tensor, start: Tensor, factors: Tensor, end: int) -> Tensor:
    """Models whose updates are multiplied.

    Args:
        rows: ``[k, P]``, models. They are not changed.
        start: ``[P]``, which they started from, or ``[k, P]``.
        factors: ``[k]``.
        end: how many leading entries are parameters: the others are not multiplied.

    Returns:
        ``[k, P]``, ``rows`` itself where all factors are 1; rows of a factor of 1 are equal to the bit.

    Example:
        >>> of_length(torch.tensor([[3.0, 7.0], [2.0, 7.0]]), torch.ones(2), torch.tensor([0.5, 1.0]), end=1)
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
