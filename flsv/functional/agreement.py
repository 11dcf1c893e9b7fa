"""Contributions by agreement with the aggregate: of classifier heads (CSSV) and of whole updates (CGSV).

Class-specific Shapley values (CSSV) of ShapFed.

Tastan et al., "Redefining Contributions: Shapley-Driven Federated Learning", IJCAI 2024, equations 5 and 6. The cosine
between a participant's and the aggregate's row of the classifier head stands for the participant's contribution to that
class: no validation set and no coalition is evaluated.

Departures from the authors' code, which follow the paper: the weights use (1 + cosine)/2 as eq. 6 says (without it they
can turn negative or blow up), and a zero row (a class nobody trained) has cosine 0 instead of NaN.

Cosine gradient Shapley values (CGSV): reputations from how far each participant's update points with the aggregate.

Xu et al., "Gradient Driven Rewards to Guarantee Fairness in Collaborative Machine Learning", NeurIPS 2021, Algorithm 1:

    u_i = scale d_i / |d_i|,   u_N = sum_i r_i u_i,   phi_i = cos(u_i, u_N),   r_i <- alpha r_i + (1 - alpha) phi_i

and r is made to sum to 1. Lengths are taken as |d_i| + 1e-7, and no reputation falls below a floor, so that nobody is
shut out for good. As in the authors' code, there is nothing to remember before the first round: its reputations are
phi / sum(phi), whatever weighs the updates in u_N (there, the data shares).

The columns of a matrix in which all rows agree.

A weighted average of k equal numbers is that number, in mathematics; with weights that are rounded it is one next to
it. Weights that nobody trains, and constant buffers, would drift from round to round. Here they are found, so that they
can be put back.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def class_specific_shapley(client_heads: Tensor, server_head: Tensor) -> Tensor:
    """Cosine of every participant's head rows with the aggregate's (eq. 5).

    Args:
        client_heads: ``[k, M, D]``, row j of participant i's head (of its update, or of its weights), bias included or
            not.
        server_head: ``[M, D]``, the same of the aggregate.

    Returns:
        ``[k, M]`` cosines in [-1, 1]; 0 where either row is zero.

    Raises:
        ValueError: the shapes do not fit.

    Example:
        >>> heads = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[0.0, 1.0], [0.0, 0.0]]])
        >>> class_specific_shapley(heads, torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
        tensor([[1., 1.],
                [0., 0.]])
    """
    if client_heads.ndim != 3 or server_head.shape != client_heads.shape[1:]:
        raise ValueError(
            f"expected client_heads [k, M, D] and server_head [M, D], got {list(client_heads.shape)} and "
            f"{list(server_head.shape)}."
        )
    # Normalizing each side by its own largest entry first keeps tiny updates (1e-30) from underflowing when squared.
    clients = torch.nn.functional.normalize(_scaled(client_heads.double()), dim=-1)
    server = torch.nn.functional.normalize(_scaled(server_head.double()), dim=-1)
    return (clients * server).sum(-1).clamp(-1, 1).to(client_heads.dtype)


def participant_weights(cssv: Tensor) -> tuple[Tensor, Tensor]:
    """A participant's contribution, and its share (eq. 6).

    Args:
        cssv: ``[k, M]`` cosines in [-1, 1].

    Returns:
        ``gamma [k]`` in [0, 1], the mean over classes of (1 + cosine)/2, and ``normalized [k]``, which sums to 1. If
        every gamma is 0 the shares are equal.

    Example:
        >>> gamma, share = participant_weights(torch.tensor([[1.0, 1.0], [0.0, -1.0]]))
        >>> gamma, share
        (tensor([1.0000, 0.2500]), tensor([0.8000, 0.2000]))
    """
    gamma = ((1 + cssv) / 2).mean(-1)
    total = gamma.sum()
    share = torch.where(total > 0, gamma / total, 1 / max(len(gamma), 1))
    return gamma, share


def _scaled(rows: Tensor) -> Tensor:
    largest = rows.abs().amax(-1, keepdim=True)
    return rows / largest.where(largest > 0, torch.ones_like(largest))


EPSILON = 1e-7


def normalized(reputation: Tensor) -> Tensor:
    """float64 ``[k]``, reputations that sum to 1.

    Raises:
        ValueError: negative ones, or none above 0.
    """
    reputation = reputation.double()
    if not (reputation >= 0).all() or reputation.sum() == 0:
        raise ValueError(f"reputation={reputation.tolist()}: expected numbers that are not negative, not all 0.")
    return reputation / reputation.sum()


def cosines(products: Tensor, norms: Tensor, norm: Tensor) -> Tensor:
    """phi ``[k]`` in [-1, 1], from d_i . u_N, the |d_i| and |u_N|; 0 where a length is 0.

    Example:
        >>> cosines(torch.tensor([3.0, 0.0]), torch.tensor([2.0, 0.0]), torch.tensor(3.0))
        tensor([0.5000, 0.0000])
    """
    lengths = norms * norm
    return (products / lengths.where(lengths > 0, torch.ones_like(lengths))).clamp(-1, 1)


def updated_reputation(reputation: Tensor | None, phi: Tensor, *, alpha: float = 0.95, floor: float = 1e-3) -> Tensor:
    """The reputations ``[k]`` after a round, which sum to 1: max(alpha r + (1 - alpha) phi, floor), normalized.

    Before the first round, None, r is 0.

    Example:
        >>> updated_reputation(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0]), alpha=0.5)
        tensor([0.7500, 0.2500], dtype=torch.float64)
        >>> updated_reputation(None, torch.tensor([0.6, 0.2]), alpha=0.5)
        tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    memory = 0 if reputation is None else alpha * normalized(reputation)
    after = (memory + (1 - alpha) * phi.double()).clamp_min(floor)
    return after / after.sum()


