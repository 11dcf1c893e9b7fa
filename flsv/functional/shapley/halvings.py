"""Halvings: partitions of the players into two complementary coalitions ("halves") with dissimilar members.

Each player is in one half, so training both halves costs as much as training the grand coalition. The outputs of the
own models of a half's members should differ, so that the half is better than its members alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import comb

import torch
from torch import Tensor

from flsv.functional.shapley.mixtures import TINY
from flsv.utilities.seeding import generator_for

#: Up to this number all partitions are compared. Otherwise the best are searched by exchanging players.
MAX_COMPARED = 2**15
#: The number of random partitions from which the search starts.
NUM_STARTS = 32
#: Decimals to which costs of partitions are rounded. Equal costs are sorted by the players' names.
COST_DECIMALS = 9


def choose_halvings(
    outputs: Tensor,
    names: Sequence[str],
    count: int = 1,
    *,
    logits: bool,
    seed: int = 0,
) -> Tensor:
    """Choose partitions of the players into two halves within which outputs are least similar.

    The mean over the players is subtracted from the outputs. A partition's cost is the sum of the cosines between
    outputs, over all pairs of players in the same half. The partitions with the lowest costs are chosen.

    Args:
        outputs: ``[n, V, ...]``, the outputs of each player's own model for V samples, for classifiers logits.
        names: the n players' names, by which ties are broken. The order of the players does not matter.
        count: the number of partitions, or fewer if there are not as many.
        logits: whether the outputs are logits, whose probabilities are compared.
        seed: the seed of the search's random numbers, with more than 18 players.

    Returns:
        bool ``[2 * count, n]``, the halves of each partition, without halves of one player.

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
        raise ValueError(f"expected {num_players} distinct names, but got {list(names)}.")
    # The computation uses the order of names. The result is in the players' order.
    players_by_name = sorted(range(num_players), key=names.__getitem__)
    order = torch.tensor(players_by_name)
    similarity = output_similarity(outputs[order], logits=logits)
    candidates = _candidates(similarity, sorted(names), seed)
    costs = _costs(candidates, similarity)
    cheapest = costs.argsort(stable=True)[:count]

    first_halves = candidates[cheapest]
    halves = torch.stack([first_halves, ~first_halves], 1)  # [count, 2, n], players by name
    halves = halves.flatten(0, 1)
    masks = torch.empty_like(halves)
    masks[:, order] = halves
    has_several_players = masks.sum(1) > 1
    return masks[has_several_players]


def _candidates(
    similarity: Tensor,
    names: Sequence[str],
    seed: int,
) -> Tensor:
    """Return the halves to compare, bool ``[P, n]``: all, or the best that are found if there are too many."""
    num_players = len(names)
    num_partitions = comb(num_players, num_players // 2) // (2 - num_players % 2)
    if num_partitions <= MAX_COMPARED:
        return _all_first_halves(num_players)
    return _locally_best_halves(similarity, names, seed)


def output_similarity(outputs: Tensor, *, logits: bool) -> Tensor:
    """Compute the cosines ``[n, n]``, float64, between n models' outputs ``[n, V, ...]`` minus their mean. Logits are
    converted to probabilities.
    """
    if logits:
        outputs = outputs.softmax(-1)
    flat_outputs = outputs.flatten(1).double().cpu()
    differences = flat_outputs - flat_outputs.mean(0)
    norms = differences.norm(dim=1, keepdim=True)
    directions = differences / norms.clamp_min(TINY)
    return directions @ directions.T


def _costs(first_halves: Tensor, similarity: Tensor) -> Tensor:
    signs = 2 * first_halves.double() - 1  # 1 in the first half, -1 in the second
    sums = (signs @ similarity * signs).sum(1)
    return sums.round(decimals=COST_DECIMALS)


def _all_first_halves(num_players: int) -> Tensor:
    """List the halves of n // 2 players, bool ``[P, n]``, for even n those with the first player."""
    size = num_players // 2
    members_of_halves = []
    for members in combinations(range(num_players), size):
        is_listed_twice = num_players % 2 == 0
        if is_listed_twice and 0 not in members:
            break
        members_of_halves.append(members)
    first_halves = torch.zeros(len(members_of_halves), num_players, dtype=torch.bool)
    players = torch.tensor(members_of_halves, dtype=torch.long)
    return first_halves.scatter(1, players, value=True)


def _locally_best_halves(
    similarity: Tensor,
    names: Sequence[str],
    seed: int,
) -> Tensor:
    """Return partitions that no exchange of two players improves, and the best one's neighbors, bool ``[P, n]``."""
    num_players = len(similarity)
    generator = generator_for(seed, "halvings", *names)
    searches = []
    for _ in range(NUM_STARTS):
        initial_half = torch.zeros(num_players, dtype=torch.bool)
        order = torch.randperm(num_players, generator=generator)
        initial_half[order[: num_players // 2]] = True
        searches.append(_local_optimum(initial_half, similarity))

    local_optima = torch.stack(searches)
    best_half = local_optima[_costs(local_optima, similarity).argmin()]
    candidates = torch.cat([local_optima, _exchanges(best_half)])
    if num_players % 2 == 0:
        # Both halves of a partition have this size. It is represented by the half with the first player.
        has_first_player = candidates[:, :1]
        candidates = torch.where(has_first_player, candidates, ~candidates)
    return candidates.unique(dim=0)


def _local_optimum(half: Tensor, similarity: Tensor) -> Tensor:
    """Exchange two players as long as this lowers the cost."""
    while True:
        neighbors = _exchanges(half)
        candidates = torch.cat([half[None], neighbors])
        costs = _costs(candidates, similarity)
        cheapest = int(costs.argmin())
        if costs[0] <= costs[cheapest]:
            return half
        half = candidates[cheapest]


def _exchanges(half: Tensor) -> Tensor:
    """Return all partitions that differ by an exchange of two players, bool ``[P, n]``."""
    members = half.nonzero().flatten()
    other_players = (~half).nonzero().flatten()
    exchanges = torch.cartesian_prod(members, other_players)  # [P, 2]
    leaving = exchanges[:, :1]
    joining = exchanges[:, 1:]
    neighbors = half.repeat(len(exchanges), 1)
    neighbors.scatter_(1, leaving, value=False)
    return neighbors.scatter_(1, joining, value=True)


def has_halvings(trained: Tensor) -> bool:
    """Return whether ``trained`` consists of each player alone, and of halves with their complements. The empty and the
    grand coalition are ignored.
    """
    num_players = trained.shape[1]
    sizes = trained.sum(1)
    is_inner = (sizes > 1) & (sizes < num_players)
    halves = trained[is_inner]
    half_sizes = {num_players // 2, num_players - num_players // 2}
    sizes_of_inner = set(halves.sum(1).tolist())
    if not len(halves) or not sizes_of_inner <= half_sizes:
        return False

    coalitions = {tuple(mask) for mask in trained.tolist()}
    singles = torch.eye(num_players, dtype=torch.bool)
    required = torch.cat([singles, ~halves])
    return all(tuple(mask) in coalitions for mask in required.tolist())
