"""Intervals of one seed, by hand and on the tables of the tuning set."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from pandas import read_csv

from benchmark import federation, names, truth_table
from flsv.functional.intervals import (
    SEED_DEVIATION,
    SEED_DEVIATION_WITH_UNTRAINED,
    STDERR_PER_DISAGREEMENT,
    one_seed_stderr,
    prediction_stderr,
)


def test_one_seed_stderr_adds_the_errors_of_fit_seeds_untrained_models_and_last_rounds():
    values = torch.tensor([2.0, -1.0])
    fit_errors = torch.tensor([0.3, 0.0])
    untrained_utilities = torch.tensor([0.0, 0.1, 0.2])
    values_of_last_rounds = values + torch.tensor([[0.1, 0.2], [-0.1, -0.2]])

    stderr = one_seed_stderr(values, fit_errors, untrained_utilities)
    stderr_with_rounds = one_seed_stderr(
        values, fit_errors, untrained_utilities, values_of_last_rounds
    )

    between_seeds = SEED_DEVIATION * 2.0  # of the sum of positive values
    of_untrained = 0.1 / 2  # the utilities' standard deviation, over two clients
    common_variance = between_seeds**2 + of_untrained**2
    expected = [(0.3**2 + common_variance) ** 0.5, common_variance**0.5]
    assert_allclose(stderr.numpy(), expected, atol=1e-7)

    # Sample variances between the two rounds: (0.1² + 0.1²) / (2 - 1) and (0.2² + 0.2²) / (2 - 1).
    mean_between_rounds = (0.02 + 0.08) / 2
    assert_allclose(
        stderr_with_rounds[1].item() ** 2,
        common_variance + mean_between_rounds,
        atol=1e-7,
    )


def test_one_seed_stderr_of_several_values_is_that_of_each_column():
    values = torch.tensor([[2.0, 0.0], [-1.0, 4.0]])

    stderr = one_seed_stderr(values, torch.zeros(2, 2))

    of_first_column = SEED_DEVIATION_WITH_UNTRAINED * 2.0
    of_second_column = SEED_DEVIATION_WITH_UNTRAINED * 4.0
    assert_allclose(stderr.numpy(), [[of_first_column, of_second_column]] * 2)


def test_error_of_predictions_is_a_part_of_their_root_mean_square_disagreement():
    stderr = prediction_stderr(torch.tensor([1.0, -7.0]))

    expected = STDERR_PER_DISAGREEMENT * 5.0  # the root of (1 + 49) / 2
    assert stderr.tolist() == pytest.approx([expected, expected])


def test_what_intervals_of_one_seed_hold_is_what_their_page_says():
    results = Path(__file__).parents[2] / "docs" / "results"
    held = read_csv(results / "one_seed_intervals.csv").set_index(["federation", "rounds", "rule"])
    percent = (100 * held["held"]).round().astype(int)
    classes = percent["mean of classes"]
    numbers = percent["mean of numbers"]

    text = " ".join((results / "retrain.md").read_text().split())
    assert f"{classes[4, 'spread']} % of the other seeds' means after 4 rounds" in text
    assert f"(without this part {classes[4, 'no spread']} %)" in text
    assert f"{classes[20, 'spread']} % after 20" in text
    assert f"{numbers[4, 'spread']} and {numbers[20, 'spread']} %" in text


QUANTILE = 1.645  # of the normal distribution, for intervals of 90 %


def share_of_covered_clients(values, other_seeds, untrained_utilities):
    """Return for what share of clients one seed's interval holds the mean of the other seeds, ``[S - 1, n]``."""
    # The mean has an error of its own, by which the deviation is wider than the interval says.
    error_of_mean = (1 + 1 / len(other_seeds)) ** 0.5
    deviation = (values - other_seeds.mean(0)).abs() / error_of_mean
    stderr = one_seed_stderr(values, torch.zeros_like(values), untrained_utilities)
    is_covered = deviation <= QUANTILE * stderr
    return float(is_covered.double().mean())


@pytest.mark.slow
@pytest.mark.parametrize("with_untrained_utilities", [False, True])
def test_one_seeds_90_percent_interval_holds_the_other_seeds_mean_for_90_to_96_percent(
    with_untrained_utilities,
):
    """Of the clients of the tuning set, on which the constants of the intervals were chosen."""
    shares = []
    for name in names("tuning"):
        truth = truth_table(federation(name))
        if truth.utilities is None or truth.num_clients > 7:
            continue  # not all coalitions were trained
        untrained_utilities = None
        if with_untrained_utilities:
            untrained_utilities = truth.utilities[:, 0]
        for seed, values in enumerate(truth.values):
            other_seeds = torch.cat([truth.values[:seed], truth.values[seed + 1 :]])
            shares.append(share_of_covered_clients(values, other_seeds, untrained_utilities))

    assert 0.9 < np.mean(shares) < 0.96
