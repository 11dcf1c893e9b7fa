"""Sets of coalitions of which ShadowShapley trains models: their names, their members and what training them costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import comb

import torch
from torch import Tensor

from flsv.functional import few_coalitions
from flsv.functional.shapley.few_coalitions import Which
from flsv.utilities.errors import ConfigurationError

#: A set of coalitions: its name, or the members of each.
Coalitions = Which | Sequence[Sequence[int]]
#: Sets of coalitions, from the most accurate to the cheapest, by the sizes of which they have all coalitions.
DESIGNS: Mapping[Which, Callable[[int], Iterable[int]]] = {
    "all": lambda n: range(1, n),
    "pairs+leave-two-out": lambda n: {1, 2, n - 2, n - 1},
    "pairs+leave-one-out": lambda n: {1, 2, n - 1},
    "both": lambda n: {1, n - 1},
    "singles": lambda n: {1},
}


def design_within(max_fits: float, num_clients: int, cohort: float | None = None) -> Which:
    """Return the name of the set of coalitions that gives the most accurate values at a cost of at most ``max_fits``
    fits of the federation, if each coalition is trained by a fit of its own.

    Args:
        max_fits: the largest cost.
        num_clients: the number of clients.
        cohort: the number of clients that the sampler draws for a round; None: all.

    Example:
        >>> [design_within(10, clients) for clients in (4, 5, 6, 11)]
        ['all', 'pairs+leave-one-out', 'both', 'singles']
        >>> design_within(10, 5, cohort=2)
        'both'
    """

    def cost(which: Which) -> float:
        sizes = [size for size in DESIGNS[which](num_clients) if 0 < size < num_clients]
        return sum(comb(num_clients, size) * min(size, drawn) for size in sizes) / drawn

    drawn = num_clients if cohort is None else cohort
    return next((which for which in DESIGNS if cost(which) <= max_fits), "singles")


def fits_of(masks: Tensor, cohort: float | None = None) -> float:
    """Compute the cost of training the coalitions ``masks``, bool ``[K, n]``, in fits of the whole federation: in a
    round a coalition trains as many clients as the run, or all its members. The empty and the full coalition are free.

    Args:
        masks: the members of each coalition.
        cohort: the number of clients that the sampler draws for a round; None: all.

    Example:
        >>> fits_of(coalition_masks("all", 5))
        15.0
        >>> fits_of(coalition_masks("all", 5), cohort=2)
        27.5
    """
    sizes, n = masks.sum(1), masks.shape[1]
    drawn = n if cohort is None else cohort
    return float(sizes[sizes < n].double().clamp_max(drawn).sum()) / drawn


def coalition_masks(coalitions: Coalitions, num_clients: int) -> Tensor:
    """Make the masks of the empty coalition, the full coalition and those that ``coalitions`` names, bool ``[K, n]``.

    Args:
        coalitions: a name that :func:`flsv.functional.few_coalitions` takes, or a list of the members of each
            coalition.
        num_clients: n.

    Raises:
        ConfigurationError: the name is unknown, or a client does not exist.

    Example:
        >>> coalition_masks([[0], [2, 0]], 3).int().tolist()
        [[0, 0, 0], [1, 1, 1], [1, 0, 0], [1, 0, 1]]
    """
    if isinstance(coalitions, str):
        return few_coalitions(num_clients, coalitions)
    masks = [[False] * num_clients, [True] * num_clients]
    for members in coalitions:
        strange = [member for member in members if member not in range(num_clients)]
        if strange:
            raise ConfigurationError(
                f"ShadowShapley(coalitions=...): {list(members)} names clients {strange}, and the federation has 0 to "
                f"{num_clients - 1}."
            )
        mask = [client in members for client in range(num_clients)]
        if mask not in masks:
            masks.append(mask)
    return torch.tensor(masks)
