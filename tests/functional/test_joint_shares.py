"""Intervals of shares against a closed form for two clients, and against plain resampling."""

import math
import statistics

import numpy as np
import pytest
import torch

from flsv import allocate
from flsv.functional.joint_shares import (
    ValueErrors,
    draw_values,
    joint_shares,
    shares_of_draws,
)

NAN = math.nan


def below(share: float, values: list[float], covariance: list[list[float]]) -> float:
    """The probability that the first of two clients has at most ``share``: X <= share (X + Y) for X, Y > 0."""
    # (1 - share) X - share Y is normal.
    weights = np.array([1 - share, -share])
    mean = float(weights @ np.array(values))
    deviation = math.sqrt(weights @ np.array(covariance) @ weights)
    return statistics.NormalDist(mean, deviation).cdf(0)


@pytest.mark.parametrize("correlation", [-0.9, 0.0, 0.9])
def test_share_of_one_of_two_clients_has_the_percentiles_of_the_closed_form(
    correlation: float,
) -> None:
    values = [3.0, 1.0]
    common = 0.03 * correlation
    covariance = [[0.04, common], [common, 0.0225]]
    errors = ValueErrors(torch.tensor(covariance))

    intervals = joint_shares(torch.tensor(values), [errors])

    low = float(intervals.low[0])
    high = float(intervals.high[0])
    assert below(low, values, covariance) == pytest.approx(0.05, abs=0.008)
    assert below(high, values, covariance) == pytest.approx(0.95, abs=0.008)
    # What one has the other has not.
    assert float(intervals.low[1]) == pytest.approx(1 - high)
    assert float(intervals.high[1]) == pytest.approx(1 - low)


@pytest.mark.parametrize("rule", ["zero", "shift", "softmax"])
def test_shares_of_each_draw_are_those_of_allocate_and_sum_to_1(rule: str) -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(50, 4, generator=generator) + 1

    shares = shares_of_draws(draws, rule)

    for draw, share in zip(draws, shares):
        allocated = allocate(draw, 1.0, rule)
        assert share.tolist() == pytest.approx(allocated.tolist())
    assert shares.sum(1).tolist() == pytest.approx([1.0] * 50)


def test_intervals_are_those_of_plain_resampling() -> None:
    rng = np.random.default_rng(1)
    cases = rng.normal([0.4, 0.1, 0.02], [0.9, 0.6, 0.3], size=(400, 3))  # a row per case
    cases[:, 1] -= 0.5 * cases[:, 0]
    covariance = torch.from_numpy(np.cov(cases.T) / len(cases))
    values = torch.from_numpy(cases.mean(0))

    intervals = joint_shares(values, [ValueErrors(covariance)])

    means = []
    for _ in range(4000):
        rows = rng.integers(0, 400, 400)
        means.append(cases[rows].mean(0))
    claims = np.stack(means).clip(0)
    shares = claims / claims.sum(1, keepdims=True)
    low, high = np.quantile(shares, [0.05, 0.95], axis=0)
    assert intervals.low.numpy() == pytest.approx(low, abs=0.02)
    assert intervals.high.numpy() == pytest.approx(high, abs=0.02)


def test_a_sole_positive_value_within_its_error_has_no_certain_share() -> None:
    values = torch.tensor([0.01, -0.01, 0.0])
    errors = ValueErrors(1e-4 * torch.eye(3))

    intervals = joint_shares(values, [errors])

    assert intervals.low[0] < 0.2
    assert (intervals.high > 0.3).all()
    assert intervals.without_gain == pytest.approx(0.5, abs=0.02)
    assert intervals.moved > 0.3


def test_errors_of_few_seeds_have_the_wider_tails_of_students_t() -> None:
    errors = ValueErrors(torch.eye(2), freedom=4)

    sampled_values = draw_values(torch.zeros(2), [errors], draws=200_000)

    percentile = sampled_values[:, 0].quantile(0.95)
    assert float(percentile) == pytest.approx(2.132, abs=0.05)


def test_a_client_without_a_value_has_no_interval_and_nothing_of_the_others() -> None:
    covariance = 0.01 * torch.eye(3)
    covariance[1] = NAN
    covariance[:, 1] = NAN
    errors_of_two = ValueErrors(0.01 * torch.eye(2))

    intervals = joint_shares(torch.tensor([3.0, NAN, 1.0]), [ValueErrors(covariance)])

    pair = joint_shares(torch.tensor([3.0, 1.0]), [errors_of_two])
    assert math.isnan(intervals.low[1])
    assert intervals.low[[0, 2]].tolist() == pair.low.tolist()


def test_values_without_a_claim_have_no_intervals() -> None:
    errors = ValueErrors(0.01 * torch.eye(2))

    intervals = joint_shares(torch.tensor([-1.0, -2.0]), [errors])

    assert intervals.low.isnan().all()
    assert intervals.without_gain == 1.0
