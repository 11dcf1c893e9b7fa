"""With a sampler each coalition draws its own cohorts: by hand, and as fits that draw among its members."""

from functools import partial

import pytest
import torch

import flsv
from flsv import FederatedLoop
from flsv.aggregation import FedAdam
from flsv.functional import few_coalitions_shapley
from flsv.metrics import CumulativeShapley, ShadowShapley
from flsv.metrics.coalitions.design import coalition_masks
from flsv.sampling import (
    BernoulliSampler,
    ClientSampler,
    FixedCohort,
    PowerOfChoice,
    SoftmaxSampler,
    UniformSampler,
)
from flsv.uploads import TopK
from flsv.utilities.seeding import generator_for
from helpers import refused
from helpers.coalitions_by_hand import (
    SEED,
    GameByFits,
    make_shadow_loop,
    make_three_clients,
)
from helpers.fits import assert_resumes, fit, make_untrainable, trainer_for
from helpers.models import Plain, Plainest, network

ROUNDS = 4


def draw_uniform(members, index, size):
    """The first members in a random order of all three clients."""
    order = torch.randperm(3, generator=generator_for(SEED, "cohort", index)).tolist()
    return [client for client in order if client in members][:size]


def toss_for_members(
    members,
    index,
    size,
):
    """Return those whose coin of chance size / |S| falls, two at least, in the same numbers for all coalitions."""
    draw = generator_for(SEED, "cohort", index)
    chance = min(1.0, size / len(members))
    fewest = min(2, len(members))
    while True:
        coins = torch.rand(3, generator=draw).tolist()
        sampled = [client for client in members if coins[client] < chance]
        if len(sampled) >= fewest:
            return sampled


SAMPLERS = {
    "one of three": (UniformSampler(1), partial(draw_uniform, size=1)),
    "coins": (BernoulliSampler(1.5), partial(toss_for_members, size=1.5)),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_sampler_of_a_coalition_draws_as_by_hand(name):
    sampler, draw = SAMPLERS[name]
    for mask in coalition_masks("all", 3)[1:]:
        members = mask.nonzero()[:, 0].tolist()
        for index in range(20):
            generator = generator_for(SEED, "cohort", index)
            cohort = sampler.among(members).sample(3, {}, generator)
            assert sorted(cohort.tolist()) == sorted(draw(members, index=index))


def assert_near(values, expected):
    torch.testing.assert_close(values.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_coalitions_with_a_sampler_are_fits_that_draw_among_their_members(tmp_path):
    """The values of flsv.retrain are of the last round, the metric's the mean over three rounds."""
    sampler = BernoulliSampler(1.5)
    module = Plain(network(batch_norm=False))
    masks = coalition_masks("all", 3)
    values_by_round = []
    for rounds in (2, 3, 4):

        def make_trainer(cohort, rounds=rounds):
            loop = FederatedLoop(sampler=sampler.among(cohort.clients), seed=SEED)
            return trainer_for(loop, tmp_path, rounds)

        game = GameByFits(make_trainer, module, make_three_clients())
        values_by_round.append(few_coalitions_shapley(masks, game(masks)).values)

    metric = ShadowShapley(coalitions="all", performance="negative_loss")
    loop = make_shadow_loop(metric, sampler=sampler)
    table = flsv.retrain(
        trainer_for(loop, tmp_path, ROUNDS),
        module,
        make_three_clients(),
        "all",
        seeds=1,
        metric="negative_loss",
    )
    assert_near(torch.tensor(table["value"]), values_by_round[-1])

    fit(loop, tmp_path, module, make_three_clients(), ROUNDS)
    assert_near(loop.contributions["shadow"], torch.stack(values_by_round).mean(0))


@pytest.mark.slow
def test_coalitions_with_a_sampler_resume_to_the_bit(tmp_path):
    def federation():
        return make_shadow_loop(
            sampler=UniformSampler(1),
            aggregator=FedAdam(0.02),
            uploads=[TopK(0.3)],
        )

    def module():
        return Plain(network(batch_norm=False))

    whole = assert_resumes(federation, tmp_path, module, make_three_clients)

    # Clients that were never drawn have no value.
    was_drawn = whole.metrics["shadow"].participations > 0
    has_no_value = whole.contributions["shadow"].isnan()
    assert torch.equal(has_no_value, ~was_drawn)


class OwnSampler(ClientSampler):
    """A sampler that does not say how to draw among some of the clients."""

    def sample(self, *args, **options):
        return torch.tensor([0, 1])

    def inclusion_probabilities(self, *args, **options):
        return torch.tensor([1.0, 1.0, 0.0])


class Elsewhere(UniformSampler):
    """Draws others than the coalition's members."""

    def sample(self, *args, **options):
        return torch.tensor([0, 2])


REFUSED = {
    "by values": ("it draws by values or losses", lambda: SoftmaxSampler(2, "rounds")),
    "by losses": ("it draws by values or losses", lambda: PowerOfChoice(1, 2)),
    "of one's own": ("has no method `among`", OwnSampler),
    "nobody": (r"never draws the clients \[1\]", lambda: FixedCohort([0, 2])),
}


@pytest.mark.fast_rows
@pytest.mark.parametrize("sampler", REFUSED)
def test_samplers_that_cannot_draw_within_a_coalition_are_refused(tmp_path, sampler):
    match, make = REFUSED[sampler]

    module = make_untrainable(Plainest)
    loop = make_shadow_loop(
        ShadowShapley(), sampler=make(), metrics={"rounds": CumulativeShapley()}
    )

    with refused(match):
        fit(loop, tmp_path, module, make_three_clients(), 1)


def test_sampler_that_draws_outside_of_a_coalition_is_refused_before_training(
    tmp_path,
):
    loop = make_shadow_loop(ShadowShapley(), sampler=Elsewhere(2))
    with refused(r"drew \[0, 2\] for the coalition \[\d\]"):
        fit(loop, tmp_path, Plain(network(batch_norm=False)), make_three_clients(), 1)


@pytest.mark.fast_rows
@pytest.mark.parametrize("sampler", [UniformSampler(2), BernoulliSampler(1.5)])
@pytest.mark.parametrize(
    "members",
    [
        [3],
        [0, 3],
        [1, 2, 4],
        [0, 1, 2, 3, 4],
    ],
)
def test_coalition_samplers_inclusion_probabilities_are_its_frequencies(sampler, members):
    among_members = sampler.among(members)
    counts = torch.zeros(5)
    for index in range(2000):
        generator = generator_for(0, "cohort", index)
        counts[among_members.sample(5, {}, generator)] += 1

    probabilities = among_members.inclusion_probabilities(5, {})
    torch.testing.assert_close(counts / 2000, probabilities, rtol=0, atol=0.05)
    assert sampler.members is None
