"""Consistency checks of the models that clients say they have trained alone."""

from dataclasses import replace

import pytest
import torch

from flsv.aggregation import FedAvg
from flsv.core import Strategy
from flsv.sampling import FullParticipation
from flsv.sites.coalitions_at_sites import CoalitionsAtSites
from flsv.sites.own_models import MIN_RELATIVE_DISTANCE, inconsistent_own_models
from flsv.testing.rounds import PreparedRounds
from flsv.testing.samplers import federation_of
from flsv.values.designs import BySize
from helpers import make_generator

#: What client 1 sends as its own model, given those of all clients [n, P] and noise [P].
LIES = {
    "noise": lambda own_models, noise: noise,
    "large noise": lambda own_models, noise: 20 * noise,
    "small noise": lambda own_models, noise: 0.05 * noise,
    "a copy with noise": lambda own_models, noise: own_models[2] + 0.01 * noise,
    "a large copy": lambda own_models, noise: 5 * own_models[2],
    "its opposite": lambda own_models, noise: -own_models[1],
    "its large opposite": lambda own_models, noise: -5 * own_models[1],
}


NUM_PARAMETERS = 1000


class HonestClients:
    """Models that clients train alone, from zero, and their updates in the federation, which differ in length.

    Those of a client have a direction of the client's in common, and all have a direction in common.
    """

    def __init__(self, num_clients, seed):
        self.generator = make_generator(seed)
        lengths = 0.5 + 1.5 * torch.rand(num_clients, 1, generator=self.generator)
        common_direction = self.draw_normal(1)
        client_directions = 0.5 * self.draw_normal(num_clients)

        update_noise = 0.3 * self.draw_normal(num_clients)
        self.updates = lengths * (common_direction + client_directions + update_noise)

        model_noise = 0.3 * self.draw_normal(num_clients)
        self.own_models = lengths * (common_direction + 1.5 * client_directions + model_noise)

    def draw_normal(self, num_rows):
        return torch.randn(num_rows, NUM_PARAMETERS, generator=self.generator)

    @property
    def federation_model(self):
        return self.updates.mean(0)

    def consistency_warnings(self, has_others=None):
        return inconsistent_own_models(
            own_models=self.own_models,
            initial_model=torch.zeros(NUM_PARAMETERS),
            federation_model=self.federation_model,
            update_sums=self.updates,
            has_others=has_others,
        )


@pytest.mark.parametrize("num_clients", [3, 6])
@pytest.mark.parametrize("lie", LIES)
def test_client_that_lies_is_the_only_inconsistent_one(lie, num_clients):
    for seed in range(20):
        cohort = HonestClients(num_clients, seed)
        assert cohort.consistency_warnings() == {}, seed

        (noise,) = cohort.draw_normal(1)
        false_model = LIES[lie](cohort.own_models, noise)
        cohort.own_models[1] = false_model
        assert cohort.consistency_warnings().keys() == {1}, seed


def enlarge_own_model(cohort):
    """Keep its direction, which is all that is compared."""
    cohort.own_models[1] *= 5


def take_no_part(cohort):
    cohort.own_models[1] = 0
    cohort.updates[1] = 0


def lose_replies_to_training_alone(cohort):
    cohort.own_models[1] = 0


@pytest.mark.parametrize("num_clients", [3, 6])
@pytest.mark.parametrize(
    "change", [enlarge_own_model, take_no_part, lose_replies_to_training_alone]
)
def test_change_that_is_no_lie_makes_no_client_inconsistent(change, num_clients):
    for seed in range(20):
        cohort = HonestClients(num_clients, seed)
        change(cohort)
        assert cohort.consistency_warnings() == {}, seed


def test_own_model_copied_from_the_federation_or_a_client_is_inconsistent():
    cohort = HonestClients(5, seed=0)
    cohort.own_models[1] = cohort.federation_model
    cohort.own_models[3] = cohort.own_models[4]

    assert cohort.consistency_warnings() == {
        1: "its own model is the federation's",
        3: "its own model moves as client 4's updates do",
    }


@pytest.mark.parametrize(
    ("relative_distance", "inconsistent_clients"),
    [(0.9 * MIN_RELATIVE_DISTANCE, {0}), (1.2 * MIN_RELATIVE_DISTANCE, set())],
)
def test_own_model_near_the_federations_is_inconsistent(relative_distance, inconsistent_clients):
    cohort = HonestClients(2, seed=0)
    (direction,) = torch.nn.functional.normalize(cohort.draw_normal(1), dim=1)
    distance = relative_distance * cohort.federation_model.norm()

    cohort.own_models[0] = cohort.federation_model + distance * direction

    assert cohort.consistency_warnings().keys() == inconsistent_clients


def test_two_clients_are_not_compared_with_each_other():
    cohort = HonestClients(2, seed=0)
    first_model, second_model = cohort.own_models
    cohort.own_models = torch.stack([second_model, first_model])

    assert cohort.consistency_warnings() == {}


class StrategyWithSavedNumber(Strategy):
    saved = ("number",)

    def __init__(self, number=0):
        self.number = number


class EngineWithoutSites:
    def sites_of(self, state, excluded_from):
        return None


def numbers_of_strategies(coalition_state):
    strategy_states = coalition_state["parts"]
    return [state["number"] for state in strategy_states if "number" in state]


@pytest.mark.slow
def test_coalitions_at_sites_save_strategies_in_the_runs_order():
    """A resumed server restores them in this order."""
    strategies = {"sampler": FullParticipation(), "aggregator": FedAvg()}
    for number in range(8):
        strategies[f"strategy {number}"] = StrategyWithSavedNumber(number)
    federation = federation_of(PreparedRounds(), num_clients=2)

    coalitions = CoalitionsAtSites(
        design=BySize("all"),
        federation=replace(federation, strategies=strategies),
        engine=EngineWithoutSites(),
        memory={},
        consistency_warnings=[],
    )

    coalition_states = coalitions.state_dict()["coalitions"]
    assert coalition_states
    for coalition_state in coalition_states.values():
        assert numbers_of_strategies(coalition_state) == list(range(8))


def test_move_is_not_compared_with_a_client_without_updates():
    cohort = HonestClients(4, seed=0)
    cohort.updates[2] = 0
    cohort.own_models[1] *= -1

    assert cohort.consistency_warnings()[1] != "its own model moves as client 2's updates do"


def test_own_model_may_be_the_federations_if_no_other_client_has_updated_it():
    cohort = HonestClients(3, seed=0)
    cohort.own_models[1] = cohort.federation_model
    has_others = torch.tensor([True, False, True])

    assert cohort.consistency_warnings().keys() == {1}
    assert cohort.consistency_warnings(has_others) == {}
