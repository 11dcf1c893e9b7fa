"""Everybody-Else: what clients gain from the others, shared out equally among the others; needs sums of updates only.

A client that knows the aggregate, its own part in it and its own weight can take its part out again, without any single
one of the others' updates. It finds out what the others' model gains it on its own validation samples, and reports one
number. It is the leave-one-out model of secure aggregation: nobody but the client itself can make it.

The idea, that a client's value rests on evaluations by all the others and on none of its own, is the one of
Everybody-Else (Jaramillo-Velez et al., "Private and Robust Contribution Evaluation in Federated Learning", arXiv
2602.21721, 2026). The formula here is ours: theirs could not be established from what is public.
"""

from __future__ import annotations

import torch
from torch import Tensor


def without_own(aggregate: Tensor, own: Tensor, weight: float) -> Tensor | None:
    """The others' weighted average (A - w x) / (1 - w), from the average A of all.

    Args:
        aggregate: ``[P]``, A.
        own: ``[P]``, x, what the client has in it.
        weight: w in [0, 1].

    Returns:
        ``[P]``; None where nobody else has any weight.

    Raises:
        ValueError: a weight outside [0, 1].

    Example:
        >>> without_own(torch.tensor([3.0, 5.0]), torch.tensor([1.0, 1.0]), 0.5)
        tensor([5., 9.])
    """
    if not -1e-6 <= weight <= 1 + 1e-6:
        raise ValueError(f"a client's weight in the aggregate lies in [0, 1]; got {weight}.")
    rest = 1 - weight
    if rest < 1e-6:
        return None
    return (aggregate - weight * own) / rest


def everybody_else(gains: Tensor, trim: int = 0) -> Tensor:
    r"""Each client's share of what the other clients have gained.

    .. math:: v_i = \frac1{k-1} \sum_{j \ne i} g_j

    with :math:`g_j` what client *j* gains from everybody else. The values sum to the gains; a client's own report is
    not in its own value. A false report is in all others' values, though, and one that is low enough takes everything
    from them. With ``trim`` the mean is over the others' reports without so many of the largest and of the smallest
    (Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018): so many liars
    move no value beyond what honest clients report. The values then no longer sum to the gains. Where some gains are
    not known, the mean is over the others that are.

    Args:
        gains: ``[k]``, NaN where it is not known.
        trim: reports that are left out at each end.

    Returns:
        ``[k]``; 0 for a client that is alone, NaN where none of the others' gains is known, or all that are known
        are trimmed.

    Raises:
        ValueError: not a vector; nobody is left who reports.

    Example:
        >>> everybody_else(torch.tensor([0.1, 0.2, 0.3]))
        tensor([0.2500, 0.2000, 0.1500])
        >>> everybody_else(torch.tensor([0.1, 0.2, float("nan")]))
        tensor([0.2000, 0.1000, 0.1500])
        >>> everybody_else(torch.tensor([0.1, 0.2, 0.3, -9.0]), trim=1)
        tensor([0.2000, 0.1000, 0.1000, 0.2000])
    """
    if gains.ndim != 1:
        raise ValueError(f"expected gains [k], got {list(gains.shape)}.")
    k = len(gains)
    if k < 2:
        return torch.zeros_like(gains)
    own = torch.eye(k, dtype=torch.bool, device=gains.device)
    known = ~(gains.isnan() | own)
    if not trim:
        return gains.expand(k, -1).masked_fill(~known, 0).sum(dim=1) / known.sum(dim=1)
    if k - 1 <= 2 * trim:
        raise ValueError(
            f"trim={trim} leaves none of {k - 1} reports of the others. Lower it, or let at least {2 * trim + 2} "
            "clients take part in every round."
        )
    others = gains.expand(k, -1).masked_fill(~known, float("inf")).sort(dim=1).values
    place, last = torch.arange(k, device=gains.device), known.sum(dim=1, keepdim=True) - trim
    kept = (place >= trim) & (place < last)
    return others.masked_fill(~kept, 0).sum(dim=1) / kept.sum(dim=1)
