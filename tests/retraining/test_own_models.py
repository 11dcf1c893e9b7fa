"""Doubts about models that clients say they have trained alone."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flsv.aggregation import FedAvg
from flsv.core import Strategy
from flsv.retraining.coalitions_at_sites import (
    MIN_RELATIVE_DISTANCE,
    CoalitionsAtSites,
    doubtful_own_models,
)
from flsv.sampling import FullParticipation
from flsv.testing.rounds import PreparedRounds
from flsv.testing.samplers import federation_of


class ModelsOfClients(NamedTuple):
    """The arguments of :func:`doubtful_own_models`, of n clients and P parameters."""

    own_models: Tensor  # [n, P], each trained by one client alone
    initial: Tensor  # [P]
    model: Tensor  # [P], the federation's
    updates: Tensor  # [n, P], sums over rounds


def make_honest_models(num_clients: int = 5, size: int = 400) -> ModelsOfClients:
    draw = torch.Generator().manual_seed(0)
    common_move = torch.randn(size, generator=draw)
    initial = torch.randn(size, generator=draw)
    moves = common_move + 0.7 * torch.randn(num_clients, size, generator=draw)
    updates = 0.8 * moves + 0.2 * torch.randn(num_clients, size, generator=draw)
    return ModelsOfClients(
        own_models=initial + moves,
        initial=initial,
        model=initial + moves.mean(0),
        updates=updates,
    )


def test_own_models_of_honest_clients_are_not_doubted():
    assert doubtful_own_models(*make_honest_models()) == {}


# What client 1 sends as its own move, given all moves [n, P] and noise [P].


def noise_alone(moves: Tensor, noise: Tensor) -> Tensor:
    return noise


def large_noise(moves: Tensor, noise: Tensor) -> Tensor:
    return 20 * noise


def small_noise(moves: Tensor, noise: Tensor) -> Tensor:
    return 0.05 * noise


def copy_with_noise(moves: Tensor, noise: Tensor) -> Tensor:
    return moves[2] + 0.01 * noise


def large_copy(moves: Tensor, noise: Tensor) -> Tensor:
    return 5 * moves[2]


def opposite(moves: Tensor, noise: Tensor) -> Tensor:
    return -moves[1]


def large_opposite(moves: Tensor, noise: Tensor) -> Tensor:
    return -5 * moves[1]


LIES = [
    noise_alone,
    large_noise,
    small_noise,
    copy_with_noise,
    large_copy,
    opposite,
    large_opposite,
]


class UnequalClients:
    """Moves and updates of clients, which differ in length by a factor of up to four."""

    def __init__(self, clients: int, seed: int):
        self.draw = torch.Generator().manual_seed(seed)
        length = torch.rand(clients, 1, generator=self.draw)
        length = 0.5 + 1.5 * length
        common = self.normal(1)
        specific = 0.5 * self.normal(clients)

        noise = 0.3 * self.normal(clients)
        directions = common + specific + noise
        self.updates = length * directions

        noise = 0.3 * self.normal(clients)
        directions = common + 1.5 * specific + noise
        self.moves = length * directions

    def normal(self, rows: int) -> Tensor:
        return torch.randn(rows, 1000, generator=self.draw)

    def doubtful(self) -> list[int]:
        initial = torch.zeros(1000)
        model = self.updates.mean(0)
        reasons = doubtful_own_models(self.moves, initial, model, self.updates)
        return list(reasons)


@pytest.mark.parametrize("clients", [3, 4, 6])
@pytest.mark.parametrize("lie", LIES)
def test_liar_is_doubted_and_no_honest_client_is(lie, clients):
    for seed in range(20):
        cohort = UnequalClients(clients, seed)
        assert cohort.doubtful() == [], seed

        noise = cohort.normal(1)[0]
        false_move = lie(cohort.moves, noise)
        cohort.moves[1] = false_move
        assert cohort.doubtful() == [1], seed


def test_enlarged_own_update_makes_no_honest_client_doubtful():
    """Its direction is its own, so that this check cannot see it."""
    for seed in range(20):
        cohort = UnequalClients(4, seed)
        cohort.moves[1] *= 5
        assert cohort.doubtful() == [], seed


def test_client_that_never_took_part_is_not_doubted():
    cohort = UnequalClients(4, seed=0)
    cohort.moves[3] = 0
    cohort.updates[3] = 0
    assert cohort.doubtful() == []


def test_own_model_copied_from_the_federation_or_a_client_is_found():
    models = make_honest_models()
    models.own_models[1] = models.model
    models.own_models[3] = models.own_models[4]

    assert doubtful_own_models(*models) == {
        1: "its own model is the federation's",
        3: "its own model moves as client 4's updates do",
    }


def test_distance_to_the_federations_model_is_compared_with_the_models_own_way():
    own_models, initial, model, updates = make_honest_models()
    path_length = (model - initial).norm()
    noise = torch.randn(own_models.shape[1], generator=torch.Generator().manual_seed(1))
    direction = torch.nn.functional.normalize(noise, dim=0)

    def is_doubtful_at(share_of_path: float) -> bool:
        own_models[0] = model + share_of_path * path_length * direction
        return 0 in doubtful_own_models(own_models[:2], initial, model, updates[:2])

    assert is_doubtful_at(0.9 * MIN_RELATIVE_DISTANCE)
    assert not is_doubtful_at(1.2 * MIN_RELATIVE_DISTANCE)


def test_two_clients_are_not_compared_with_each_other():
    models = make_honest_models(num_clients=2)
    swapped = models._replace(own_models=models.own_models.flip(0))
    assert doubtful_own_models(*swapped) == {}


class Counter(Strategy):
    """A strategy with a state."""

    saved = ("count",)

    def __init__(self, count: int = 0):
        self.count = count


def test_coalitions_at_sites_save_strategies_in_the_runs_order():
    """In another process, a resumed server restores them in this order."""
    strategies: dict[str, Any] = {"sampler": FullParticipation(), "aggregator": FedAvg()}
    for number in range(8):
        strategies[f"counter {number}"] = Counter(number)

    masks = torch.tensor(
        [
            [False, False],
            [True, True],
            [True, False],
            [False, True],
        ]
    )
    info = replace(federation_of(PreparedRounds(), num_clients=2), strategies=strategies)
    engine: Any = SimpleNamespace(sites_of=lambda state, left_out_of: None)

    coalitions = CoalitionsAtSites(masks, info, engine, memory={}, doubts=[])
    for coalition in coalitions.state_dict()["coalitions"].values():
        counts = [state["count"] for state in coalition["parts"] if "count" in state]
        assert counts == list(range(8))
