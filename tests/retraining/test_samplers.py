"""With a sampler each coalition draws its own cohorts: against plain loops that draw and train by hand."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import flsv
from flsv import FederatedLoop, Reporting
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
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for
from helpers import slow_except
from helpers.coalitions_by_hand import (
    SEED,
    CoalitionByHand,
    make_shadow_loop,
    make_three_clients,
)
from helpers.fits import assert_resumes, fit, state_vector, trainer_for
from helpers.models import Plain, adam, network
from helpers.recorded import Recorded

ROUNDS = 4


def draw_uniform(members: Sequence[int], size: int, index: int) -> list[int]:
    """The first members in a random order of all three clients."""
    order = torch.randperm(3, generator=generator_for(SEED, "cohort", index)).tolist()
    return [client for client in order if client in members][:size]


def toss_for_members(
    members: Sequence[int],
    size: float,
    index: int,
) -> list[int]:
    """Return those whose coin of chance size / |S| falls, two at least, in the same numbers for all coalitions."""
    draw = generator_for(SEED, "cohort", index)
    chance = min(1.0, size / len(members))
    fewest = min(2, len(members))
    while True:
        coins = torch.rand(3, generator=draw).tolist()
        sampled = [client for client in members if coins[client] < chance]
        if len(sampled) >= fewest:
            return sampled


def draw_one(members: Any, index: int) -> Any:
    return draw_uniform(members, 1, index)


def toss_coins(members: Any, index: int) -> Any:
    return toss_for_members(members, 1.5, index)


SAMPLERS: dict[str, Any] = {
    "one of three": (lambda: UniformSampler(1), draw_one),
    "coins": (lambda: BernoulliSampler(1.5), toss_coins),
}


def utilities_by_hand(
    initial_module: Any,
    draw: Any,
    rounds: int = ROUNDS,
) -> Tensor:
    """Minus the validation loss of each coalition's model."""
    utilities = []
    for mask in coalition_masks("all", 3):
        members = mask.nonzero()[:, 0].tolist()
        cohorts = []
        if members:
            for index in range(rounds):
                cohort = draw(members, index)
                cohorts.append(sorted(cohort))

        net = copy.deepcopy(initial_module.net)
        hand = CoalitionByHand(net, initial_module.make_optimizer)
        utilities.append(hand.utility(members, cohorts))

    return torch.tensor(utilities, dtype=torch.float64)


@pytest.mark.parametrize("name", slow_except(["one of three"], SAMPLERS))
def test_trained_coalitions_draw_cohorts_as_by_hand(tmp_path, name):
    """The run trains as without them."""
    make_sampler, draw = SAMPLERS[name]
    module = Plain(network(batch_norm=False, dropout=0.3), adam)
    initial_module = copy.deepcopy(module)
    unmeasured_module = copy.deepcopy(module)
    metric = Recorded(coalitions="all", performance="negative_loss")

    loop = make_shadow_loop(metric, sampler=make_sampler())
    measured = fit(loop, tmp_path, module, make_three_clients(), rounds=ROUNDS)
    reporting = Reporting(table=False)
    loop_alone = FederatedLoop(
        sampler=make_sampler(),
        seed=SEED,
        reporting=reporting,
    )
    unmeasured = fit(
        loop_alone,
        tmp_path,
        unmeasured_module,
        make_three_clients(),
        rounds=ROUNDS,
    )

    assert torch.equal(state_vector(unmeasured), state_vector(measured))

    game = metric.game.flatten()
    expected = utilities_by_hand(initial_module, draw)

    assert_near(game, expected)


def assert_near(values: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)


