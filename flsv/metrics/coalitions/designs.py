"""Sets of coalitions whose models ShadowShapley trains: their names, their members and the cost of training them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import comb

import torch
from torch import Tensor

from flsv.functional import few_coalitions
from flsv.functional.shapley.few_coalitions import Which
from flsv.utilities.errors import ConfigurationError

#: A set of coalitions: the name of a design of :func:`flsv.functional.few_coalitions`, or each coalition's members.
Coalitions = Which | Sequence[Sequence[int]]
#: Designs, from the most accurate to the cheapest, and the coalition sizes that each contains completely, as a function
#: of the number n of clients.
DESIGNS: Mapping[Which, Callable[[int], Iterable[int]]] = {
    "all": lambda n: range(1, n),
    "pairs+leave-two-out": lambda n: {1, 2, n - 2, n - 1},
    "pairs+leave-one-out": lambda n: {1, 2, n - 1},
    "both": lambda n: {1, n - 1},
    "singles": lambda n: {1},
}


def design_within(max_fits: float, num_clients: int, cohort: float | None = None) -> Which:
    """Return the most accurate design that costs at most ``max_fits`` fits of the whole federation."""

    def cost(which: Which) -> float:
        sizes = [size for size in DESIGNS[which](num_clients) if 0 < size < num_clients]
        return sum(comb(num_clients, size) * min(size, drawn) for size in sizes) / drawn

    drawn = num_clients if cohort is None else cohort
    return next((which for which in DESIGNS if cost(which) <= max_fits), "singles")


def fits_of(masks: Tensor, cohort: float | None = None) -> float:
    """Compute the cost of training coalitions ``[K, n]``, in fits of the whole federation."""
    # In a round a coalition trains as many clients as the run does, or all its members if it has fewer.
    sizes, n = masks.sum(1), masks.shape[1]
    drawn = n if cohort is None else cohort
    return float(sizes[sizes < n].double().clamp_max(drawn).sum()) / drawn


def coalition_masks(coalitions: Coalitions, num_clients: int) -> Tensor:
    """Make the masks ``[K, n]`` of the empty, the full and the named coalitions."""
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
