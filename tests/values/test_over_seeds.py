"""Means over seeds, whose intervals are those of the formulas, and clients that have no value with a seed."""

import math

import pytest
import torch
from scipy import stats

from flsv.functional.intervals import interval_over_seeds
from flsv.values.over_seeds import mean_with_interval

#: Of three seeds. The last client has a value with two of them.
VALUES = torch.tensor(
    [
        [0.1, 0.5, 0.2],
        [0.3, 0.5, math.nan],
        [0.2, 0.8, 0.4],
    ],
    dtype=torch.float64,
)
MEANS = [0.2, 0.6, 0.3]


def test_intervals_of_values_without_coalitions_are_students_t():
    estimates = mean_with_interval(VALUES)

    assert estimates.value.tolist() == pytest.approx(MEANS)
    for client, values in enumerate(VALUES.T):
        known_values = values[~values.isnan()]
        low, high = stats.t.interval(
            0.9,
            df=len(known_values) - 1,
            loc=known_values.mean(),
            scale=stats.sem(known_values),
        )
        interval = [estimates.low[client], estimates.high[client]]
        assert interval == pytest.approx([low, high])


def test_intervals_of_coalitions_are_known_for_clients_valued_in_each_seed():
    stderr = [0.01, 0.02, 0.03]
    evidence = [{"stderr": stderr}] * len(VALUES)

    estimates = mean_with_interval(VALUES, evidence)

    known_clients = [0, 1]
    expected = interval_over_seeds(
        VALUES[:, known_clients],
        torch.tensor(stderr)[known_clients],
    )
    half_widths = estimates.high - estimates.value
    assert half_widths[known_clients].tolist() == pytest.approx(expected.tolist())
    assert estimates.value.tolist() == pytest.approx(MEANS)
    assert estimates.low.isnan().tolist() == [False, False, True]
