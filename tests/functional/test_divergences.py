"""Divergences of labels against SciPy, and the weights made of them; distances against NumPy."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.stats import entropy

from flsv.functional import divergence_weights, label_divergence
from helpers import warns

COUNTS = torch.tensor([[3, 1, 0, 6], [5, 5, 5, 5], [0, 0, 7, 0], [100, 200, 1, 1]])


def test_label_divergence_equals_that_of_scipy():
    counts = COUNTS.double().numpy()
    shares = counts / counts.sum(1, keepdims=True)
    uniform = np.full(4, 0.25)
    expected = [entropy(row, uniform) for row in shares]
    assert_allclose(
        label_divergence(COUNTS),
        expected,
        rtol=1e-6,
        atol=1e-8,
    )


@pytest.mark.parametrize(
    "counts",
    [
        [[1, 2], [0, 0]],
        [2, -1],
        [[[1, 2]]],
    ],
)
def test_label_divergence_of_wrong_counts_raises(counts):
    with pytest.raises(ValueError, match="of at least 0, with a sample at every client"):
        label_divergence(torch.tensor(counts))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (0.6, 0.1),
        (0.0, 0.0),
        (1.5, 0.3),
        (0.6, -0.1),
    ],
)
def test_divergence_weights_equal_numpys(a, b):
    """In proportion to max(share of samples - a * share of divergences + b, 0)."""
    samples = np.array([10, 200, 30, 60])
    divergences = np.array([0.02, 0.05, 0.3, 0.0])

    weights = divergence_weights(
        torch.from_numpy(samples),
        torch.from_numpy(divergences),
        a,
        b,
    )

    shares = samples / samples.sum()
    penalties = a * divergences / divergences.sum()
    discounted = np.maximum(shares - penalties + b, 0)
    expected = discounted / discounted.sum()
    assert_allclose(weights.numpy(), expected, rtol=1e-6)


def test_divergence_weights_all_clipped_to_0_fall_back_to_samples():
    with warns("so shares of samples are returned"):
        weights = divergence_weights(
            torch.tensor([100, 300]),
            torch.ones(2),
            a=5.0,
            b=0.0,
        )

    assert weights.tolist() == [100 / 400, 300 / 400]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"divergence": torch.zeros(3)}, r"divergence \[k\], got \[2\] and \[3\]"),
        (
            {"divergence": torch.tensor([0.1, torch.inf])},
            "divergence=.*finite",
        ),
        (
            {"num_samples": torch.tensor([1, -1])},
            "num_samples=.*not negative",
        ),
        ({"num_samples": torch.zeros(2)}, "all 0"),
    ],
)
def test_divergence_weights_with_wrong_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        divergence_weights(
            **{
                "num_samples": torch.tensor([1, 2]),
                "divergence": torch.zeros(2),
                **arguments,
            }
        )
