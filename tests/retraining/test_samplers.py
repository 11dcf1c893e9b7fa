"""With a sampler each coalition draws its own cohorts: by hand, and as fits that draw among its members."""

import copy
import functools
import itertools

import pytest
import torch

import flsv
from flsv import FederatedLoop
from flsv.aggregation import FedAdam
from flsv.functional import few_coalitions, few_coalitions_shapley
from flsv.metrics import ShadowShapley
from flsv.sampling import (
    BernoulliSampler,
    ClientSampler,
    FixedCohort,
    PowerOfChoice,
    UniformSampler,
)
from flsv.uploads import TopK
from flsv.utilities.seeding import generator_for
from helpers import refused
from helpers.coalitions_by_hand import SEED, GameByFits, make_shadow_loop, make_three_clients
from helpers.fits import assert_resumes, fit, make_untrainable, trainer_for
from helpers.models import Diverges, Plainest, network, sgd

COALITIONS = [[0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]]


def draw_first_in_random_order(members, generator):
    """Return the member that is first in a random order of all three clients."""
    order = torch.randperm(3, generator=generator).tolist()
    return [client for client in order if client in members][:1]


def draw_by_coins(members, generator):
    """Return members with chance 1.5 / |S| each, at least two, by the same coins in all coalitions."""
    chance = min(1.0, 1.5 / len(members))
    min_sampled = min(2, len(members))
    sampled = []
    while len(sampled) < min_sampled:
        coins = torch.rand(3, generator=generator).tolist()
        sampled = [client for client in members if coins[client] < chance]
    return sampled


@pytest.mark.parametrize(
    ("sampler", "draw_by_hand"),
    [(UniformSampler(1), draw_first_in_random_order), (BernoulliSampler(1.5), draw_by_coins)],
)
def test_sampler_of_a_coalition_draws_as_by_hand(sampler, draw_by_hand):
    for members, round_index in itertools.product(COALITIONS, range(20)):
        make_generator = functools.partial(generator_for, SEED, "cohort", round_index)
        sampler_of_coalition = sampler.among(members)
        cohort = sampler_of_coalition.sample(3, {}, generator=make_generator())
        expected = draw_by_hand(members, make_generator())
        assert sorted(cohort.tolist()) == sorted(expected)


def assert_near(values, expected):
    torch.testing.assert_close(values.double(), expected, rtol=1e-4, atol=1e-5)


SAMPLER = BernoulliSampler(1.5)


def make_sampled_loop():
    metric = ShadowShapley(coalitions="all", performance="negative_loss")
    return make_shadow_loop(metric, sampler=SAMPLER)


def make_trainer_that_draws_among(cohort, folder, rounds):
    loop = FederatedLoop(sampler=SAMPLER.among(cohort.clients), seed=SEED)
    return trainer_for(loop, folder, rounds)


def values_by_fits(folder, rounds):
    """Values by a fit of each coalition, which draws among its members."""
    make_trainer = functools.partial(make_trainer_that_draws_among, folder=folder, rounds=rounds)
    game = GameByFits(make_trainer, Plainest(), make_three_clients())
    masks = few_coalitions(3, "all")
    return few_coalitions_shapley(masks, game(masks)).values


