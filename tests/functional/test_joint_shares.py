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
    covariance = [[0.04, 0.03 * correlation], [0.03 * correlation, 0.0225]]
    found = joint_shares(torch.tensor(values), [ValueErrors(torch.tensor(covariance))])
    assert below(float(found.low[0]), values, covariance) == pytest.approx(0.05, abs=0.008)
    assert below(float(found.high[0]), values, covariance) == pytest.approx(0.95, abs=0.008)
    # What one has the other has not.
    assert (found.low[1], found.high[1]) == pytest.approx(
        (1 - float(found.high[0]), 1 - float(found.low[0]))
    )


@pytest.mark.parametrize("rule", ["zero", "shift", "softmax"])
def test_shares_of_each_draw_are_those_of_allocate_and_sum_to_1(rule: str) -> None:
    draws = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) + 1
    shares = shares_of_draws(draws, rule)
    for draw, share in zip(draws, shares):
        assert share.tolist() == pytest.approx(allocate(draw, 1.0, rule).tolist())
    assert shares.sum(1).tolist() == pytest.approx([1.0] * 50)


def test_intervals_are_those_of_plain_resampling() -> None:
    rng = np.random.default_rng(1)
    cases = rng.normal([0.4, 0.1, 0.02], [0.9, 0.6, 0.3], size=(400, 3))  # a row per case
    cases[:, 1] -= 0.5 * cases[:, 0]
    covariance = torch.from_numpy(np.cov(cases.T) / len(cases))
    found = joint_shares(torch.from_numpy(cases.mean(0)), [ValueErrors(covariance)])

    means = np.stack([cases[rng.integers(0, 400, 400)].mean(0) for _ in range(4000)])
    claims = means.clip(0)
    ends = np.quantile(claims / claims.sum(1, keepdims=True), [0.05, 0.95], axis=0)
    assert found.low.numpy() == pytest.approx(ends[0], abs=0.02)
    assert found.high.numpy() == pytest.approx(ends[1], abs=0.02)


def test_a_sole_positive_value_within_its_error_has_no_certain_share() -> None:
    found = joint_shares(torch.tensor([0.01, -0.01, 0.0]), [ValueErrors(1e-4 * torch.eye(3))])
    assert found.low[0] < 0.2
    assert (found.high > 0.3).all()
    assert found.without_gain == pytest.approx(0.5, abs=0.02)
    assert found.moved > 0.3


def test_errors_of_few_seeds_have_the_wider_tails_of_students_t() -> None:
    drawn = draw_values(torch.zeros(2), [ValueErrors(torch.eye(2), freedom=4)], draws=200_000)
    assert float(drawn[:, 0].quantile(0.95)) == pytest.approx(2.132, abs=0.05)


def test_a_client_without_a_value_has_no_interval_and_nothing_of_the_others() -> None:
    covariance = 0.01 * torch.eye(3)
    covariance[1] = covariance[:, 1] = NAN
    found = joint_shares(torch.tensor([3.0, NAN, 1.0]), [ValueErrors(covariance)])
    pair = joint_shares(torch.tensor([3.0, 1.0]), [ValueErrors(0.01 * torch.eye(2))])
    assert math.isnan(found.low[1])
    assert found.low[[0, 2]].tolist() == pair.low.tolist()


def test_values_without_a_claim_have_no_intervals() -> None:
    found = joint_shares(torch.tensor([-1.0, -2.0]), [ValueErrors(0.01 * torch.eye(2))])
    assert found.low.isnan().all()
    assert found.without_gain == 1.0
