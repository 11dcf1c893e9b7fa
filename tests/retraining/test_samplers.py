"""With a sampler each coalition draws its own cohorts: against plain loops that draw and train by hand."""

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flsv
from flsv import FederatedLoop, Reporting
from flsv.aggregation import FedAdam
from flsv.functional import few_coalitions_shapley
from flsv.metrics import ShadowShapley
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
from helpers.coalitions_by_hand import SEED, Hand, data, in_fresh_processes, shadow_loop
from helpers.fits import assert_resumes, fit, trainer_for, vector
from helpers.models import Plain, adam, network
from helpers.recorded import Recorded

ROUNDS = 4


def uniform(members: Sequence[int], size: int, index: int) -> list[int]:
    """The first members in a random order of all three clients."""
    order = torch.randperm(3, generator=generator_for(SEED, "cohort", index)).tolist()
    return [client for client in order if client in members][:size]


def coins(members: Sequence[int], size: float, index: int) -> list[int]:
    """Those whose coin of chance size / |S| falls, two at least, in the same numbers for all coalitions."""
    draw = generator_for(SEED, "cohort", index)
    while True:
        numbers = torch.rand(3, generator=draw).tolist()
        drawn = [client for client in members if numbers[client] < min(1.0, size / len(members))]
        if len(drawn) >= min(2, len(members)):
            return drawn


SAMPLERS: dict[str, Any] = {
    "one of three": (lambda: UniformSampler(1), lambda members, index: uniform(members, 1, index)),
    "coins": (lambda: BernoulliSampler(1.5), lambda members, index: coins(members, 1.5, index)),
}


def by_hand(start: Any, draw: Any, rounds: int = ROUNDS) -> Tensor:
    """Minus the validation loss of each coalition's model."""
    found = []
    for mask in coalition_masks("all", 3):
        members = mask.nonzero()[:, 0].tolist()
        cohorts = [sorted(draw(members, index)) for index in range(rounds if members else 0)]
        found.append(Hand(copy.deepcopy(start.net), start.make_optimizer).utility(members, cohorts))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "copied"),
    [("one of three", False), pytest.param("coins", True, marks=pytest.mark.slow)],
)
def test_trained_coalitions_draw_cohorts_as_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, copied: bool
) -> None:
    """In forks, and in fresh processes; the run trains as without them."""
    make, draw = SAMPLERS[name]
    if copied:
        in_fresh_processes(monkeypatch)
    module = Plain(network(batch_norm=False, dropout=0.3), adam)
    start, metric = copy.deepcopy(module), Recorded(coalitions="all", performance="negative_loss")
    plain = copy.deepcopy(module)
    trained = fit(shadow_loop(metric, sampler=make()), tmp_path, module, data(), rounds=ROUNDS)
    without = FederatedLoop(sampler=make(), seed=SEED, reporting=Reporting(table=False))
    assert torch.equal(
        vector(fit(without, tmp_path, plain, data(), rounds=ROUNDS)), vector(trained)
    )
    torch.testing.assert_close(metric.game.flatten(), by_hand(start, draw), rtol=0, atol=1e-5)


def test_coalitions_with_a_sampler_equal_those_of_flsv_retrain(tmp_path: Path) -> None:
    """Their last round's values, of which the metric's are the mean over three rounds."""
    make, draw = SAMPLERS["coins"]
    module = Plain(network(batch_norm=False))
    loop = shadow_loop(ShadowShapley(coalitions="all", performance="negative_loss"), sampler=make())
    retrain = partial(
        flsv.retrain, module=module, data=data(), seeds=1, which="all", metric="negative_loss"
    )
    found = retrain(trainer_for(loop, tmp_path, ROUNDS))["value"]
    everybody = retrain(trainer_for(loop, tmp_path, ROUNDS), participation="all")["value"]
    start, masks = copy.deepcopy(module), coalition_masks("all", 3)
    trainer_for(loop, tmp_path, ROUNDS).fit(module, data())
    metric: Any = loop.metrics["shadow"]
    torch.testing.assert_close(
        metric.recent[-1, :, 0].double(), torch.tensor(found), rtol=1e-4, atol=1e-5
    )
    assert not torch.allclose(torch.tensor(everybody), torch.tensor(found), rtol=1e-4, atol=1e-5)
    for cohorts, of in ((draw, found), (lambda members, index: members, everybody)):
        expected = few_coalitions_shapley(masks, by_hand(start, cohorts)).values
        torch.testing.assert_close(torch.tensor(of), expected, rtol=1e-4, atol=1e-5)
    games = torch.stack([by_hand(start, draw, rounds) for rounds in (2, 3, 4)], dim=1)
    expected = few_coalitions_shapley(masks, games).values.mean(1)
    torch.testing.assert_close(
        loop.contributions["shadow"].double(), expected, rtol=1e-4, atol=1e-5
    )


