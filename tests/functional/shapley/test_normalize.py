"""NSV: eq. 2 and eq. 12."""

from __future__ import annotations

import pytest
import torch
from functional.shapley.games import rng

from flsv.functional.shapley import normalize_differences, normalize_shapley

NAN = float("nan")


def test_min_max() -> None:
    values = torch.randn(9, generator=rng(), dtype=torch.float64)
    expected = (values - values.min()) / (values.max() - values.min())
    torch.testing.assert_close(normalize_shapley(values), expected)
    torch.testing.assert_close(normalize_shapley(-7 * values + 3), 1 - expected)


def test_columns_by_themselves() -> None:
    values = torch.tensor([[1.0, 5.0], [2.0, 5.0], [NAN, 5.0], [5.0, NAN]])
    expected = torch.tensor([[0.0, 0.5], [0.25, 0.5], [NAN, 0.5], [1.0, NAN]])
    torch.testing.assert_close(normalize_shapley(values), expected, equal_nan=True)


@pytest.mark.parametrize("values", [[0.3], [0.0, 0.0], [1e9, 1e9, 1e9], [-0.2, -0.2, -0.2 * (1 + 1e-15)]])
def test_equal_values_are_one_half(values: list[float]) -> None:
    assert normalize_shapley(torch.tensor(values, dtype=torch.float64)).tolist() == [0.5] * len(values)


def test_absent_players() -> None:
    assert normalize_shapley(torch.tensor([NAN, 2.0])).nan_to_num(-1).tolist() == [-1, 0.5]
    assert normalize_shapley(torch.tensor([NAN, NAN])).isnan().all()
    assert normalize_shapley(torch.tensor([])).shape == (0,)
    assert normalize_shapley(torch.tensor([3, 1, 2])).tolist() == [1.0, 0.0, 0.5]


def test_infinite_values() -> None:
    with pytest.raises(ValueError, match=r"players \[1\] are infinite"):
        normalize_shapley(torch.tensor([1.0, float("inf")]))


def test_eq_12() -> None:
    values = torch.randn(7, generator=rng(), dtype=torch.float64)
    for k in range(7):
        differences = values[k] - values
        literal = (differences.max() - differences) / (differences.max() - differences.min())
        torch.testing.assert_close(normalize_differences(differences), literal)
        torch.testing.assert_close(normalize_differences(differences), normalize_shapley(values))
    assert normalize_differences(torch.zeros(3)).tolist() == [0.5] * 3
