"""KNN-Shapley against enumeration."""

import numpy as np
import pytest
import torch
from torch import Tensor

from flsv.functional import exact_shapley, knn_shapley


@pytest.mark.parametrize("m", [1, 2, 7])
@pytest.mark.parametrize("k", [1, 5, 9])
def test_knn_shapley_equals_enumeration(m, k):
    rng = np.random.default_rng(m)
    x = rng.normal(size=(m, 2))
    x2 = rng.normal(size=(3, 2))
    y = rng.integers(0, 2, m)
    y2 = rng.integers(0, 2, 3)

    def value(mask: Tensor) -> float:
        members = mask.nonzero().flatten().tolist()
        total = 0.0
        for sample, label in zip(x2, y2):
            squared = {i: ((x[i] - sample) ** 2).sum() for i in members}
            nearest = sorted(members, key=squared.__getitem__)[:k]
            total += sum(y[i] == label for i in nearest) / k

        return total / len(x2)

    def utility(masks: Tensor) -> Tensor:
        return torch.tensor([value(mask) for mask in masks], dtype=torch.float64)

    values = knn_shapley(
        *map(
            torch.from_numpy,
            (
                x,
                y,
                x2,
                y2,
            ),
        ),
        k=k,
    )

    np.testing.assert_allclose(values, exact_shapley(utility, m).values, atol=1e-12)
