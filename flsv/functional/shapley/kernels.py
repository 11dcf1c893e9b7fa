"""Kernels: how alike the utilities of two coalitions are."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A kernel ``k(num_common, size, other_size)`` of two coalitions S and T: a function of |S n T|, |S| and |T|, float64
tensors that broadcast."""


def membership(num_common: Tensor, size: Tensor, other_size: Tensor) -> Tensor:
    """Return the kernel |S n T| of two coalitions, for additive games."""
    return num_common + 0 * size  # of the shape to which all arguments broadcast


def pairs(num_common: Tensor, size: Tensor, other_size: Tensor) -> Tensor:
    """Return the kernel of two coalitions that is their number of common pairs of players, for games with interactions
    of two players.
    """
    num_pairs = num_common * (num_common - 1) / 2
    return num_pairs + 0 * size  # of the shape to which all arguments broadcast


def averaged_membership(num_common: Tensor, size: Tensor, other_size: Tensor) -> Tensor:
    """Return the kernel |S n T| / (|S| |T|) of two coalitions, or 0 if one is empty. It is for games that are linear in
    the average update.
    """
    product = size * other_size
    kernel = num_common / product.clamp_min(1)
    return kernel.where(product > 0, 0.0)


def gaussian(squared_width: float) -> Kernel:
    """Return the Gaussian kernel exp(-|c_S - c_T|^2 / (2 w)) with the squared width w. Here c_S = z / |S|, with z the
    membership vector of coalition S, and c_S = 0 if S is empty.
    """

    def kernel(num_common: Tensor, size: Tensor, other_size: Tensor) -> Tensor:
        # |c_S - c_T|^2 = |c_S|^2 + |c_T|^2 - 2 c_S . c_T, with |c_S|^2 = 1 / |S|.
        squared_norms = _inverse_size(size) + _inverse_size(other_size)
        product = averaged_membership(num_common, size, other_size)
        squared_distance = squared_norms - 2 * product
        return torch.exp(-squared_distance / (2 * squared_width))

    return kernel


def _inverse_size(size: Tensor) -> Tensor:
    inverse = 1 / size.clamp_min(1)
    return inverse.where(size > 0, 0.0)


def gram(
    kernel: Kernel,
    row_coalitions: Tensor,
    column_coalitions: Tensor,
) -> Tensor:
    """Compute the kernel matrix ``[A, B]`` between ``row_coalitions [A, n]`` and ``column_coalitions [B, n]``."""
    rows = row_coalitions.to(torch.float64)
    columns = column_coalitions.to(torch.float64)
    num_common = rows @ columns.T  # [A, B]
    row_sizes = rows.sum(dim=1)[:, None]  # [A, 1]
    column_sizes = columns.sum(dim=1)[None, :]  # [1, B]
    return kernel(num_common, row_sizes, column_sizes)


def kernel_shapley(kernel: Kernel, coalitions: Tensor) -> Tensor:
    """Compute exact Shapley values ``[B, n]`` of the games S -> k(S, T). There is one game for each T in
    ``coalitions [B, n]``.
    """
    # k depends only on j = |S n T|, s = |S| and t = |T|, so that all members of T have one value, and all others one.
    num_players = coalitions.shape[1]
    sizes = coalitions.sum(dim=1)
    inside = torch.zeros(num_players + 1).double()
    outside = torch.zeros(num_players + 1).double()
    for size in sizes.unique().tolist():
        if size > 0:
            inside[size] = _value_of_player(kernel, num_players, size, num_own=1)
        if size < num_players:
            outside[size] = _value_of_player(kernel, num_players, size, num_own=0)

    value_of_member = inside[sizes].unsqueeze(1)
    value_of_outsider = outside[sizes].unsqueeze(1)
    return torch.where(coalitions, value_of_member, value_of_outsider)


def _value_of_player(
    kernel: Kernel,
    num_players: int,
    size: int,
    num_own: int,
) -> Tensor:
    """Return a player's value in the game S -> k(S, T), where T has ``size`` members. ``num_own`` is 1 if the player is
    one of them, otherwise 0.
    """
    # A player's predecessors in a random order are a uniform coalition of uniform size s, and j of them in T is
    # hypergeometric. With o = num_own the value is
    #  1/n sum_s sum_j C(t-o, j) C(n-1-t+o, s-j) / C(n-1, s) [k(j+o, s+1, t) - k(j, s, t)]
    s = torch.arange(num_players).double()
    s = s.unsqueeze(1)
    t = torch.tensor(size).double()
    j = torch.arange(size + 1).double()
    with_player = kernel(j + num_own, s + 1, t)  # [s, j]
    without_player = kernel(j, s, t)
    probabilities = _hypergeometric(
        num_elements=num_players - 1,
        marked=size - num_own,
        max_hits=size,
    )
    terms = probabilities * (with_player - without_player)
    return terms.sum() / num_players


@lru_cache(maxsize=128)
def _hypergeometric(
    num_elements: int,
    marked: int,
    max_hits: int,
) -> Tensor:
    """Compute probabilities of h ``marked`` elements among d drawn, ``[num_elements + 1, max_hits + 1]``."""
    # The probability of h hits (columns) among d drawn elements (rows), for all numbers of both.
    num_drawn = torch.arange(num_elements + 1).double()
    num_drawn = num_drawn.unsqueeze(1)
    hits = torch.arange(max_hits + 1).double()
    misses = num_drawn - hits  # [drawn, hits]
    unmarked = num_elements - marked
    is_possible = (hits <= marked) & (misses >= 0) & (misses <= unmarked)
    log_probability = (
        _log_choose(marked, hits)
        + _log_choose(unmarked, misses)
        - _log_choose(num_elements, num_drawn)
    )
    return torch.where(is_possible, log_probability.exp(), 0.0)


def _log_choose(n: int, k: Tensor) -> Tensor:
    """Return the logarithm of the binomial coefficient of n and k, which is limited to 0 to n."""
    k = k.clamp(0, n)
    n_plus_1 = torch.tensor(n + 1).double()
    log_factorial = torch.lgamma(n_plus_1)
    log_quotient = log_factorial - torch.lgamma(k + 1)
    return log_quotient - torch.lgamma(n - k + 1)
