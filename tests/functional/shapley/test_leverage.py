"""Leverage SHAP: equally many coalitions of every size, and the regression that Musco and Witter solve."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
import torch
from functional.shapley.games import Watched, accuracy_table, random_table, rng, table_game

from flsv.functional.shapley import exact_shapley, leverage_shapley, regression_shapley


def reference(masks: np.ndarray, utilities: np.ndarray, empty: float, grand: float) -> np.ndarray:
    """Their algorithm on these coalitions: rows weighted by kernel over sampling probability, projected on sum 0."""
    n, sizes = masks.shape[1], masks.sum(1)
    drawn = np.array([(sizes == s).sum() / comb(n, int(s)) for s in sizes])
    weights = 1 / (np.array([comb(n, int(s)) for s in sizes]) * sizes * (n - sizes)) / drawn
    projection = np.eye(n) - 1 / n
    a = np.sqrt(weights)[:, None] * masks @ projection
    b = np.sqrt(weights) * (utilities - empty - (grand - empty) * sizes / n)
    return np.linalg.lstsq(a, b, rcond=1e-10)[0] + (grand - empty) / n


@pytest.mark.parametrize(("n", "budget"), [(7, 40), (8, 60), (10, 40), (10, 100)])
def test_the_authors_regression(n: int, budget: int) -> None:
    table = random_table(n, seed=n)
    utility = Watched(table_game(table))
    estimate = leverage_shapley(utility, n, budget=budget, generator=rng(1))
    masks = np.array([mask for mask in utility.seen if 0 < sum(mask) < n], dtype=float)
    utilities = table_game(table)(torch.from_numpy(masks).bool()).numpy()
    expected = reference(masks, utilities, float(table[0]), float(table[-1]))
    np.testing.assert_allclose(estimate.values.numpy(), expected, atol=1e-9)


def test_as_many_coalitions_of_every_size() -> None:
    utility = Watched(lambda masks: masks.sum(dim=1).double())
    leverage_shapley(utility, 11, budget=2 + 10 * 11, generator=rng())
    sizes = torch.tensor([sum(mask) for mask in utility.seen]).bincount()
    assert sizes.tolist() == [1] + [11] * 10 + [1]
    utility = Watched(lambda masks: masks.sum(dim=1).double())
    leverage_shapley(utility, 11, budget=2 + 10 * 6, generator=rng())  # sizes 1 and 10 are not complete
    assert torch.tensor([sum(mask) for mask in utility.seen]).bincount().tolist() == [1] + [6] * 10 + [1]
    utility = Watched(lambda masks: masks.sum(dim=1).double())
    leverage_shapley(utility, 10, budget=2 + 9 * 6, generator=rng())  # in the middle a pair is twice of one size
    assert torch.tensor([sum(mask) for mask in utility.seen]).bincount().tolist() == [1] + [6] * 9 + [1]


def test_rows_that_do_not_determine_the_solution() -> None:
    # As few pairs as players, many of them alike in what they say: still finite, efficient, and near the truth.
    additive = torch.linspace(0, 1, 6, dtype=torch.float64)
    for seed in range(20):
        estimate = leverage_shapley(lambda masks: masks.double() @ additive, 6, budget=14, generator=rng(seed))
        assert estimate.values.isfinite().all()
        torch.testing.assert_close(estimate.values.sum(), additive.sum())


def test_near_regression_on_a_federation_like_game() -> None:
    table = accuracy_table(9)
    exact = exact_shapley(table_game(table), 9).values
    mse = {
        estimator: torch.stack(
            [estimator(table_game(table), 9, budget=150, generator=rng(s)).values for s in range(60)]
        )
        .sub(exact)
        .square()
        .mean()
        for estimator in (leverage_shapley, regression_shapley)
    }
    assert 0.5 < mse[leverage_shapley] / mse[regression_shapley] < 2
