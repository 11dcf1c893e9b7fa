"""Servers of coalitions: one by one, and many at once."""

from dataclasses import replace
from itertools import count

import pytest
import torch

from flsv.aggregation import FedAdam, FedAvg, TrimmedMean
from flsv.core import ClientUpdate
from flsv.filters import NormCap, OutlierFilter, with_finite_check
from flsv.functional.shapley.exact import all_coalitions
from flsv.sampling import FixedCohort, FullParticipation, UniformSampler
from flsv.server.coalition_server import AveragedCoalitions, CoalitionServer, only_averages
from flsv.testing.fits import Turns
from flsv.testing.rounds import NUM_CLIENTS, PreparedRounds
from flsv.testing.samplers import federation_of
from flsv.utilities.seeding import generator_for

ROUNDS = PreparedRounds(kind="normalized")  # the module has buffers
MASKS = all_coalitions(NUM_CLIENTS)[1:]  # without the empty one
SIZES = torch.tensor([3, 7, 5, 2, 4])
NUM_STEPS = 3


def make_federation(sampler=None, aggregator=None, filters=(), **strategies):
    strategies |= {
        "sampler": sampler or FullParticipation(),
        "aggregator": aggregator or FedAvg(),
    }
    federation = federation_of(ROUNDS)
    split_sizes = {**federation.split_sizes, "train": SIZES}
    return replace(
        federation,
        strategies=strategies,
        filters=with_finite_check(filters),
        split_sizes=split_sizes,
    )


def trained(model, client, round_index):
    """Return what a client makes of a model. It does not change the first element."""
    noise = torch.randn(len(model), generator=generator_for(0, "training", client, round_index))
    vector = 0.9 * model + 0.1 * noise.to(model)
    vector[0] = model[0]
    return vector


class OneByOne:
    """Coalitions with a server each."""

    def __init__(self, federation, train, masks=MASKS):
        self.train = train
        coalitions = [mask.nonzero().flatten().tolist() for mask in masks]
        self.servers = [CoalitionServer(members, federation) for members in coalitions]

    def run_round(self, round_index):
        for server in self.servers:
            instructions = server.begin_round(round_index, ROUNDS.clients)
            updates = []
            broken = []
            for client, instruction in instructions.items():
                vector = self.train(instruction.start, client, round_index)
                if vector.isfinite().all():
                    num_samples = int(SIZES[client])
                    updates.append(ClientUpdate(client, num_samples, vector, 0.5, NUM_STEPS))
                else:
                    broken.append(client)
            server.end_round(updates, broken, ROUNDS.server)

    @property
    def models(self):
        return torch.stack([server.state.model() for server in self.servers])

    @property
    def is_over(self):
        return [server.is_over for server in self.servers]


class AtOnce:
    """The same coalitions, at once. A client trains the rows in two parts, as if memory did not hold more."""

    def __init__(self, federation, train):
        self.train = train
        self.coalitions = AveragedCoalitions(MASKS, federation)

    def run_round(self, round_index):
        coalitions = self.coalitions
        coalitions.begin_round(round_index, ROUNDS.clients)
        for client in range(NUM_CLIENTS):
            for rows in coalitions.rows_of(client).split(9):
                starts = coalitions.models[rows]
                vectors = [self.train(start, client, round_index) for start in starts]
                coalitions.add(client, rows, torch.stack(vectors))
        coalitions.end_round()


def train_both(federation, train=trained, rounds=4):
    one_by_one = OneByOne(federation, train)
    at_once = AtOnce(federation, train)
    for round_index in range(rounds):
        one_by_one.run_round(round_index)
        at_once.run_round(round_index)
    return one_by_one, at_once.coalitions


def failing(*rounds_and_clients):
    """Return a training that returns NaN in these rounds, at these clients."""

    def train(model, client, round_index):
        vector = trained(model, client, round_index)
        return vector * torch.nan if (round_index, client) in rounds_and_clients else vector

    return train