def test_coalitions_with_a_sampler_equal_those_of_flsv_retrain(tmp_path):
    """Their last round's values, of which the metric's are the mean over three rounds."""
    make_sampler, draw = SAMPLERS["coins"]
    module = Plain(network(batch_norm=False))
    initial_module = copy.deepcopy(module)
    shadow = ShadowShapley(coalitions="all", performance="negative_loss")
    loop = make_shadow_loop(shadow, sampler=make_sampler())
    masks = coalition_masks("all", 3)

    def values_by_hand(cohorts: Any, rounds: int = ROUNDS) -> Tensor:
        game = utilities_by_hand(initial_module, cohorts, rounds)
        return few_coalitions_shapley(masks, game).values

    table = flsv.retrain(
        trainer_for(loop, tmp_path, ROUNDS),
        module,
        make_three_clients(),
        "all",
        seeds=1,
        metric="negative_loss",
    )
    values = torch.tensor(table["value"])

    assert_near(values, values_by_hand(draw))

    trainer_for(loop, tmp_path, ROUNDS).fit(module, make_three_clients())
    metric: Any = loop.metrics["shadow"]
    last_values = metric.recent[-1, :, 0]

    assert_near(last_values.double(), values)

    final_values = loop.contributions["shadow"]
    values_by_round = []
    for rounds in (2, 3, 4):
        values_by_round.append(values_by_hand(draw, rounds))

    mean_values = torch.stack(values_by_round).mean(0)
    assert_near(final_values.double(), mean_values)


@pytest.mark.slow
def test_coalitions_with_a_sampler_resume_to_the_bit(tmp_path):
    def federation() -> FederatedLoop:
        return make_shadow_loop(
            sampler=UniformSampler(1),
            aggregator=FedAdam(0.02),
            uploads=[TopK(0.3)],
        )

    def module() -> Plain:
        return Plain(network(batch_norm=False))

    whole = assert_resumes(federation, tmp_path, module, make_three_clients)

    # Clients that were never drawn have no value.
    was_drawn = whole.metrics["shadow"].participations > 0
    has_no_value = whole.contributions["shadow"].isnan()
    assert torch.equal(has_no_value, ~was_drawn)


class OwnSampler(ClientSampler):
    """A sampler that does not say how to draw among some of the clients."""

    def sample(self, *args: Any, **options: Any) -> Tensor:
        return torch.tensor([0, 1])

    def inclusion_probabilities(self, *args: Any, **options: Any) -> Tensor:
        return torch.tensor([1.0, 1.0, 0.0])


class Elsewhere(UniformSampler):
    """Draws others than the coalition's members."""

    def sample(self, *args: Any, **options: Any) -> Tensor:
        return torch.tensor([0, 2])


REFUSED: dict[str, tuple[str, Any]] = {
    "by values": ("it chooses by values or losses", lambda: SoftmaxSampler(2, "rounds")),
    "by losses": ("it chooses by values or losses", lambda: PowerOfChoice(1, 2)),
    "of one's own": ("has no method `among`", OwnSampler),
    "nobody": (r"draws none of the clients \[1\]", lambda: FixedCohort([0, 2])),
}


@pytest.mark.parametrize("sampler", REFUSED)
def test_samplers_that_cannot_draw_within_a_coalition_are_refused(tmp_path, monkeypatch, sampler):
    match, make = REFUSED[sampler]

    def step(*_: Any) -> Any:
        raise AssertionError("trained")

    module = Plain(network(batch_norm=False))
    monkeypatch.setattr(Plain, "training_step", step)
    loop = make_shadow_loop(
        ShadowShapley(), sampler=make(), metrics={"rounds": CumulativeShapley()}
    )

    with pytest.raises(ConfigurationError, match=match):
        fit(loop, tmp_path, module, make_three_clients(), 1)
    trainer = trainer_for(loop, tmp_path, 1)
    with pytest.raises(ConfigurationError, match=match):
        flsv.retrain(trainer, module, make_three_clients())


def test_sampler_that_draws_outside_of_a_coalition_is_refused_before_training(
    tmp_path,
):
    loop = make_shadow_loop(ShadowShapley(), sampler=Elsewhere(2))
    with pytest.raises(
        ConfigurationError, match=r"RuntimeError: .* drew \[0, 2\] for the coalition \[\d\]"
    ):
        fit(loop, tmp_path, Plain(network(batch_norm=False)), make_three_clients(), 1)


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