def test_coalitions_with_a_sampler_resume_to_the_bit(tmp_path: Path) -> None:
    def federation() -> FederatedLoop:
        return shadow_loop(sampler=UniformSampler(1), aggregator=FedAdam(0.02), uploads=[TopK(0.3)])

    whole = assert_resumes(federation, tmp_path, lambda: Plain(network(batch_norm=False)), data)
    drawn = whole.metrics["shadow"].seen > 0  # others have no value
    assert whole.contributions["shadow"].isnan().tolist() == (~drawn).tolist()


class OwnSampler(ClientSampler):
    """A sampler that does not say how to draw among some of the clients."""

    def sample(self, *args: Any, **more: Any) -> Tensor:
        return torch.tensor([0, 1])

    def inclusion_probabilities(self, *args: Any, **more: Any) -> Tensor:
        return torch.tensor([1.0, 1.0, 0.0])


class Elsewhere(UniformSampler):
    """Draws others than the coalition's members."""

    def sample(self, *args: Any, **more: Any) -> Tensor:
        return torch.tensor([0, 2])


REFUSED: dict[str, tuple[str, Any]] = {
    "by values": ("it chooses by values or losses", lambda: SoftmaxSampler(2, "shadow")),
    "by losses": ("it chooses by values or losses", lambda: PowerOfChoice(1, 2)),
    "of one's own": ("has no method `among`", OwnSampler),
    "nobody": (r"draws none of the clients \[1\]", lambda: FixedCohort([0, 2])),
}


@pytest.mark.parametrize("what", REFUSED)
def test_samplers_that_cannot_draw_within_a_coalition_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    match, make = REFUSED[what]

    def step(*_: Any) -> Any:
        raise AssertionError("trained")

    module = Plain(network(batch_norm=False))
    monkeypatch.setattr(Plain, "training_step", step)
    loop = shadow_loop(ShadowShapley(), sampler=make())
    with pytest.raises(ConfigurationError, match=match):
        fit(loop, tmp_path, module, data(), 1)
    with pytest.raises(ConfigurationError, match=match):
        flsv.retrain(trainer_for(loop, tmp_path, 1), module, data())


def test_sampler_that_draws_outside_of_a_coalition_fails_that_coalition(tmp_path: Path) -> None:
    loop = shadow_loop(ShadowShapley(), sampler=Elsewhere(2))
    with pytest.warns(
        UserWarning, match=r"client 0: RuntimeError: .* drew \[0, 2\] for the coalition \[0\]"
    ):
        fit(loop, tmp_path, Plain(network(batch_norm=False)), data(), 1)
    assert loop.contributions["shadow"].isnan().all()


@pytest.mark.parametrize("sampler", [UniformSampler(2), BernoulliSampler(1.5)])
@pytest.mark.parametrize("members", [[3], [0, 3], [1, 2, 4], [0, 1, 2, 3, 4]])
def test_coalition_samplers_inclusion_probabilities_are_its_frequencies(
    sampler: Any, members: list[int]
) -> None:
    own, counts = sampler.among(members), torch.zeros(5)
    for index in range(2000):
        counts[own.sample(5, {}, generator_for(0, "cohort", index))] += 1
    torch.testing.assert_close(counts / 2000, own.inclusion_probabilities(5, {}), rtol=0, atol=0.05)
    assert sampler.members is None