def without_a_change(model, client, round_index):
    """Return the training of clients of which the first does not change the model."""
    return model.clone() if client == 0 else trained(model, client, round_index)


FEDERATIONS = {
    "samples": {},
    "uniform": {"aggregator": FedAvg("uniform")},
    "server_lr": {"aggregator": FedAvg(server_lr=0.5)},
    "sampler": {"sampler": UniformSampler(2)},
    "fixed cohort": {"sampler": FixedCohort([*range(NUM_CLIENTS)])},
    "filter": {"filters": [OutlierFilter(exclude=True)]},
}


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.filterwarnings("ignore:.*excluded from the round")
@pytest.mark.parametrize(
    "train",
    [trained, without_a_change, failing((1, 0), (1, 2), (2, 2))],
    ids=["all", "idle", "failing"],
)
@pytest.mark.parametrize("options", FEDERATIONS.values(), ids=FEDERATIONS)
def test_coalitions_at_once_are_those_one_by_one(options, train):
    federation = make_federation(**options)
    one_by_one, at_once = train_both(federation, train)

    assert only_averages(federation)
    assert not at_once.needs_server.any()
    assert at_once.is_over.tolist() == one_by_one.is_over
    torch.testing.assert_close(at_once.models, one_by_one.models, rtol=1e-6, atol=1e-6)
    assert not torch.equal(at_once.models[-1], federation.global_vector)


def test_elements_that_no_client_changes_stay_exactly():
    federation = make_federation()
    _, at_once = train_both(federation, without_a_change)

    assert at_once.models[:, 0].eq(federation.global_vector[0]).all()


def test_coalitions_at_once_of_halves_are_those_one_by_one():
    federation = make_federation()
    halves = replace(federation, global_vector=federation.global_vector.bfloat16())
    one_by_one, at_once = train_both(halves)

    assert at_once.models.dtype == torch.bfloat16
    torch.testing.assert_close(at_once.models, one_by_one.models, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"aggregator": FedAvg(server_lr=0.5)}, True),
        ({"filters": [OutlierFilter(exclude=True)]}, True),
        ({"aggregator": FedAdam(lr=0.1)}, False),
        ({"aggregator": TrimmedMean()}, False),
        ({"filters": [NormCap(1.0)]}, False),
        ({"client_algorithm": FullParticipation()}, False),  # any other strategy
    ],
)
def test_only_averages_are_trained_at_once(options, expected):
    assert only_averages(make_federation(**options)) is expected


