"""Doubts about models that clients say they have trained alone."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flsv.aggregation import FedAvg
from flsv.core import Strategy
from flsv.sampling import FullParticipation
from flsv.sites.coalitions_at_sites import (
    MIN_RELATIVE_DISTANCE,
    CoalitionsAtSites,
    inconsistent_own_models,
)
from flsv.testing.rounds import PreparedRounds
from flsv.testing.samplers import federation_of

#: What client 1 sends as its own move, given all moves [n, P] and noise [P].
LIES = {
    "noise": lambda moves, noise: noise,
    "large noise": lambda moves, noise: 20 * noise,
    "small noise": lambda moves, noise: 0.05 * noise,
    "a copy with noise": lambda moves, noise: moves[2] + 0.01 * noise,
    "a large copy": lambda moves, noise: 5 * moves[2],
    "its opposite": lambda moves, noise: -moves[1],
    "its large opposite": lambda moves, noise: -5 * moves[1],
}


class UnequalClients:
    """Moves and updates of clients, which differ in length by a factor of up to four."""

    def __init__(self, clients, seed):
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

    def normal(self, rows):
        return torch.randn(rows, 1000, generator=self.draw)

    @property
    def model(self):
        return self.updates.mean(0)

    def consistency_warnings(self):
        return inconsistent_own_models(self.moves, torch.zeros(1000), self.model, self.updates)


@pytest.mark.parametrize("clients", [3, 4, 6])
@pytest.mark.parametrize("lie", LIES)
def test_liar_is_inconsistent_and_no_honest_client_is(lie, clients):
    for seed in range(20):
        cohort = UnequalClients(clients, seed)
        assert cohort.consistency_warnings() == {}, seed

        noise = cohort.normal(1)[0]
        false_move = LIES[lie](cohort.moves, noise)
        cohort.moves[1] = false_move
        assert cohort.consistency_warnings().keys() == {1}, seed


def enlarge_own_update(cohort):
    """Its direction is its own, so that this check cannot see it."""
    cohort.moves[1] *= 5


def take_no_part(cohort):
    cohort.moves[1] = 0
    cohort.updates[1] = 0


def lose_replies(cohort):
    """Those to its own coalition's training were lost, and its updates in the federation were not."""
    cohort.moves[1] = 0


@pytest.mark.parametrize("clients", [3, 4, 6])
@pytest.mark.parametrize("change", [enlarge_own_update, take_no_part, lose_replies])
def test_client_that_does_not_lie_is_not_inconsistent_and_makes_no_other_inconsistent(
    change, clients
):
    for seed in range(20):
        cohort = UnequalClients(clients, seed)
        change(cohort)
        assert cohort.consistency_warnings() == {}, seed


def test_own_model_copied_from_the_federation_or_a_client_is_found():
    cohort = UnequalClients(5, seed=0)
    cohort.moves[1] = cohort.model
    cohort.moves[3] = cohort.moves[4]

    assert cohort.consistency_warnings() == {
        1: "its own model is the federation's",
        3: "its own model moves as client 4's updates do",
    }


def test_distance_to_the_federations_model_is_compared_with_the_models_own_way():
    cohort = UnequalClients(2, seed=0)
    direction = torch.nn.functional.normalize(cohort.normal(1)[0], dim=0)

    def is_inconsistent_at(share_of_path):
        path_length = cohort.model.norm()
        cohort.moves[0] = cohort.model + share_of_path * path_length * direction
        return 0 in cohort.consistency_warnings()

    assert is_inconsistent_at(0.9 * MIN_RELATIVE_DISTANCE)
    assert not is_inconsistent_at(1.2 * MIN_RELATIVE_DISTANCE)


def test_two_clients_are_not_compared_with_each_other():
    cohort = UnequalClients(2, seed=0)
    cohort.moves = cohort.moves.flip(0)
    assert cohort.consistency_warnings() == {}


class Counter(Strategy):
    """A strategy with a state."""

    saved = ("count",)

    def __init__(self, count=0):
        self.count = count


def test_coalitions_at_sites_save_strategies_in_the_runs_order():
    """In another process, a resumed server restores them in this order."""
    strategies = {"sampler": FullParticipation(), "aggregator": FedAvg()}
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
    engine = SimpleNamespace(sites_of=lambda state, excluded_from: None)

    coalitions = CoalitionsAtSites(masks, info, engine, memory={}, consistency_warnings=[])
    for coalition in coalitions.state_dict()["coalitions"].values():
        counts = [state["count"] for state in coalition["parts"] if "count" in state]
        assert counts == list(range(8))


def test_client_moves_as_no_other_that_has_sent_no_update():
    cohort = UnequalClients(4, seed=0)
    cohort.updates[2] = 0
    cohort.moves[1] = -cohort.moves[1]
    assert cohort.consistency_warnings()[1] != "its own model moves as client 2's updates do"


def test_federation_of_one_client_so_far_has_that_clients_own_model():
    cohort = UnequalClients(3, seed=0)
    cohort.moves[1] = cohort.model
    moves = cohort.moves, torch.zeros(1000), cohort.model, cohort.updates

    assert inconsistent_own_models(*moves).keys() == {1}
    assert inconsistent_own_models(*moves, torch.tensor([True, False, True])) == {}
