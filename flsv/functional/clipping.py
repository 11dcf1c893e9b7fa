"""Clipping of a client's claims: the length of its update and its number of samples.

The server cannot check these two claims, and a client can exaggerate both: it can multiply its update (Bagdasaryan et
al., "How To Backdoor Federated Learning", AISTATS 2020), and it can list each sample several times. Metrics that are
linear in one of the claims reward this. Sun et al., "Can You Really Backdoor Federated Learning?", arXiv:1911.07963,
2019, bound norms by a constant. Here the claim c_i of client i is bounded relative to the claims of its cohort,

    min(c_i, cap median_j c_j),

so that half of the cohort has to collude to move the bound at will. A client below the bound can still raise its claim
up to the bound; raising it further has no effect.
"""

from __future__ import annotations

import torch
from torch import Tensor


def length_factors(norms: Tensor, cap: float) -> Tensor:
    """Compute the factor by which each update has to be multiplied so that its length is at most a bound.

    Args:
        norms: the updates' lengths, ``[k]``, not negative.
        cap: the bound, as a multiple of the median of the finite lengths above 0.

    Returns:
        float64 ``[k]`` in (0, 1], on the CPU: min(1, cap median / norm); 1 for a length that is 0 or not finite.

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


def capped_samples(num_samples: Tensor, cap: float | None) -> Tensor:
    """Cap the numbers of samples that clients report.

    Args:
        num_samples: the reported numbers, integers ``[k]``.
        cap: the bound, as a multiple of the median of ``num_samples``; the product is rounded up. None: no bound.

    Returns:
        The capped numbers, ``[k]``, in the dtype of ``num_samples``.

    Example:
        >>> capped_samples(torch.tensor([10, 20, 90]), cap=1.5)
        tensor([10, 20, 30])
    """
    if cap is None or not len(num_samples):
        return num_samples
    bound = (cap * num_samples.double().quantile(0.5)).ceil()
    return num_samples.clamp_max(bound.to(num_samples.dtype))


def scale_updates(rows: Tensor, start: Tensor, factors: Tensor, end: int) -> Tensor:
    """Multiply the updates of models by factors.

    Args:
        rows: the k trained models, ``[k, P]``; not changed.
        start: the model from which all of them started, ``[P]``, or ``[k, P]`` with one per model.
        factors: the factor of each model's update (model minus start), ``[k]``.
        end: the number of parameters, which come first in a row; the buffers after them are not scaled.

    Returns:
        The models with scaled updates, ``[k, P]``; ``rows`` itself if all factors are 1. A model whose factor is 1 does
        not change in any bit.

    Example:
        >>> scale_updates(torch.tensor([[3.0, 7.0], [2.0, 7.0]]), torch.ones(2), torch.tensor([0.5, 1.0]), end=1)
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