class Long:
    """Training in which client 1's update is so many times as long in round 1."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, model, client, round_index):
        vector = trained(model, client, round_index)
        is_long = client == 1 and round_index == 1
        return model + (vector - model) * self.factor if is_long else vector


@pytest.mark.filterwarnings("ignore:.*far larger")
@pytest.mark.parametrize(
    ("filters", "factor", "is_excluded"),
    [
        ((), 100, False),
        ((), 1e9, True),
        ([OutlierFilter()], 100, False),
        ([OutlierFilter(exclude=True)], 100, True),
        ([OutlierFilter(threshold=None)], 1e9, True),
    ],
)
def test_coalitions_in_which_a_filter_may_act_need_a_server(filters, factor, is_excluded):
    federation = make_federation(filters=filters)
    one_by_one, at_once = train_both(federation, Long(factor), rounds=3)

    # Among two, none is an outlier, though its update may be so long that the other is lost.
    has_outlier = MASKS[:, 1] & (MASKS.sum(1) > 2)
    assert at_once.needs_server[has_outlier].all() == is_excluded
    assert not at_once.needs_server[~MASKS[:, 1]].any()
    assert at_once.is_over[at_once.needs_server].all()
    served = ~at_once.needs_server
    torch.testing.assert_close(
        at_once.models[served], one_by_one.models[served], rtol=1e-4, atol=1e-4
    )


def test_coalition_whose_average_overflows_needs_a_server():
    """A buffer may be so large that its change is infinite, which no filter sees."""

    def train(model, client, round_index):
        vector = trained(model, client, round_index)
        vector[-1] = 3e38 if round_index else -3e38
        return vector

    at_once = AtOnce(make_federation(), train)
    for round_index in range(2):
        at_once.run_round(round_index)

    assert at_once.coalitions.needs_server.all()
    assert at_once.coalitions.models.isfinite().all()


SAMPLERS = {
    "full participation": FullParticipation(),
    "uniform": UniformSampler(NUM_CLIENTS),
    "fixed": FixedCohort([*range(NUM_CLIENTS)]),
    "own, without members": Turns([range(NUM_CLIENTS)]),
}


@pytest.mark.filterwarnings("ignore:.*excluded from the round")
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_coalition_is_over_once_all_its_clients_have_failed(sampler):
    """As a run of them ends, whichever sampler draws them."""
    federation = make_federation(sampler=sampler)
    one_by_one, at_once = train_both(federation, failing((1, 2), (1, 3)), rounds=3)

    are_all_failed = (MASKS[:, [2, 3]].sum(1) == MASKS.sum(1)).tolist()
    assert one_by_one.is_over == are_all_failed
    assert at_once.is_over.tolist() == are_all_failed
    first_round_only, _ = train_both(federation, trained, rounds=1)
    over = torch.tensor(are_all_failed)
    assert torch.equal(one_by_one.models[over], first_round_only.models[over])


def test_coalition_of_which_some_client_has_not_failed_goes_on():
    cohorts = [[0], [1], [0]]
    server = CoalitionServer([0, 1], make_federation(sampler=Turns(cohorts)))
    expected_to_be_over = [False, False, True]
    for round_index, expected in enumerate(expected_to_be_over):
        (client,) = server.begin_round(round_index, ROUNDS.clients)
        if round_index == 0:
            vector = trained(server.state.model(), client, round_index)
            server.end_round([ClientUpdate(client, 3, vector, 0.5, NUM_STEPS)], [], ROUNDS.server)
        else:
            server.end_round([], [client], ROUNDS.server)
        assert server.is_over is expected


def test_client_that_has_sent_nothing_has_not_failed():
    """Its next reply may arrive."""
    server = CoalitionServer([2], make_federation())
    server.begin_round(0, ROUNDS.clients)

    assert server.end_round([], [], ROUNDS.server) == []
    assert not server.is_over
    assert server.begin_round(1, ROUNDS.clients).keys() == {2}


@pytest.mark.filterwarnings("ignore:.*not finite")
def test_coalition_is_over_when_its_aggregate_is_not_finite_twice():
    class Broken(FedAvg):
        def aggregate(self, round, contributions):
            vector, weights = super().aggregate(round, contributions)
            return vector * torch.nan, weights

    one_by_one = OneByOne(make_federation(aggregator=Broken()), trained, MASKS[:3])
    for round_index, expected in zip(count(), [False, True, True]):
        one_by_one.run_round(round_index)
        assert one_by_one.is_over == [expected] * 3


def test_resumed_coalition_that_is_over_stays_so():
    federation = make_federation()
    server = CoalitionServer([2], federation)
    server.begin_round(0, ROUNDS.clients)
    server.end_round([], [2], ROUNDS.server)
    resumed = CoalitionServer([2], federation, saved=server.state_dict())

    assert resumed.is_over
    assert resumed.begin_round(1, ROUNDS.clients) == {}


def test_messages_of_a_round_without_updates_are_counted_once():
    server = CoalitionServer([0, 1], make_federation())
    vector = federation_of(ROUNDS).global_vector
    updates = [ClientUpdate(client, 3, vector, 0.5, NUM_STEPS) for client in (0, 1)]
    server.begin_round(0, ROUNDS.clients)
    server.end_round(updates, [], ROUNDS.server)
    server.begin_round(1, ROUNDS.clients)
    server.end_round([], [0], ROUNDS.server)

    directions = [(message.client, message.direction) for message in server.server.channel.messages]
    assert directions == [(0, "down"), (1, "down")]
