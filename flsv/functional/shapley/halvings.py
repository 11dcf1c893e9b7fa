"""Halvings: partitions of the players into two halves whose members are unlike.

Each player is in one half, so that training both halves costs one training run of all. Between members of one half the
outputs of their own models shall differ, so that a half knows what its members do not know alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import comb

import torch
from torch import Tensor

from flsv.functional.shapley.mixtures import TINY
from flsv.utilities.seeding import generator_for

#: The most partitions that are all compared. With more, the best are searched for by exchanging players.
MAX_COMPARED = 2**15
#: The number of random partitions from which the search starts.
NUM_STARTS = 32
#: Decimals of a partition's cost. Below them the players' names decide.
COST_DECIMALS = 9


def choose_halvings(
    outputs: Tensor,
    names: Sequence[str],
    count: int = 1,
    *,
    logits: bool,
    seed: int = 0,
) -> Tensor:
    """Choose partitions of the players into two halves, within which outputs are least alike.

    Of each player's outputs the mean over the players is subtracted. A partition costs the sum of the cosines between
    them, over all pairs within its halves. The partitions with the least costs are chosen.

    Args:
        outputs: ``[n, V, ...]``, the outputs of each player's own model for V samples. Of classifiers logits.
        names: the n players' names, by which ties are broken. The order of the players does not matter.
        count: the number of partitions. Fewer if there are not as many.
        logits: whether the outputs are logits, whose probabilities are compared.
        seed: the seed of the search's random numbers, with more than 18 players.

    Returns:
        bool ``[2 * count, n]``, the halves, with n // 2 members and all others. Players alone are left out.

    Raises:
        ValueError: names are missing or not distinct.

    Example:
        >>> outputs = torch.tensor([[4.0, 0], [0, 4], [4, 0], [0, 4]])[:, None]
        >>> choose_halvings(outputs, ["a", "b", "c", "d"], logits=True).int()
        tensor([[1, 1, 0, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
    """
    num_players = len(outputs)
    are_distinct = len(set(names)) == len(names)
    if len(names) != num_players or not are_distinct:
        raise ValueError(f"expected {num_players} distinct names, got {list(names)}.")
    # All is computed in the order of names, and put back into the players' order at the end.
    players_by_name = sorted(range(num_players), key=names.__getitem__)
    order = torch.tensor(players_by_name)
    similarity = output_similarity(outputs[order], logits=logits)

    num_partitions = comb(num_players, num_players // 2) // (2 - num_players % 2)
    if num_partitions <= MAX_COMPARED:
        firsts = _all_first_halves(num_players)
    else:
        firsts = _locally_best_halves(similarity, names=sorted(names), seed=seed)
    costs = _costs(firsts, similarity)
    best = costs.argsort(stable=True)[:count]

    halves = torch.stack(
        [firsts[best], ~firsts[best]],
        1,
    )  # [count, 2, n]
    by_name = halves.flatten(0, 1)
    masks = torch.empty_like(by_name)
    masks[:, order] = by_name
    has_several = masks.sum(1) > 1
    return masks[has_several]


def output_similarity(outputs: Tensor, *, logits: bool) -> Tensor:
    """Compute the cosines ``[n, n]`` between n models' outputs ``[n, V, ...]``, float64, from which their mean is
    subtracted. Of logits the probabilities are compared.
    """
    if logits:
        outputs = outputs.softmax(-1)
    flat_outputs = outputs.flatten(1).double().cpu()
    differences = flat_outputs - flat_outputs.mean(0)
    norms = differences.norm(dim=1, keepdim=True)
    directions = differences / norms.clamp_min(TINY)
    return directions @ directions.T


def _costs(firsts: Tensor, similarity: Tensor) -> Tensor:
    """Compute each partition's sum of cosines within halves."""
    signs = 2 * firsts.double() - 1  # 1 in the first half, -1 in the second
    sums = (signs @ similarity * signs).sum(1)
    return sums.round(decimals=COST_DECIMALS)


def _all_first_halves(num_players: int) -> Tensor:
    """List the halves of n // 2 players, bool ``[P, n]``, for even n those with the first player."""
    size = num_players // 2
    halves = []
    for members in combinations(range(num_players), size):
        is_listed_twice = num_players % 2 == 0
        if is_listed_twice and 0 not in members:
            break
        halves.append(members)
    firsts = torch.zeros(
        len(halves),
        num_players,
        dtype=torch.bool,
    )
    players = torch.tensor(halves, dtype=torch.long)
    return firsts.scatter(1, players, True)


def _locally_best_halves(
    similarity: Tensor,
    names: Sequence[str],
    seed: int,
) -> Tensor:
    """Return partitions that no exchange improves, and the best one's neighbours, bool ``[P, n]``."""
    num_players = len(similarity)
    generator = generator_for(seed, "halvings", *names)
    optima = []
    for _ in range(NUM_STARTS):
        order = torch.randperm(num_players, generator=generator)
        members = order[: num_players // 2]
        half = torch.zeros(num_players, dtype=torch.bool)
        half[members] = True
        optima.append(_local_optimum(half, similarity))

    local_optima = torch.stack(optima)
    costs = _costs(local_optima, similarity)
    best_half = local_optima[int(costs.argmin())]
    halves = torch.cat([local_optima, _exchanges(best_half)])
    if num_players % 2 == 0:
        # Both halves of a partition are of this size. It is listed by the one with the first player.
        has_first_player = halves[:, :1]
        other_halves = ~halves
        halves = torch.where(has_first_player, halves, other_halves)
    return halves.unique(dim=0)


def _local_optimum(half: Tensor, similarity: Tensor) -> Tensor:
    """Exchange two players, as long as that lowers the cost."""
    while True:
        neighbors = _exchanges(half)
        with_itself = torch.cat([half[None], neighbors])
        costs = _costs(with_itself, similarity)
        best = int(costs.argmin())
        if costs[0] <= costs[best]:
            return half
        half = with_itself[best]


def _exchanges(half: Tensor) -> Tensor:
    """Return all partitions that differ by an exchange of two players, bool ``[P, n]``."""
    members = half.nonzero().flatten()
    other_players = (~half).nonzero().flatten()
    exchanges = torch.cartesian_prod(members, other_players)  # [P, 2]
    exchanged = half.repeat(len(exchanges), 1)
    exchanged.scatter_(1, exchanges[:, :1], False)
    return exchanged.scatter_(1, exchanges[:, 1:], True)


def has_halvings(trained: Tensor) -> bool:
    """Return whether ``trained`` contains each player alone and halves, each with all who are not in it. The empty and
    the grand coalition do not matter.
    """
    num_players = trained.shape[1]
    sizes = trained.sum(1)
    is_inner = (sizes > 1) & (sizes < num_players)
    halves = trained[is_inner]
    half_sizes = {num_players // 2, num_players - num_players // 2}
    if not len(halves) or not set(halves.sum(1).tolist()) <= half_sizes:
        return False

    coalitions = {tuple(mask) for mask in trained.tolist()}
    singles = torch.eye(num_players, dtype=torch.bool)
    needed = torch.cat([singles, ~halves])
    return all(tuple(mask) in coalitions for mask in needed.tolist())
