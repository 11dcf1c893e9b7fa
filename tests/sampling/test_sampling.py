"""Samplers: sizes, chances, power-of-choice by hand, and what of one's own is no cohort."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from flsv.aggregation import ShapleyWeighted
from flsv.federation import FederatedLoop
from flsv.metrics import ContributionMetric, SurrogateFederatedShapley
from flsv.results import read_run
from flsv.sampling import (
    BernoulliSampler,
    ClientSampler,
    FixedCohort,
    PowerOfChoice,
    ShapleyImportanceSampler,
)
from flsv.utilities.seeding import generator_for
from helpers import make_generator, refused
from helpers.data import toy_data
from helpers.fits import KeepsRounds, fit
from helpers.loops_by_hand import ROUNDS, SEED, make_unequal_data
from helpers.models import Plain, network


def test_two_clients_are_drawn_where_one_has_almost_no_value_and_the_minimum_is_two():
    """The surrogate value of a client that is always the worse of two falls exponentially, and its coin with it."""
    values = {"ssv": torch.tensor([1.0, 1e-12])}
    sampler = ShapleyImportanceSampler(1, min_cohort=2)
    assert sampler.coins(2, {}).tolist() == [1 / 2] * 2  # before there are values

    cohort = sampler.sample(2, values, make_generator())

    assert cohort.tolist() == [0, 1]
    assert sampler.inclusion_probabilities(2, values).tolist() == [1, 1]


@pytest.mark.parametrize("min_cohort", [1, 2])
def test_tiny_probabilities_draw_each_cohort_of_minimum_size_with_equal_chance(
    min_cohort, monkeypatch
):
    monkeypatch.setattr("flsv.sampling.bernoulli._MAX_DRAWS", 10)
    num_clients = 5
    chance_of_client = 1e-9
    sampler = BernoulliSampler(num_clients * chance_of_client, min_cohort)

    num_draws = 1000
    counts = torch.zeros(num_clients)
    for seed in range(num_draws):
        generator = make_generator(seed)
        cohort = sampler.sample(num_clients, {}, generator)
        assert len(cohort) == min_cohort
        counts[cohort] += 1

    expected = min_cohort / num_clients
    deviation = (expected * (1 - expected) / num_draws) ** 0.5
    differences = (counts / num_draws - expected).abs()
    assert differences.max() < 5 * deviation

    probabilities = sampler.inclusion_probabilities(num_clients, {})
    assert probabilities.tolist() == pytest.approx([expected] * num_clients)


def test_bernoulli_inclusion_probabilities_of_300_clients_are_exact():
    num_clients = 300
    coins = torch.rand(num_clients, generator=make_generator()) * 0.01
    coins[7] = 1
    sampler = BernoulliSampler(1)
    sampler.coins = lambda num_clients, contributions: coins

    probabilities = sampler.inclusion_probabilities(num_clients, {})

    # A cohort is drawn again until it has two clients, the default minimum. So a client is in the cohort with the
    # chance that it and another one are drawn, over the chance that two or more are drawn.
    client_coins = coins.double()
    chance_of_size = np.ones(1)  # of 0, 1, 2, ... drawn clients, among those so far
    for coin in client_coins.tolist():
        chance_of_size = np.convolve(chance_of_size, [1 - coin, coin])
    chance_of_two_or_more = chance_of_size[2:].sum()

    chances_of_another = []
    for client in range(num_clients):
        is_other = torch.arange(num_clients) != client
        chance_of_no_other = (1 - client_coins[is_other]).prod()
        chances_of_another.append(1 - chance_of_no_other)

    expected = client_coins * torch.stack(chances_of_another) / chance_of_two_or_more
    assert_close(probabilities, expected.float())


def test_client_without_a_value_is_drawn_more_often_than_one_of_little_value():
    values = {"ssv": torch.tensor([0.9, float("nan"), 0.1])}

    probabilities = ShapleyImportanceSampler(2, "ssv").coins(3, values)

    assert probabilities[1] > probabilities[2]


class Own(ClientSampler):
    def __init__(self, cohort, chances=(1.0, 1.0, 1.0)):
        self.cohort = torch.tensor(cohort)
        self.chances = torch.tensor(chances)

    def sample(self, num_clients, *_, **__):
        return self.cohort

    def inclusion_probabilities(self, num_clients, *_, **__):
        return self.chances


@pytest.mark.parametrize(
    "cohort",
    [
        [2, 0, 2],
        [True, False, True],
        [0.0, 1.0],
        [-1, 0],
        [0, 3],
        [[0, 1]],
        [],
    ],
    ids=repr,
)
def test_sampler_that_returns_an_invalid_cohort_is_refused(tmp_path, cohort):
    with pytest.raises(RuntimeError, match="round 1, but.*0 to 2"):
        fit(FederatedLoop(sampler=Own(cohort)), tmp_path, rounds=1)


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    "chances", [[0.5, 0.5], [0.5, 0.0, 0.5], [0.5, 1.5, 0.5], [float("nan"), 0.5, 0.5]], ids=repr
)
def test_sampler_that_returns_invalid_probabilities_is_refused(tmp_path, chances):
    loop = FederatedLoop(
        ShapleyWeighted("ssv"),
        metrics={"ssv": SurrogateFederatedShapley()},
        sampler=Own([0, 1], chances),
    )
    with pytest.raises(
        RuntimeError,
        match=r"Own.*inclusion_probabilities returned .* (\[3\] is expected|expected are numbers above 0)",
    ):
        fit(loop, tmp_path, data=toy_data(server_val=0.2), rounds=1)


# ---- Power-of-choice by hand, and what asking costs


M, D = 2, 4


class Counts(ContributionMetric):
    def init_states(self, num_clients, num_classes):
        self.rows = []

    def update(self, client_ids, reached, downloaded, uploaded):
        row = {
            "cohort": client_ids,
            "reached": reached.sort().values,
            "down": downloaded,
            "up": uploaded,
        }
        self.rows.append({name: values.tolist() for name, values in row.items()})

    def compute(self):
        return torch.zeros(5)


def make_loop(**parts):
    sampler = PowerOfChoice(cohort_size=M, candidates=D)
    return FederatedLoop(sampler=sampler, local_epochs=2, seed=SEED, **parts)


@pytest.mark.parametrize("clients", [[], [1, 1]])
def test_fixed_cohort_of_no_different_clients_is_refused(clients):
    with refused("expected at least one client, and each client once"):
        FixedCohort(clients)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([0, 3], r"clients=\[0, 3\]\) names client 3.*clients 0 to 2 only"),
        (["Bosten"], "client='Bosten': .* It has Boston, Lyon, Graz"),
        ([1, "Lyon"], "names a client twice"),
    ],
)
def test_fixed_cohort_with_a_client_that_does_not_exist_is_refused(clients, message):
    sampler = FixedCohort(clients)
    with refused(message):
        sampler.check(["Boston", "Lyon", "Graz"])


def test_fixed_cohort_draws_clients_by_name_and_by_id(tmp_path):
    loop = FederatedLoop(sampler=FixedCohort([2, "0"]), seed=0)

    fit(loop, tmp_path, data=toy_data((3, 2, 2)))

    weights = read_run(tmp_path).query("metric == 'weight'")
    assert sorted(weights["client"].unique()) == [0, 2]


def largest_losses(model, data, round_index):
    """The candidates of a round, drawn in proportion to their samples, and those of them with the largest losses."""
    sizes = data.num_samples.double()
    generator = generator_for(SEED, "cohort", round_index)
    candidates = torch.multinomial(sizes / sizes.sum(), D, generator=generator).tolist()
    losses = {}
    for client in candidates:
        batches = data.client_loader(client, "train", shuffle=False)
        x, y = (torch.cat(parts) for parts in zip(*batches))
        losses[client] = nn.functional.cross_entropy(model(x), y).item()

    by_loss = sorted(candidates, key=lambda client: -losses[client])
    return sorted(candidates), sorted(by_loss[:M])


@pytest.mark.fast_rows
@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_power_of_choice_draws_by_samples_and_takes_the_largest_losses(tmp_path, engine):
    counts = Counts()
    recorder = KeepsRounds(weighting="uniform")
    loop = make_loop(aggregator=recorder, metrics={"counts": counts}, engine=engine)
    data = make_unequal_data()

    fit(loop, tmp_path, Plain(network(batch_norm=False)), data, rounds=ROUNDS)

    model = Plain(network(batch_norm=False)).eval()

    for round, row in zip(recorder.rounds, counts.rows):
        loop.space.write(model, round.global_vector)
        candidates, cohort = largest_losses(model, data, round.round_index)
        assert row["reached"] == candidates
        assert row["cohort"] == cohort
        # The model to be scored, and the model to train from; up goes one, for a loss is a plain number.
        size = loop.space.size
        assert row["down"] == [2 * size] * M + [size] * (D - M)
        assert row["up"] == [size] * M + [0] * (D - M)
    different_cohorts = {tuple(row["cohort"]) for row in counts.rows}
    assert len(different_cohorts) > 1


@pytest.mark.slow
def test_sampler_with_wrong_arguments_is_refused(tmp_path):
    with refused("candidates=1"):  # a rule between arguments
        PowerOfChoice(2, 1)

    metrics = {"ssv": SurrogateFederatedShapley()}
    with refused("client's probability to take part"):
        fit(
            make_loop(aggregator=ShapleyWeighted("ssv"), metrics=metrics),
            tmp_path,
            data=make_unequal_data(),
        )
