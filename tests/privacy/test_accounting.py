"""Epsilon against the analytic Gaussian mechanism, against simulation, and between the accountants."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from scipy.special import log_ndtr

from flsv.errors import ConfigurationError
from flsv.privacy import gaussian_epsilon


def analytic_delta(epsilon: float, noise_multiplier: float) -> float:
    """Balle and Wang (ICML 2018), theorem 8: the least delta of one release at this epsilon."""
    far, near = 1 / (2 * noise_multiplier), epsilon * noise_multiplier
    return math.exp(log_ndtr(far - near)) - math.exp(epsilon + log_ndtr(-far - near))


@pytest.mark.parametrize("delta", [1e-5, 1e-3])
@pytest.mark.parametrize(
    ("noise_multiplier", "rounds"), [(0.5, 1), (1.0, 1), (1.0, 20), (2.0, 7), (2.0, 100), (8.0, 3)]
)
def test_many_releases_are_one_with_less_noise(noise_multiplier: float, rounds: int, delta: float) -> None:
    epsilon = gaussian_epsilon(noise_multiplier, rounds, delta)
    assert analytic_delta(epsilon, noise_multiplier / math.sqrt(rounds)) == pytest.approx(delta, rel=1e-6)


def test_epsilon_holds_for_the_privacy_losses_of_real_draws() -> None:
    """delta = E[max(0, 1 - exp(epsilon - loss))] over the losses of T draws; at delta = 0.05 draws can tell."""
    noise_multiplier, rounds, delta = 2.0, 5, 0.05
    draws = noise_multiplier * torch.randn(200_000, rounds, generator=torch.Generator().manual_seed(0))
    outputs = 1 + draws  # the client's data are in: a shift by the sensitivity, 1
    losses = ((outputs**2 - (outputs - 1) ** 2) / (2 * noise_multiplier**2)).sum(1)
    exceeding = (1 - (gaussian_epsilon(noise_multiplier, rounds, delta) - losses).exp()).clamp_min(0)
    assert exceeding.mean().item() == pytest.approx(delta, abs=4 * exceeding.std().item() / math.sqrt(len(losses)))


@pytest.mark.parametrize(("noise_multiplier", "rounds"), [(2.0, 1), (2.0, 10), (5.0, 20)])
def test_the_accountants_agree(noise_multiplier: float, rounds: int) -> None:
    exact = gaussian_epsilon(noise_multiplier, rounds)
    assert gaussian_epsilon(noise_multiplier, rounds, accountant="pld") == pytest.approx(exact, rel=1e-4)
    assert exact < gaussian_epsilon(noise_multiplier, rounds, accountant="rdp") < 1.15 * exact


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'flsv\[privacy\]'"):
        gaussian_epsilon(1.234, 1)
    assert gaussian_epsilon(0.0, 1) == math.inf
