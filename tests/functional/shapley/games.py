"""Games with known Shapley values, an independent reference, and a utility that watches what is asked of it."""

import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import Generator, Tensor

Game = Callable[[Tensor], Tensor]


def make_generator(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def make_table_game(table: Tensor) -> Game:
    """Look utilities up: row b of ``table [2^n]`` or ``[2^n, M]`` belongs to the coalition with bitmask b."""
    powers = 2.0 ** torch.arange(len(table).bit_length() - 1, dtype=torch.float64)
    return lambda masks: table[(masks.to(torch.float64) @ powers).long()]


def make_random_table(num_players: int, seed: int = 0, columns: int | None = None) -> Tensor:
    shape = (2**num_players,) if columns is None else (2**num_players, columns)
    return torch.rand(*shape, generator=make_generator(seed), dtype=torch.float64)


def make_accuracy_table(num_players: int, seed: int = 0) -> Tensor:
    """Like a round of federated learning: coalitions average updates, accuracy saturates and is read off 500 images."""
    generator = make_generator(seed)
    updates = torch.randn(num_players, 6, generator=generator, dtype=torch.float64) * 0.7 + 0.5
    masks = ((torch.arange(2**num_players)[:, None] >> torch.arange(num_players)) & 1).double()
    model = masks @ updates / masks.sum(dim=1, keepdim=True).clamp_min(1)
    accuracy = 0.9 * torch.exp(-(model - 0.6).square().sum(dim=1) / 3)

    return (
        (accuracy + 0.01 * torch.randn(len(accuracy), generator=generator, dtype=torch.float64))
        * 500
    ).round() / 500


def shapley_by_all_orders(table: Tensor) -> np.ndarray:
    """The mean marginal contribution over all n! orders, one by one."""
    values = table.numpy()
    n = len(values).bit_length() - 1
    total = np.zeros((n, *values.shape[1:]))
    orders = list(itertools.permutations(range(n)))
    for order in orders:
        coalition = 0
        for player in order:
            joined = coalition | 1 << player
            total[player] += values[joined] - values[coalition]
            coalition = joined

    return total / len(orders)


def make_closed_form_games(n: int) -> dict[str, tuple[Game, Tensor]]:
    """Name -> utility and Shapley values."""
    weights = torch.linspace(-1, 2, n, dtype=torch.float64)
    costs = torch.arange(1, n + 1, dtype=torch.float64) ** 2
    steps = costs.diff(prepend=torch.zeros(1, dtype=torch.float64)) / torch.arange(n, 0, -1)
    glove = torch.full((n,), 1 / (n * (n - 1)) if n > 1 else 0.0, dtype=torch.float64)
    glove[0] = (n - 1) / n

    return {
        "additive": (lambda masks: masks.double() @ weights + 3, weights),
        "glove": (lambda masks: (masks[:, 0] & masks[:, 1:].any(dim=1)).double(), glove),
        "airport": (lambda masks: (masks * costs).amax(dim=1), steps.cumsum(0)),
        "majority": (
            lambda masks: (masks.sum(dim=1) > n / 2).double(),
            torch.full((n,), 1 / n, dtype=torch.float64),
        ),
        "symmetric": (
            lambda masks: masks.sum(dim=1).double() ** 2,
            torch.full((n,), float(n), dtype=torch.float64),
        ),
        "constant": (
            lambda masks: torch.full((len(masks),), 0.3),
            torch.zeros(n, dtype=torch.float64),
        ),
    }


class Watched:
    """A utility that counts, and fails when a coalition is asked for twice."""

    def __init__(self, utility: Game) -> None:
        self.utility = utility
        self.coalitions: set[tuple[bool, ...]] = set()

    def __call__(self, masks: Tensor) -> Tensor:
        assert masks.dtype == torch.bool

        rows = [tuple(row) for row in masks.tolist()]
        assert len(set(rows)) == len(rows), "the same coalition twice in one call"
        assert not self.coalitions.intersection(rows), "a coalition that was evaluated before"

        self.coalitions.update(rows)
        return self.utility(masks)
