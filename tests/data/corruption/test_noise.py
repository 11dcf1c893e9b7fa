"""Gaussian noise: its moments, on which samples and which pixels."""

import pytest
import torch
from sklearn.datasets import load_digits

from flsv.data import GaussianNoise
from flsv.errors import ConfigurationError

X = torch.randn(500, 3, 12, 12, generator=torch.Generator().manual_seed(1))
Y = torch.zeros(500, dtype=torch.long)


def added(corruption, x=X, seed=0):
    noisy, y = corruption(x.clone(), Y[: len(x)].clone(), 2, torch.Generator().manual_seed(seed))
    assert torch.equal(y, Y[: len(x)])
    assert noisy.dtype == x.dtype
    return noisy - x


def test_shapleyfls_noise_is_standard_normal():
    noise = added(GaussianNoise()).double()
    # 216,000 draws: the mean has a standard error of 0.0022, the variance one of 0.003, the kurtosis one of 0.01.
    assert abs(noise.mean()) < 0.01
    assert abs(noise.var() - 1) < 0.015
    assert abs((noise**4).mean() - 3) < 0.06
    assert abs(torch.corrcoef(noise.flatten(1)[:, :2].T)[0, 1]) < 0.2


@pytest.mark.parametrize("percent", [0, 5, 10, 15, 20])
def test_guos_percentages_are_standard_deviations(percent):
    noise = added(GaussianNoise(std=percent / 100))
    assert noise.std().item() == pytest.approx(percent / 100, rel=0.01)


def test_a_mean():
    assert added(GaussianNoise(std=0.1, mean=2.0)).mean().item() == pytest.approx(2, abs=0.01)


def test_a_share_of_the_samples():
    touched = (added(GaussianNoise(sample_rate=0.15)) != 0).flatten(1).any(1)
    assert int(touched.sum()) == 75
    assert torch.equal(touched, (added(GaussianNoise(sample_rate=0.15)) != 0).flatten(1).all(1))


def test_a_share_of_the_pixels_in_all_channels():
    touched = added(GaussianNoise(pixel_rate=0.2)) != 0
    assert torch.equal(touched[:, 0], touched[:, 1])
    # 72,000 pixels: a standard error of 0.0015.
    assert touched.float().mean().item() == pytest.approx(0.2, abs=0.008)
    table = added(GaussianNoise(pixel_rate=0.2), torch.zeros(500, 40)) != 0
    assert table.float().mean().item() == pytest.approx(0.2, abs=0.02)


def test_more_noise_makes_the_digits_harder():
    pixels, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = pixels.float().view(-1, 1, 8, 8) / 16
    centers = torch.stack([images[:1200][labels[:1200] == label].mean(0).flatten() for label in range(10)])
    accuracy = []
    for std in (0.0, 0.5, 1.0):
        noisy, _ = GaussianNoise(std=std)(images.clone(), labels, 10, torch.Generator().manual_seed(0))
        nearest = torch.cdist(noisy[1200:].flatten(1), centers).argmin(1)
        accuracy.append((nearest == labels[1200:]).float().mean())
    assert accuracy[0] > 0.85
    assert accuracy[0] > accuracy[1] > accuracy[2]
    assert accuracy[2] < 0.6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"std": -1.0}, "std=-1.0.: expected"),
        ({"std": float("nan")}, "std=nan.: expected"),
        ({"mean": float("inf")}, "mean=inf.: expected"),
        ({"sample_rate": 2}, r"sample_rate=2.: .* in \[0, 1\]"),
        ({"pixel_rate": -0.1}, r"pixel_rate=-0.1.: .* in \[0, 1\]"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        GaussianNoise(**arguments)


def test_bytes_cannot_take_it():
    with pytest.raises(ConfigurationError, match=r"these are torch.uint8"):
        added(GaussianNoise(), torch.zeros(4, 1, 2, 2, dtype=torch.uint8))


def test_half_precision_and_double_stay_what_they_are():
    for dtype in (torch.float16, torch.float64):
        assert added(GaussianNoise(), X.to(dtype)).std().item() == pytest.approx(1, abs=0.01)
