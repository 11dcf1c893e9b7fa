"""Each attack by its numbers."""

import numpy as np
import pytest
import torch

from flsv.attacks import FreeRider, GradientPoisoning

SIZE = 100_000
UPDATE = torch.randn(SIZE, generator=torch.Generator().manual_seed(0)) * 0.01


def sent(attack, seed=7):
    return attack.attack(UPDATE, None, torch.Generator().manual_seed(seed))


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0).item()


def test_gradient_poisoning_multiplies_every_entry_by_its_own_uniform_factor():
    factor = (sent(GradientPoisoning()).double() / UPDATE.double()).numpy()
    assert factor.min() == pytest.approx(0.5, abs=1e-3)
    assert factor.max() == pytest.approx(1.5, abs=1e-3)
    # U[0.5, 1.5]: every tenth of the range has a tenth of the entries (standard deviation 95 of 10,000).
    assert np.abs(np.histogram(factor, bins=10, range=(0.5, 1.5))[0] - SIZE / 10).max() < 5 * 95
    assert abs(np.corrcoef(factor, UPDATE)[0, 1]) < 0.02


def test_gradient_poisoning_adds_29_percent_of_noise_and_keeps_the_direction():
    noise = sent(GradientPoisoning()) - UPDATE
    assert (noise.norm() / UPDATE.norm()).item() == pytest.approx(1 / 12**0.5, rel=0.01)
    assert cosine(sent(GradientPoisoning()), UPDATE) == pytest.approx(1 / (1 + 1 / 12) ** 0.5, abs=0.002)
    # A range that is not centered scales as well: E[1 + b] = 3.
    assert (sent(GradientPoisoning(1, 3)) / UPDATE).mean().item() == pytest.approx(3, abs=0.01)


@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0])
def test_a_free_rider_that_sends_noise_of_a_typical_norm(scale):
    noise = sent(FreeRider("noise", scale=scale))
    assert (noise.norm() / UPDATE.norm()).item() == pytest.approx(scale, rel=1e-4)
    # Independent directions have a cosine of about 1 / sqrt(P) = 0.003.
    assert abs(cosine(noise, UPDATE)) < 0.015
    assert abs(cosine(noise, sent(FreeRider("noise", scale=scale), seed=1))) < 0.015
