"""Samplers: sizes, chances, errors."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flsv.errors import ConfigurationError
from flsv.functional import importance_probabilities
from flsv.sampling import (
    BernoulliSampler,
    ClientSampler,
    FullParticipation,
    ShapleyImportanceSampler,
    SoftmaxSampler,
    SystematicShapleySampler,
    UniformSampler,
)


def frequencies(
    sampler: ClientSampler, n: int, contributions: dict[str, torch.Tensor], draws: int = 4000
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(n)
    for _ in range(draws):
        counts[sampler.sample(n, contributions, generator)] += 1
    return counts / draws


SSV = {"ssv": torch.tensor([0.9, 0.4, 0.1, 0.3, 0.05]), "sv": torch.tensor([0.2, -0.1, 0.05, 0.0, 0.1])}


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler",
    [
        FullParticipation(),
        UniformSampler(2),
        BernoulliSampler(2),
        BernoulliSampler(1.2),
        BernoulliSampler(1.5, min_cohort=1),
        ShapleyImportanceSampler(2, "ssv"),
        SoftmaxSampler(3, "sv", temperature=0.1),
        SystematicShapleySampler(2, "ssv"),
        SystematicShapleySampler(3, "ssv"),
        SystematicShapleySampler(3, "unknown"),
    ],
    ids=repr,
)
def test_inclusion_probabilities_are_the_frequencies(sampler: ClientSampler) -> None:
    seen = frequencies(sampler, 5, SSV)
    said = sampler.inclusion_probabilities(5, SSV)
    # Five standard deviations of 4000 draws (and of the softmax sampler's own 4096).
    assert ((seen - said).abs() <= 5 * (2 * 0.25 / 4000) ** 0.5).all(), (seen, said)


def test_importance_coins_are_theorem_5_1() -> None:
    sampler = ShapleyImportanceSampler(2, "ssv")
    torch.testing.assert_close(sampler.coins(5, SSV), importance_probabilities(SSV["ssv"], 2))
    assert sampler.coins(5, {}).tolist() == pytest.approx([0.4] * 5)  # no values yet
    one = {"ssv": torch.tensor([1.0, 0, 0, 0, 0])}
    assert len(sampler.sample(5, one, torch.Generator().manual_seed(0))) >= 2  # and it returns
    unknown = {"ssv": torch.tensor([0.9, float("nan"), 0.1])}
    assert sampler.coins(3, unknown)[1] > sampler.coins(3, unknown)[2]


def test_softmax_prefers_the_relevant() -> None:
    seen = frequencies(SoftmaxSampler(1, "sv", temperature=0.05), 5, SSV)
    expected = (SSV["sv"] / 0.05).softmax(0)
    assert ((seen - expected).abs() < 0.04).all()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: BernoulliSampler(0), "expected_cohort=0.*a finite number above 0"),
        (lambda: BernoulliSampler(2, min_cohort=3), "expected 1 or 2"),
        (lambda: BernoulliSampler(9).check(5), r"cannot be met: the federation has 5 clients"),
        (lambda: SoftmaxSampler(0), "cohort_size=0.*a whole number of at least 1"),
        (lambda: SoftmaxSampler(1, temperature=0), "temperature=0"),
        (lambda: SoftmaxSampler(9).check(5), "cannot be met"),
    ],
)
def test_more_errors(make: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        make()


@pytest.mark.parametrize("expected", [1e-9, 1e-3])
@pytest.mark.parametrize("make", [BernoulliSampler, ShapleyImportanceSampler])
def test_a_cohort_that_is_never_drawn_is_refused(make: Any, expected: float) -> None:
    match = r"of 5 clients, 2 would take part in \S+ of all draws only. Raise expected_cohort"
    with pytest.raises(ConfigurationError, match=match):
        make(expected).check(5)
    make(0.5).check(5)
    make(1).check(2)


@pytest.mark.parametrize("min_cohort", [1, 2])
def test_coins_that_hardly_ever_make_a_cohort(min_cohort: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The surrogate value of a client that is always the worse of two falls exponentially, and its coin with it."""
    tiny = {"ssv": torch.tensor([1.0, 1e-12])}
    sampler = ShapleyImportanceSampler(1, min_cohort=2)
    assert sampler.sample(2, tiny, torch.Generator().manual_seed(0)).tolist() == [0, 1]
    assert sampler.inclusion_probabilities(2, tiny).tolist() == [1, 1]
    monkeypatch.setattr("flsv.sampling.contribution._DRAWS", 10)
    # Of more clients, each coin 1e-9, pairs and single ones are equally likely.
    sampler = BernoulliSampler(5e-9, min_cohort)
    drawn = torch.zeros(5)
    for seed in range(1000):
        cohort = sampler.sample(5, {}, torch.Generator().manual_seed(seed))
        assert len(cohort) == min_cohort
        drawn[cohort] += 1
    expected = min_cohort / 5
    assert (drawn / 1000 - expected).abs().max() < 5 * (expected * (1 - expected) / 1000) ** 0.5
    assert sampler.inclusion_probabilities(5, {}).tolist() == pytest.approx([expected] * 5)


