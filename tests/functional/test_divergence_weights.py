"""Equation 6 against NumPy, and what it comes to at its edges."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from flsv.functional import divergence_weights, label_divergence


def by_hand(samples: Any, divergence: Any, a: float, b: float, normalize: bool) -> np.ndarray:
    n, f = np.asarray(samples, float), np.asarray(divergence, float)
    n = n / n.sum()
    f = f / f.sum() if normalize else f
    d = np.maximum(n - a * f + b, 0)
    return d / d.sum()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("a", "b"), [(0.6, 0.1), (0.0, 0.0), (1.5, 0.3), (0.6, -0.1)])
def test_against_numpy(a: float, b: float, normalize: bool) -> None:
    samples, divergence = [10, 200, 30, 60], [0.02, 0.05, 0.3, 0.0]
    weights = divergence_weights(torch.tensor(samples), torch.tensor(divergence), a, b, normalize)
    np.testing.assert_allclose(weights.numpy(), by_hand(samples, divergence, a, b, normalize), rtol=1e-6)
    assert weights.sum().item() == pytest.approx(1)


def test_equal_divergences_cancel_whatever_they_are() -> None:
    samples = torch.tensor([100, 100, 200])
    expected = (samples / 400 - 0.6 / 3 + 0.1).clamp_min(0)
    for value in (1e-9, 0.5, 2.3):
        weights = divergence_weights(samples, torch.full((3,), value))
        torch.testing.assert_close(weights.float(), expected / expected.sum())


def test_the_papers_biased_clients_have_negative_weights_without_normalization() -> None:
    """Four clients with two of ten classes each and one with all: raw divergences leave only the last."""
    counts = torch.zeros(5, 10)
    for client, pair in enumerate([(1, 2), (3, 4), (5, 6), (7, 0)]):
        counts[client, list(pair)] = 50
    counts[4] = 10
    divergence = label_divergence(counts)
    assert divergence.tolist() == pytest.approx([math.log(5)] * 4 + [0])
    assert 0.2 - 0.6 * math.log(5) + 0.1 < 0
    raw = divergence_weights(counts.sum(1), divergence, normalize_divergence=False)
    assert raw.tolist() == [0, 0, 0, 0, 1]
    weights = divergence_weights(counts.sum(1), divergence)
    torch.testing.assert_close(weights, torch.tensor([0.15, 0.15, 0.15, 0.15, 0.3]).double() / 0.9)


def test_everybody_clipped_falls_back_to_samples() -> None:
    samples = torch.tensor([100, 300])
    with pytest.warns(UserWarning, match="falling back to shares of samples"):
        weights = divergence_weights(samples, torch.ones(2), a=5.0, b=0.0)
    assert weights.tolist() == [0.25, 0.75]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert divergence_weights(samples, torch.tensor([0.0, 1.0]), a=5.0, b=0.0).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"divergence": torch.zeros(3)}, r"divergence \[k\], got \[2\] and \[3\]"),
        ({"num_samples": torch.zeros(0), "divergence": torch.zeros(0)}, r"num_samples \[k\]"),
        ({"divergence": torch.tensor([0.1, torch.inf])}, "divergence=.*finite"),
        ({"divergence": torch.tensor([0.1, -0.1])}, "divergence=.*not negative"),
        ({"num_samples": torch.tensor([1, -1])}, "num_samples=.*not negative"),
        ({"num_samples": torch.zeros(2)}, "all 0"),
        ({"a": float("nan")}, "a=nan"),
    ],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        divergence_weights(**{"num_samples": torch.tensor([1, 2]), "divergence": torch.zeros(2), **arguments})
