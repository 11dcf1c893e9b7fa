"""The regression against constrained least squares."""

import numpy as np
import pytest
import torch
from functional.shapley.games import random_table, rng, table_game

from flsv.functional import (
    regression_shapley,
)
from flsv.functional.shapley.layers import LayeredSample
from flsv.functional.shapley.memoized_game import MemoizedGame


def constrained_least_squares(masks: np.ndarray, gain: np.ndarray, weights: np.ndarray, total: float) -> np.ndarray:
    """KKT system of min sum w (y - z phi)^2 with sum phi = total."""
    n = masks.shape[1]
    system = np.ones((n + 1, n + 1))
    system[:n, :n] = 2 * masks.T @ (weights[:, None] * masks)
    system[n, n] = 0
    return np.linalg.solve(system, np.append(2 * masks.T @ (weights * gain), total))[:n]


@pytest.mark.parametrize("n", [7, 8])
def test_paired_regression_equals_constrained_least_squares(n: int) -> None:
    table = random_table(n, seed=n)
    estimate = regression_shapley(table_game(table), n, budget=60, generator=rng(5))
    sample = LayeredSample(n, paired=True, generator=rng(5))
    sample.grow(29)
    masks, weights = [], []
    for layer in sample.layers:
        masks += [layer.masks, ~layer.masks]
        share = layer.sizes / (layer.size * (n - layer.size) * len(layer.masks))
        weights += [share] * (2 * len(layer.masks))
    coalitions = torch.cat(masks)
    gain = (MemoizedGame(table_game(table), n)(coalitions)[:, 0] - table[0]).numpy()
    solution = constrained_least_squares(
        coalitions.double().numpy(), gain, np.array(weights), float(table[-1] - table[0])
    )
    np.testing.assert_allclose(estimate.values.numpy(), solution)
