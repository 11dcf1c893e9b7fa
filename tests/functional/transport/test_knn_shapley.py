"""Theorem 1 against Shapley's definition over all subsets."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from flsv.functional.transport import knn_shapley


def brute_force(x: np.ndarray, y: np.ndarray, x2: np.ndarray, y2: np.ndarray, k: int) -> np.ndarray:
    m = len(x)

    def value(members: tuple[int, ...]) -> float:
        total = 0.0
        for sample, label in zip(x2, y2):
            nearest = sorted(members, key=lambda i: ((x[i] - sample) ** 2).sum())[:k]
            total += sum(y[i] == label for i in nearest) / k
        return total / len(x2)

    result = np.zeros(m)
    for i in range(m):
        rest = [j for j in range(m) if j != i]
        for size in range(m):
            for members in itertools.combinations(rest, size):
                result[i] += (value((*members, i)) - value(members)) / (m * math.comb(m - 1, size))
    return result


@pytest.mark.parametrize("m", [1, 2, 4, 7])
@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_values_are_shapleys(m: int, k: int) -> None:
    rng = np.random.default_rng(m)
    x, x2, y, y2 = rng.normal(size=(m, 2)), rng.normal(size=(3, 2)), rng.integers(0, 2, m), rng.integers(0, 2, 3)
    found = knn_shapley(*(torch.from_numpy(a) for a in (x, y, x2, y2)), k=k)
    np.testing.assert_allclose(found, brute_force(x, y, x2, y2, k), atol=1e-12)
