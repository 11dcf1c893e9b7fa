"""Games with known Shapley values, an independent reference, and a utility that watches what is asked of it."""

import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from helpers import make_generator

Game = Callable[[Tensor], Tensor]


def make_table_game(table):
    """Look utilities up: row b of ``table [2^n]`` or ``[2^n, M]`` belongs to the coalition with bitmask b."""
    powers = 2.0 ** torch.arange(len(table).bit_length() - 1, dtype=torch.float64)
    return lambda masks: table[(masks.to(torch.float64) @ powers).long()]


def make_random_table(num_players, seed=0, columns=None):
    shape = (2**num_players,) if columns is None else (2**num_players, columns)
    return torch.rand(*shape, generator=make_generator(seed), dtype=torch.float64)


#: The game of :func:`make_accuracy_table`: a network's accuracy falls with the distance to the best parameters.
BEST_PARAMETER = 0.6
HIGHEST_ACCURACY = 0.9
NUM_TEST_IMAGES = 500


def make_accuracy_table(num_players, seed=0):
    """Like a round of federated learning: coalitions average updates, accuracy saturates and is read off 500 images."""
    generator = make_generator(seed)
    deviations = torch.randn(
        num_players,
        6,
        generator=generator,
        dtype=torch.float64,
    )
    updates = deviations * 0.7 + 0.5  # around a point near the best parameters

    # Bit i of a coalition's number stands for player i.
    numbers = torch.arange(2**num_players)[:, None]
    bits = numbers >> torch.arange(num_players)
    masks = (bits & 1).double()
    sizes = masks.sum(dim=1, keepdim=True).clamp_min(1)
    models = masks @ updates / sizes  # [2^n, 6]

    distances = models - BEST_PARAMETER
    squared_distances = distances.square().sum(dim=1)
    accuracy = HIGHEST_ACCURACY * torch.exp(-squared_distances / 3)
    noise = torch.randn(
        len(accuracy),
        generator=generator,
        dtype=torch.float64,
    )
    noisy_accuracy = accuracy + 0.01 * noise
    num_right = (noisy_accuracy * NUM_TEST_IMAGES).round()
    return num_right / NUM_TEST_IMAGES


def shapley_by_all_orders(table):
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


def make_closed_form_games(n):
    """Name -> utility and Shapley values."""
    weights = torch.linspace(-1, 2, n, dtype=torch.float64)
    players = torch.arange(1, n + 1, dtype=torch.float64)
    costs = players**2

    def add(masks):
        return masks.double() @ weights + 3

    def make_pair_of_gloves(masks):
        # Player 0 has the only left glove.
        has_left = masks[:, 0]
        has_right = masks[:, 1:].any(dim=1)
        return (has_left & has_right).double()

    def build_runway(masks):
        # A runway costs what its largest plane needs.
        return (masks * costs).amax(dim=1)

    def stay_constant(masks):
        return torch.full((len(masks),), 0.3)

    # Each right glove counts only where it is the first of them after the left one: 1 / (n (n - 1)).
    glove_values = torch.zeros(n, dtype=torch.float64)
    if n > 1:
        glove_values[:] = 1 / (n * (n - 1))
    glove_values[0] = (n - 1) / n

    # Each further piece of the runway is shared by those who need it.
    no_cost = torch.zeros(1, dtype=torch.float64)
    pieces = costs.diff(prepend=no_cost)
    num_users = torch.arange(n, 0, -1)
    airport_values = (pieces / num_users).cumsum(0)

    return {
        "additive": (add, weights),
        "glove": (make_pair_of_gloves, glove_values),
        "airport": (build_runway, airport_values),
        "constant": (stay_constant, torch.zeros(n, dtype=torch.float64)),
    }


class Watched:
    """A utility that counts, and fails when a coalition is asked for twice."""

    def __init__(self, utility):
        self.utility = utility
        self.coalitions = set()

    def __call__(self, masks):
        assert masks.dtype == torch.bool

        rows = [tuple(row) for row in masks.tolist()]
        assert len(set(rows)) == len(rows), "the same coalition twice in one call"
        assert not self.coalitions.intersection(rows), "a coalition that was evaluated before"

        self.coalitions.update(rows)
        return self.utility(masks)