def cohort_reputation(reputation: Tensor | None, client_ids: Tensor, num_samples: Tensor) -> Tensor:
    """The weights ``[k]`` of a cohort's updates: their reputations before the round.

    Data shares in the first round, as in the authors' code. A participant that joins later starts from the mean of
    those that are known, which the paper, with full participation, has no need to say.

    Args:
        reputation: ``[n]`` of all participants, NaN where there is none yet; None: nobody has one.
        client_ids: ``[k]``, the cohort.
        num_samples: ``[k]`` training samples.

    Example:
        >>> cohort_reputation(None, torch.tensor([0, 2]), torch.tensor([30, 10]))
        tensor([0.7500, 0.2500], dtype=torch.float64)
        >>> held = torch.tensor([0.75, float("nan"), 0.25])
        >>> cohort_reputation(held, torch.tensor([0, 1]), torch.tensor([30, 10]))
        tensor([0.7500, 0.5000], dtype=torch.float64)
    """
    if reputation is None or reputation.isnan().all():
        return num_samples.double() / num_samples.sum()
    known = reputation.double()
    return known.where(~known.isnan(), known.nanmean())[client_ids.to(known.device)]


#: Columns that fit a core's cache; on other devices a block is a launch of kernels.
_BLOCK = 2**16
_DEVICE_BLOCK = 2**22


def common_entries(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of columns, and where in them all rows are equal. Blocks without any such column are left out.

    Where models differ everywhere, as after training, this looks at two rows only.

    Args:
        rows: ``[k, P]``, k at least 1.

    Yields:
        A slice of columns, and bool ``[width]``.

    Example:
        >>> [(block, same.tolist()) for block, same in common_entries(torch.tensor([[1.0, 2.0], [1.0, 3.0]]))]
        [(slice(0, 2, None), [True, False])]
    """
    width = _BLOCK if rows.device.type == "cpu" else _DEVICE_BLOCK
    for begin in range(0, rows.shape[1], width):
        block = slice(begin, min(begin + width, rows.shape[1]))
        first = rows[0, block]
        same = first == first  # all but NaN
        for row in rows[1:]:
            if torch.equal(row[block], first):
                continue
            same &= row[block] == first
            if not same.any():
                break
        else:
            if same.any():
                yield block, same


def keep_common(average: Tensor, rows: Tensor) -> Tensor:
    """Averages ``[..., P]`` of the rows ``[k, P]``, changed in place: where all rows agree they are what those are.

    Example:
        >>> rows = torch.tensor([[0.1], [0.1]])
        >>> keep_common(torch.tensor([0.1000001]), rows).equal(rows[0])
        True
    """
    for block, same in common_entries(rows):
        average[..., block] = rows[0, block].where(same, average[..., block])
    return average
