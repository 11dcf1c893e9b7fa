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
        candidates = _all_first_halves(num_players)
    else:
        candidates = _locally_best_halves(similarity, names=sorted(names), seed=seed)
    costs = _costs(candidates, similarity)
    cheapest = costs.argsort(stable=True)[:count]

    first_halves = candidates[cheapest]
    halves = torch.stack([first_halves, ~first_halves], 1)  # [count, 2, n], players by name
    halves = halves.flatten(0, 1)
    masks = torch.empty_like(halves)
    masks[:, order] = halves
    has_several_players = masks.sum(1) > 1
    return masks[has_several_players]


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


def _costs(first_halves: Tensor, similarity: Tensor) -> Tensor:
    """Compute each partition's sum of cosines within halves."""
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
    """Return partitions that no exchange improves, and the best one's neighbours, bool ``[P, n]``."""
    num_players = len(similarity)
    generator = generator_for(seed, "halvings", *names)
    searches = []
    for _ in range(NUM_STARTS):
        order = torch.randperm(num_players, generator=generator)
        members = order[: num_players // 2]
        initial_half = torch.zeros(num_players, dtype=torch.bool)
        initial_half[members] = True
        searches.append(_local_optimum(initial_half, similarity))

    local_optima = torch.stack(searches)
    costs = _costs(local_optima, similarity)
    best_half = local_optima[int(costs.argmin())]
    candidates = torch.cat([local_optima, _exchanges(best_half)])
    if num_players % 2 == 0:
        # Both halves of a partition are of this size. It is listed by the one with the first player.
        has_first_player = candidates[:, :1]
        candidates = torch.where(has_first_player, candidates, ~candidates)
    return candidates.unique(dim=0)


def _local_optimum(half: Tensor, similarity: Tensor) -> Tensor:
    """Exchange two players, as long as that lowers the cost."""
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
    """Return whether ``trained`` contains each player alone and halves, each with all who are not in it. The empty and
    the grand coalition do not matter.
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
