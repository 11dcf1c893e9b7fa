"""Contributions by slopes of the validation loss and directions of updates, alone and blended with games.

Gradient agreement: how much clients' updates lower the validation loss, and how far they agree with the federation.

Ours, from two that fail in different places. The slope of the validation loss along a client's update, times the
client's samples and summed over rounds, is the first-order federated Shapley value with fixed weights (for one sample
as the player, the first-order term of Wang et al., "Data Shapley in One Training Run", ICLR 2025). It sees bad data and
is weaker where clients differ in their mixture of classes. The cosine of an update with the federation's (Xu et al.,
CGSV, NeurIPS 2021), times samples, follows sizes and mixtures, and hardly sees noise on the inputs. Half of each
correlates with retrained Shapley values better than either: ``docs/benchmark.md``.

Combines gradient agreement with a coalition game: four parts that fail in different situations.

Ours. Two are those of :mod:`flsv.functional.gradient_agreement`: slopes of the validation loss times samples, summed
over rounds, and cosines with everybody's update times samples. Two see what these do not:

- the slope per length of the update, with every round's of one size. Early rounds take most off the loss, so that a sum
  of slopes says who moves a new model fast; late rounds say whose data a trained one still needs;
- the Banzhaf values (Wang and Jia, "Data Banzhaf", AISTATS 2023) of the rounds' games, which measure the performance
  that is asked for, and in which a client may harm. Early rounds count most there (Guo et al., Sensors 24(15), 2024).

What was tried, and what each part brings: ``docs/benchmark.md``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.arguments import check_number


def gradient_agreement(descent: Tensor, agreement: Tensor, blend: float = 0.5) -> Tensor:
    r"""Shares of two kinds, blended.

    .. math::
        \phi_i = (1 - b) \frac{\max(u_i, 0)}{\sum_j \max(u_j, 0)} + b \frac{\max(a_i, 0)}{\sum_j \max(a_j, 0)}

    Args:
        descent: ``[n]``, u: what the clients' updates take off the validation loss, to first order, in nats. NaN for
            clients never seen.
        agreement: ``[n]``, a: samples times the mean cosine with the federation's update; NaN for the same.
        blend: b in [0, 1].

    Returns:
        float64 ``[n]``, which sums to 1; NaN for clients never seen. Where nobody has a positive number of one kind,
        the other counts alone; where of neither, all have 0.

    Raises:
        ValueError: shapes that do not fit, ``blend`` out of range.

    Example:
        >>> gradient_agreement(torch.tensor([3.0, 1.0, -2.0]), torch.tensor([10.0, 20.0, 10.0]))
        tensor([0.5000, 0.3750, 0.1250], dtype=torch.float64)
    """
    parts, weights, totals = _weighed(descent, agreement, blend)
    return (weights * (parts / totals)).sum(0)


def agreement_scales(descent: Tensor, agreement: Tensor, blend: float = 0.5) -> Tensor:
    """The factors of u and a in :func:`gradient_agreement` where they are positive, float64 ``[2]``; arguments as
    there."""
    _, weights, totals = _weighed(descent, agreement, blend)
    return (weights / totals).squeeze(1)


def _weighed(descent: Tensor, agreement: Tensor, blend: float) -> tuple[Tensor, Tensor, Tensor]:
    """Both parts' positive numbers ``[2, n]``, weights ``[2, 1]`` that sum to 1, and what each is divided by."""
    check_number("gradient_agreement", "blend", blend, least=0, most=1)
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


#: Weights of slopes, of slopes per length, and of agreement; that of the game is an argument.
PARTS = 3


def gradient_agreement_game(
    descent: Tensor, relative: Tensor, agreement: Tensor, game: Tensor, game_weight: float = 0.5
) -> Tensor:
    r"""Four kinds of shares, blended.

    .. math::
        \phi_i = \frac1{3 + w} \left( \frac{\max(u_i, 0)}{\sum_j \max(u_j, 0)} + \frac{r_i}{\sum_j |r_j|}
            + \frac{\max(a_i, 0)}{\sum_j \max(a_j, 0)} + w \frac{b_i}{\sum_j |b_j|} \right)

    Args:
        descent: ``[n]``, u: samples times the slopes along the client's updates, summed. NaN for clients never seen,
            as in all.
        relative: ``[n]``, r: samples times the mean of the slopes per length, each round's made to one size.
        agreement: ``[n]``, a: samples times the mean cosine with the federation's update.
        game: ``[n]``, b: values of the rounds' games.
        game_weight: w, at least 0.

    Returns:
        float64 ``[n]`` in -(1 + w)/(3 + w) to 1, NaN for clients never seen. A part in which everybody has 0 counts 0.

    Raises:
        ValueError: shapes that do not fit, ``game_weight`` out of range.

    Example:
        >>> u, r, a = torch.tensor([3.0, 1.0, -2.0]), torch.tensor([2.0, 1.0, -1.0]), torch.tensor([10.0, 20.0, 10.0])
        >>> gradient_agreement_game(u, r, a, torch.tensor([0.5, 0.25, -0.25]), game_weight=1.0)
        tensor([ 0.5000,  0.3125, -0.0625], dtype=torch.float64)
    """
    scales = part_scales(descent, relative, agreement, game, game_weight)
    parts = torch.stack([descent.clamp(min=0), relative, agreement.clamp(min=0), game]).double()
    return (scales[:, None] * parts).sum(0)


def part_scales(descent: Tensor, relative: Tensor, agreement: Tensor, game: Tensor, game_weight: float = 0.5) -> Tensor:
    """The factors of the parts in :func:`gradient_agreement_game`, float64 ``[4]``; arguments as there."""
    check_number("gradient_agreement_game", "game_weight", game_weight, least=0)
    parts = (descent, relative, agreement, game)
    if descent.ndim != 1 or any(part.shape != descent.shape for part in parts):
        raise ValueError(f"expected four vectors [n], got {', '.join(str(list(part.shape)) for part in parts)}.")
    sizes = torch.stack([descent.clamp(min=0), relative.abs(), agreement.clamp(min=0), game.abs()]).double().nansum(1)
    weights = sizes.new_tensor([1.0, 1.0, 1.0, game_weight]) / (PARTS + game_weight)
    return weights * (sizes > 0) / sizes.where(sizes > 0, torch.ones_like(sizes))


def relative_slopes(slopes: Tensor, lengths: Tensor) -> Tensor:
    r"""A round's slopes per length of the update, made to a mean size of 1.

    .. math:: v_i = \frac{s_i / |d_i|}{\frac1k \sum_j |s_j| / |d_j|}

    Args:
        slopes: ``[k]``, s, along the clients' updates.
        lengths: ``[k]``, of the updates; who sends nothing has 0.

    Returns:
        float64 ``[k]``; 0 where all slopes are 0.

    Example:
        >>> relative_slopes(torch.tensor([-4.0, -1.0, 0.0]), torch.tensor([2.0, 0.5, 0.0]))
        tensor([-1.5000, -1.5000,  0.0000], dtype=torch.float64)
    """
    slopes, lengths = slopes.double(), lengths.to(slopes.device).double()
    per_length = (slopes / lengths.where(lengths > 0, torch.ones_like(lengths))) * (lengths > 0)
    size = per_length.abs().mean()
    return per_length / size.where(size > 0, torch.ones_like(size))
