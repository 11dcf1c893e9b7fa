"""Clipping, noise and budget."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from flsv.errors import ConfigurationError
from flsv.parameters import ParameterSpace
from flsv.privacy import GaussianPrivacy
from flsv.seeding import generator_for


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


def test_every_client_and_round_has_its_own_noise_and_always_the_same() -> None:
    privacy = GaussianPrivacy(clip=1.0, noise_multiplier=1.0)
    update = torch.zeros(10_000)
    streams = [(0, 0), (0, 1), (1, 0)]
    sent = torch.stack([privacy.protect(update, generator_for(7, "privacy", *stream)) for stream in streams])
    again = torch.stack([privacy.protect(update, generator_for(7, "privacy", *stream)) for stream in streams])
    assert torch.equal(sent, again)
    correlations = torch.corrcoef(sent) - torch.eye(3)
    assert correlations.abs().max() < 5 / math.sqrt(10_000)


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
