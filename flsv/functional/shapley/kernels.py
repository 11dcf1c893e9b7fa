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
    # k depends only on j = |S n T|, s = |S| and t = |T|, so that all members of T have one value, and all others one. A
    # player's predecessors in a random order are a uniform coalition of uniform size s, and j of them in T is
    # hypergeometric:
    #  inside(t) = 1/n sum_s sum_j C(t-1, j) C(n-t, s-j) / C(n-1, s) [k(j+1, s+1, t) - k(j, s, t)]
    #  outside(t) = 1/n sum_s sum_j C(t, j) C(n-1-t, s-j) / C(n-1, s) [k(j, s+1, t) - k(j, s, t)]
    num_players = coalitions.shape[1]
    sizes = coalitions.sum(dim=1)
    inside = torch.zeros(num_players + 1).double()
    outside = torch.zeros(num_players + 1).double()
    s = torch.arange(num_players).double().unsqueeze(1)
    for size in sizes.unique().tolist():
        t = torch.tensor(size).double()
        j = torch.arange(size + 1).double()
        predecessors = kernel(j, s, t)  # [s, j]
        if size < num_players:
            marginal_contribution = kernel(j, s + 1, t) - predecessors
            probability = _hypergeometric(
                num_elements=num_players - 1,
                marked=size,
                max_hits=size,
            )
            outside[size] = (probability * marginal_contribution).sum() / num_players
        if size > 0:
            marginal_contribution = kernel(j + 1, s + 1, t) - predecessors
            probability = _hypergeometric(
                num_elements=num_players - 1,
                marked=size - 1,
                max_hits=size,
            )
            inside[size] = (probability * marginal_contribution).sum() / num_players

    value_of_member = inside[sizes].unsqueeze(1)
    value_of_outsider = outside[sizes].unsqueeze(1)
    return torch.where(coalitions, value_of_member, value_of_outsider)


@lru_cache(maxsize=128)
def _hypergeometric(
    num_elements: int,
    marked: int,
    max_hits: int,
) -> Tensor:
    """Compute probabilities of h ``marked`` elements among d drawn, ``[num_elements + 1, max_hits + 1]``."""
    # The probability of the hits (columns) among the drawn (rows), for all numbers of both.
    numbers = torch.arange(num_elements + 1).double()
    num_drawn = numbers.unsqueeze(1)
    hits = torch.arange(max_hits + 1).double()
    misses = num_drawn - hits  # [drawn, hits]
    unmarked = num_elements - marked
    is_possible = (hits <= marked) & (misses >= 0) & (misses <= unmarked)
    log_factorial = torch.lgamma(numbers + 1)

    def log_choose(n: int, k: Tensor) -> Tensor:
        k = k.clamp(0, n).long()
        log_quotient = log_factorial[n] - log_factorial[k]
        return log_quotient - log_factorial[n - k]

    log_probability = (
        log_choose(marked, hits)
        + log_choose(unmarked, misses)
        - log_choose(num_elements, num_drawn)
    )
    return torch.where(is_possible, log_probability.exp(), 0.0)
