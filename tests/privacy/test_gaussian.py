"""Clipping, noise and budget."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from flsv.errors import ConfigurationError
from flsv.parameters import ParameterSpace
from flsv.privacy import GaussianPrivacy, gaussian_epsilon
from flsv.seeding import generator_for
from flsv.uploads import UploadContext


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("length", [0.3, 1.0, 2.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_shortens_what_is_too_long_and_nothing_else(length: float, dtype: torch.dtype) -> None:
    update = torch.randn(1000, generator=generator()).to(dtype)
    update *= length / update.norm()
    before = update.clone()
    sent = GaussianPrivacy(clip=1.5, noise_multiplier=0).protect(update, generator())
    assert sent.dtype == dtype
    assert sent.norm().item() == pytest.approx(min(length, 1.5), rel=1e-6)
    torch.testing.assert_close(sent, update * min(1, 1.5 / length))
    assert torch.equal(update, before)
    if length < 1.5:
        assert torch.equal(sent, update)
        assert sent.data_ptr() != update.data_ptr()


def test_the_norm_of_a_large_update_is_not_underestimated() -> None:
    """torch's own float32 norm of this loses 0.1 %, and the bound would be exceeded by as much."""
    update = torch.randn(25_000_000, generator=generator())
    sent = GaussianPrivacy(clip=1.0, noise_multiplier=0).protect(update, generator())
    assert torch.linalg.vector_norm(sent, dtype=torch.float64).item() == pytest.approx(1, abs=1e-6)


def test_noise_has_the_standard_deviation_that_epsilon_assumes() -> None:
    size, privacy = 200_000, GaussianPrivacy(clip=0.5, noise_multiplier=3.0)
    update = torch.zeros(size)
    update[0] = 100.0
    sent = privacy.protect(update, generator())
    noise = sent.clone()
    noise[0] -= 0.5  # the update, clipped
    # 3 x 0.5; the standard error of a standard deviation is that over sqrt(2 n), of a mean over sqrt(n).
    assert noise.std().item() == pytest.approx(1.5, abs=5 * 1.5 / math.sqrt(2 * size))
    assert noise.mean().item() == pytest.approx(0, abs=5 * 1.5 / math.sqrt(size))
    kurtosis = ((noise / noise.std()) ** 4).mean().item()
    assert kurtosis == pytest.approx(3, abs=5 * math.sqrt(24 / size))


def test_noise_does_not_depend_on_the_update() -> None:
    privacy = GaussianPrivacy(clip=1.0, noise_multiplier=1.0)
    small, large = (torch.full((50,), value) for value in (0.001, 7.0))
    bare = GaussianPrivacy(clip=1.0, noise_multiplier=0.0)
    noises = [privacy.protect(u, generator(4)) - bare.protect(u, generator(4)) for u in (torch.zeros(50), small, large)]
    torch.testing.assert_close(noises[0], noises[1])
    torch.testing.assert_close(noises[0], noises[2])


def test_every_client_and_round_has_its_own_noise_and_always_the_same() -> None:
    privacy = GaussianPrivacy(clip=1.0, noise_multiplier=1.0)
    update = torch.zeros(10_000)
    streams = [(0, 0), (0, 1), (1, 0)]
    sent = torch.stack([privacy.protect(update, generator_for(7, "privacy", *stream)) for stream in streams])
    again = torch.stack([privacy.protect(update, generator_for(7, "privacy", *stream)) for stream in streams])
    assert torch.equal(sent, again)
    correlations = torch.corrcoef(sent) - torch.eye(3)
    assert correlations.abs().max() < 5 / math.sqrt(10_000)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_so_and_is_dropped_by_the_loop(bad: float) -> None:
    sent = GaussianPrivacy(clip=1.0, noise_multiplier=1.0).protect(torch.tensor([1.0, bad]), generator())
    assert not sent.isfinite().all()


@pytest.mark.parametrize("accountant", ["exact", "rdp"])
@pytest.mark.parametrize(("noise_multiplier", "max_epsilon"), [(2.0, 11.5), (1.0, 5.0), (1.0, 100.0), (20.0, 3.0)])
def test_the_budget_lasts_as_long_as_it_lasts(accountant: Any, noise_multiplier: float, max_epsilon: float) -> None:
    privacy = GaussianPrivacy(1.0, noise_multiplier, max_epsilon=max_epsilon, accountant=accountant)
    rounds = privacy.affordable_rounds()
    assert rounds is not None
    counted = 1
    while gaussian_epsilon(noise_multiplier, counted + 1, accountant=accountant) <= max_epsilon:
        counted += 1
    assert rounds == counted
    assert privacy.epsilon(rounds) <= max_epsilon < privacy.epsilon(rounds + 1)


def test_without_a_budget() -> None:
    assert GaussianPrivacy(1.0, 1.0).affordable_rounds() is None
    assert GaussianPrivacy(1.0, 0.0).epsilon(3) == math.inf


def test_delta_and_accountant_are_those_asked_for() -> None:
    privacy = GaussianPrivacy(clip=1.0, noise_multiplier=2.0, delta=1e-3, accountant="rdp")
    assert privacy.epsilon(4) == gaussian_epsilon(2.0, 4, 1e-3, "rdp")
    assert repr(privacy) == "GaussianPrivacy(clip=1.0, noise_multiplier=2.0, delta=0.001, accountant='rdp')"


def test_buffers_do_not_bear_noise() -> None:
    plain, normed = nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    privacy = GaussianPrivacy(clip=1.0, noise_multiplier=1.0)
    privacy.check(ParameterSpace(plain))
    with pytest.raises(ConfigurationError, match=r"such as '1\.running_var'.*GroupNorm"):
        privacy.check(ParameterSpace(normed))
    GaussianPrivacy(clip=1.0, noise_multiplier=0.0).check(ParameterSpace(normed))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip": 0.0}, r"clip=0\.0"),
        ({"clip": math.inf}, "clip=inf"),
        ({"clip": math.nan}, "clip=nan"),
        ({"noise_multiplier": -1.0}, r"noise_multiplier=-1\.0"),
        ({"delta": 0.0}, r"delta=0\.0"),
        ({"accountant": "prv"}, "accountant='prv'"),
        ({"max_epsilon": 0.0}, "max_epsilon=.*a finite number"),
        ({"max_epsilon": math.inf}, "max_epsilon=.*a finite number"),
        ({"max_epsilon": 4.0}, r"one round has epsilon = 4\.377 already. Raise noise_multiplier"),
        ({"noise_multiplier": 0.0, "max_epsilon": 4.0}, "one round has epsilon = inf already"),
    ],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GaussianPrivacy(**{"clip": 1.0, "noise_multiplier": 1.0, **arguments})


def test_noise_on_the_updates_device() -> None:
    """Is the usual noise on the CPU; other devices: ``tests/cuda``."""
    update, context = torch.ones(50), UploadContext(1, 3, 50, 4, seed=7)
    usual, there = (GaussianPrivacy(1.0, 2.0, noise_on_device=where) for where in (False, True))
    assert torch.equal(usual.apply(update, context), there.apply(update, context))
    assert "noise_on_device=True" in repr(there)
    assert "noise_on_device" not in repr(usual)