@pytest.mark.slow
@pytest.mark.parametrize("min_cohort", [1, 2])
def test_clients_drawn_one_by_one_are_drawn_as_by_repeated_draws(
    min_cohort: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = ShapleyImportanceSampler(1.2, min_cohort=min_cohort)
    monkeypatch.setattr("flsv.sampling.contribution._DRAWS", 0)
    seen = frequencies(sampler, 5, SSV)
    assert ((seen - sampler.inclusion_probabilities(5, SSV)).abs() < 0.04).all()


class _Work(TorchDispatchMode):
    """How many numbers the operations within have made."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.made += result.numel() if isinstance(result, torch.Tensor) else 0
        return result


def test_inclusion_probabilities_of_many_clients() -> None:
    """Everybody else's coins are not gone through once for every client."""
    coins = torch.rand(300, generator=torch.Generator().manual_seed(0)) * 0.01
    coins[7] = 1
    sampler = BernoulliSampler(1)
    sampler.coins = lambda num_clients, contributions: coins  # type: ignore[method-assign]
    with _Work() as work:
        said = sampler.inclusion_probabilities(300, {})
    assert work.made < 30 * 300
    p, size = coins.double(), np.ones(1)
    for coin in p.tolist():
        size = np.convolve(size, [1 - coin, coin])
    someone_else = torch.stack([1 - (1 - torch.cat([p[:i], p[i + 1 :]])).prod() for i in range(300)])
    torch.testing.assert_close(said, (p * someone_else / size[2:].sum()).float())


@pytest.mark.parametrize(
    "weights",
    [
        torch.rand(40, generator=torch.Generator().manual_seed(0)),
        torch.tensor([5.0, 4.0] + [0.1] * 10),  # two who are always there
        torch.tensor([1.0, 1.0] + [0.0] * 10),  # fewer than a cohort weigh anything
        torch.tensor([1.0, float("nan")] + [1e-7] * 10),
        torch.ones(5),  # everybody
    ],
    ids=["any", "sure", "nothing", "unseen", "all"],
)
def test_a_systematic_cohort_has_one_size_and_weights_that_sum_to_one(weights: torch.Tensor) -> None:
    sampler, contributions = SystematicShapleySampler(5, "ssv"), {"ssv": weights}
    n, generator = len(weights), torch.Generator().manual_seed(1)
    chances = sampler.inclusion_probabilities(n, contributions)
    torch.testing.assert_close(chances.sum(), torch.tensor(5.0))
    together = torch.zeros(n, n)
    for _ in range(300):
        cohort = sampler.sample(n, contributions, generator)
        assert len(cohort) == 5
        assert (cohort.diff() > 0).all()  # nobody twice
        together[cohort[:, None], cohort] += 1
        if (chances < 1).all():
            total = (weights[cohort] / weights.sum() / chances[cohort]).sum()
            torch.testing.assert_close(total, torch.tensor(1.0))
    if n <= 12 and not (weights == 0).any() and not weights.isnan().any():
        assert (together > 0).all()  # the line's order changes: no two clients always miss each other
