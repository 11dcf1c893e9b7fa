"""KNN-Shapley against enumeration."""

import numpy as np
import pytest
import torch
from torch import Tensor

from flsv.functional import exact_shapley, knn_shapley


@pytest.mark.parametrize("m", [1, 2, 7])
@pytest.mark.parametrize("k", [1, 5, 9])
def test_knn_shapley_equals_enumeration(m: int, k: int) -> None:
    rng = np.random.default_rng(m)
    x, x2, y, y2 = (
        rng.normal(size=(m, 2)),
        rng.normal(size=(3, 2)),
        rng.integers(0, 2, m),
        rng.integers(0, 2, 3),
    )

    def value(mask: Tensor) -> float:
        total = 0.0
        for sample, label in zip(x2, y2):
            nearest = sorted(
                mask.nonzero().flatten().tolist(), key=lambda i: ((x[i] - sample) ** 2).sum()
            )[:k]
            total += sum(y[i] == label for i in nearest) / k
        return total / len(x2)

    expected = exact_shapley(
        lambda masks: torch.tensor([value(mask) for mask in masks], dtype=torch.float64), m
    )
    found = knn_shapley(*(torch.from_numpy(a) for a in (x, y, x2, y2)), k=k)
    np.testing.assert_allclose(found, expected.values, atol=1e-12)
