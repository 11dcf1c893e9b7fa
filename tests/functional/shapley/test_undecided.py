"""When no pair is told apart, and how many evaluations do tell one apart then."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import studentized_range

from flsv.functional.shapley.undecided import times_to_tell_apart, told_apart


def test_a_pair_is_told_apart_as_by_hand() -> None:
    draw = np.random.default_rng(0)
    for _ in range(30):
        values, errors = draw.normal(size=7) * 3, draw.uniform(0.5, 1.5, 7)
        far = studentized_range.ppf(0.95, 7, np.inf)
        least = np.maximum(errors, np.sqrt((errors**2).mean()))
        expected = any(
            abs(values[i] - values[j]) / np.sqrt((least[i] ** 2 + least[j] ** 2) / 2) > far
            for i in range(7)
            for j in range(i)
        )
        assert told_apart(torch.from_numpy(values), torch.from_numpy(errors)) == expected


def test_of_equal_values_one_in_twenty_is() -> None:
    draw = torch.Generator().manual_seed(0)
    found = [told_apart(torch.randn(10, generator=draw), torch.ones(10)) for _ in range(1500)]
    assert 0.03 < sum(found) / len(found) < 0.07


def test_what_is_not_known_is_left_out() -> None:
    nan = float("nan")
    values, errors = torch.tensor([0.0, 9.0, nan, 0.1]), torch.tensor([0.1, nan, 0.1, 0.1])
    assert not told_apart(values, errors)
    assert not told_apart(values[:1], errors[:1])
    assert times_to_tell_apart(values, errors) == times_to_tell_apart(values[[0, 3]], errors[[0, 3]])


@pytest.mark.parametrize("clients", [6, 20, 50])
@pytest.mark.parametrize("shape", ["normal", "uniform", "one apart"])
def test_so_many_evaluations_tell_a_pair_apart_in_half_of_all_cases(clients: int, shape: str) -> None:
    """True values that spread by a third of their error up to its double; looked at only where nobody is told apart."""
    draw = torch.Generator().manual_seed(clients)
    hits = []
    while len(hits) < 150:
        true = torch.randn(clients, generator=draw)
        if shape == "uniform":
            true = 3.46 * (torch.rand(clients, generator=draw) - 0.5)
        elif shape == "one apart":
            true = 0.3 * true
            true[0] -= 3
        true *= 1 / 3 + 5 / 3 * torch.rand((), generator=draw)
        values, errors = true + torch.randn(clients, generator=draw), torch.ones(clients)
        if told_apart(values, errors):
            continue
        smaller = errors / times_to_tell_apart(values, errors) ** 0.5
        hits.append(told_apart(true + smaller * torch.randn(clients, generator=draw), smaller))
    assert 0.4 < sum(hits) / len(hits) < 0.85