@pytest.fixture(scope="module")
def values_after_each_round(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fits")
    return [values_by_fits(folder, rounds) for rounds in (1, 2)]


@pytest.mark.slow
def test_coalitions_with_a_sampler_are_fits_that_draw_among_their_members(
    tmp_path, values_after_each_round
):
    loop = make_sampled_loop()
    fit(loop, tmp_path, Plainest(), make_three_clients(), rounds=2)

    mean_values = torch.stack(values_after_each_round).mean(dim=0)
    assert_near(loop.contributions["shadow"], mean_values)


@pytest.mark.slow
def test_retrain_with_a_sampler_returns_means_over_the_last_rounds_as_a_fit(
    tmp_path, values_after_each_round
):
    table = flsv.retrain(
        trainer_for(make_sampled_loop(), tmp_path, rounds=2),
        Plainest(),
        make_three_clients(),
        coalitions="all",
        seeds=1,
        metric="negative_loss",
    )

    mean_values = torch.stack(values_after_each_round).mean(dim=0)
    assert_near(torch.tensor(table["value"]), mean_values)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*NaN or infinite")
def test_coalition_whose_only_client_fails_in_round_2_keeps_the_model_of_round_1(tmp_path):
    module = Diverges(network(), sgd, failing=[(1, 2)])
    table = flsv.retrain(
        trainer_for(make_shadow_loop(), tmp_path / "run", rounds=3),
        copy.deepcopy(module),
        make_three_clients(),
        coalitions="all",
        seeds=1,
        metric="negative_loss",
    )

    def make_trainer(cohort):
        loop = FederatedLoop(sampler=cohort, seed=SEED)
        is_ended = cohort.clients == [2]
        return trainer_for(loop, tmp_path / "alone", rounds=1 if is_ended else 3)

    masks = few_coalitions(3, "all")
    game = GameByFits(make_trainer, module, make_three_clients())
    expected = few_coalitions_shapley(masks, game(masks)).values
    assert_near(torch.tensor(table["value"]), expected)


@pytest.mark.slow
def test_coalitions_with_a_sampler_resume_to_the_bit(tmp_path):
    def make_loop():
        return make_shadow_loop(
            sampler=UniformSampler(1), aggregator=FedAdam(0.02), uploads=[TopK(0.3)]
        )

    loop = assert_resumes(make_loop, tmp_path, Plainest, make_three_clients)

    was_never_drawn = loop.metrics["shadow"].participations == 0
    has_no_value = loop.contributions["shadow"].isnan()
    assert torch.equal(has_no_value, was_never_drawn)


class SamplerWithoutAmong(ClientSampler):
    """A sampler that does not say how to draw among some of the clients."""

    def sample(self, *args, **options):
        return torch.tensor([0, 1])

    def inclusion_probabilities(self, *args, **options):
        return torch.tensor([1.0, 1.0, 0.0])


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (PowerOfChoice(1, 2), "it draws by values or losses"),
        (SamplerWithoutAmong(), "has no method `among`"),
        (FixedCohort([0, 2]), r"never draws the clients \[1\]"),
    ],
    ids=["by losses", "without among", "never draws a client"],
)
def test_sampler_that_cannot_draw_within_a_coalition_is_refused(tmp_path, sampler, message):
    loop = make_shadow_loop(ShadowShapley(), sampler=sampler)
    with refused(message):
        fit(loop, tmp_path, make_untrainable(Plainest), make_three_clients(), rounds=1)


class SamplerThatDrawsOtherClients(UniformSampler):
    """Draws clients 0 and 2 in any coalition."""

    def sample(self, *args, **options):
        return torch.tensor([0, 2])


def test_sampler_that_draws_outside_of_a_coalition_is_refused_before_training(tmp_path):
    loop = make_shadow_loop(ShadowShapley(), sampler=SamplerThatDrawsOtherClients(2))
    with refused(r"drew \[0, 2\] for the coalition \[\d\]"):
        fit(loop, tmp_path, Plainest(), make_three_clients(), rounds=1)


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize("sampler", [UniformSampler(2), BernoulliSampler(1.5)])
@pytest.mark.parametrize("members", [[3], [1, 2, 4], [0, 1, 2, 3, 4]])
def test_coalition_samplers_inclusion_probabilities_are_its_frequencies(sampler, members):
    sampler_of_coalition = sampler.among(members)
    num_clients = 5
    num_draws = 2000
    counts = torch.zeros(num_clients)
    for index in range(num_draws):
        generator = generator_for(0, "cohort", index)
        cohort = sampler_of_coalition.sample(num_clients, {}, generator=generator)
        counts[cohort] += 1

    probabilities = sampler_of_coalition.inclusion_probabilities(num_clients, {})
    torch.testing.assert_close(counts / num_draws, probabilities, rtol=0, atol=0.05)
    assert sampler.members is None
