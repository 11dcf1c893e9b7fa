"""Gradient agreement: how much clients' updates lower the validation loss, and how far they agree with the federation.

The method is this package's own, a blend of two that fail in different federations. The slope of the validation loss
along a client's update, times the client's samples and summed over rounds, is the first-order federated Shapley value
with fixed weights (for one sample as the player, the first-order term of Wang et al., "Data Shapley in One Training
Run", ICLR 2025). It detects bad data and is weaker where clients differ in their mixture of classes. The cosine of an
update with the federation's (Xu et al., CGSV, NeurIPS 2021), times samples, follows sizes and mixtures, and hardly
detects noise on the inputs. The even blend correlates with retrained Shapley values better than either:
``docs/benchmark.md``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.utilities.declared import Share, checked


@checked
def gradient_agreement(descent: Tensor, agreement: Tensor, blend: Share = 0.5) -> Tensor:
    r"""Blend the shares of two kinds of contribution.

    .. math::
        \phi_i = (1 - b) \frac{\max(u_i, 0)}{\sum_j \max(u_j, 0)} + b \frac{\max(a_i, 0)}{\sum_j \max(a_j, 0)}

    Args:
        descent: ``[n]``, u: by how much the clients' updates lower the validation loss, to first order, in nats. NaN
            for clients never seen.
        agreement: ``[n]``, a: samples times the mean cosine with the federation's update; NaN for clients never seen.
        blend: b in [0, 1].

    Returns:
        float64 ``[n]``, sums to 1; NaN for clients never seen. If no client has a positive number of one kind, the
        other kind counts alone; if neither kind has one, all shares are 0.

    Raises:
        ValueError: shapes that do not fit, ``blend`` out of range.

    Example:
        >>> gradient_agreement(torch.tensor([3.0, 1.0, -2.0]), torch.tensor([10.0, 20.0, 10.0]))
        tensor([0.5000, 0.3750, 0.1250], dtype=torch.float64)
    """
    parts, weights, totals = _weighed(descent, agreement, blend)
    return (weights * (parts / totals)).sum(0)


@checked
def agreement_scales(descent: Tensor, agreement: Tensor, blend: Share = 0.5) -> Tensor:
    """Compute the factors of u and a in :func:`gradient_agreement` where they are positive.

    Args:
        descent: as for :func:`gradient_agreement`.
        agreement: as for :func:`gradient_agreement`.
        blend: as for :func:`gradient_agreement`.

    Returns:
        float64 ``[2]``.
    """
    _, weights, totals = _weighed(descent, agreement, blend)
    return (weights / totals).squeeze(1)


def _weighed(descent: Tensor, agreement: Tensor, blend: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute both kinds' positive parts ``[2, n]``, their weights ``[2, 1]``, which sum to 1, and their totals."""
    if descent.ndim != 1 or descent.shape != agreement.shape:
        raise ValueError(f"expected two vectors [n], got {list(descent.shape)} and {list(agreement.shape)}.")
    parts = torch.stack([descent.double(), agreement.to(descent.device).double()]).clamp(min=0)
    totals = parts.nansum(1, keepdim=True)
    weights = (totals > 0) * totals.new_tensor([[1 - blend], [blend]])
    whole = weights.sum()
    return (
        parts,
        weights / whole.where(whole > 0, torch.ones_like(whole)),
        totals.where(totals > 0, torch.ones_like(totals)),
    )
