"""Intervals of shares against a closed form for two clients, and against plain resampling."""

import math
import statistics

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from flsv import allocate
from flsv.functional.joint_shares import (
    ValueErrors,
    draw_values,
    joint_intervals,
    joint_shares,
    shares_of_draws,
)
from helpers import make_generator

NAN = math.nan


def make_independent_errors(variance: float, num_clients: int) -> list[ValueErrors]:
    covariance = variance * torch.eye(num_clients)
    return [ValueErrors(covariance)]


def probability_of_less(share: float, values: list[float], covariance: list[list[float]]) -> float:
    """The probability that the first of two clients has at most ``share``: X <= share (X + Y) for X, Y > 0."""
    # (1 - share) X - share Y is normal.
    weights = np.array([1 - share, -share])
    mean = weights @ np.array(values)
    variance = weights @ np.array(covariance) @ weights
    normal = statistics.NormalDist(float(mean), math.sqrt(variance))

    return normal.cdf(0)


@pytest.mark.parametrize("correlation", [-0.9, 0.0, 0.9])
def test_share_of_one_of_two_clients_has_the_percentiles_of_the_closed_form(correlation):
    values = [3.0, 1.0]
    common = 0.03 * correlation
    covariance = [[0.04, common], [common, 0.0225]]
    errors = ValueErrors(torch.tensor(covariance))

    intervals = joint_shares(torch.tensor(values), [errors])

    low, low_of_second = intervals.low.tolist()
    high, high_of_second = intervals.high.tolist()
    assert probability_of_less(
        low,
        values,
        covariance,
    ) == pytest.approx(0.05, abs=0.008)
    assert probability_of_less(
        high,
        values,
        covariance,
    ) == pytest.approx(0.95, abs=0.008)
    # The two shares sum to 1.
    assert low_of_second == pytest.approx(1 - high)
    assert high_of_second == pytest.approx(1 - low)


@pytest.mark.parametrize("rule", ["zero", "shift", "softmax"])
def test_shares_of_each_draw_are_those_of_allocate_and_sum_to_1(rule):
    draws = 1 + torch.randn(50, 4)

    shares = shares_of_draws(draws, rule)

    for draw, shares_of_draw in zip(draws, shares):
        assert_close(shares_of_draw, allocate(draw, 1.0, rule), check_dtype=False)
    assert_close(
        shares.sum(dim=1),
        torch.ones(50).to(shares),
    )


def test_share_of_the_only_positive_value_is_uncertain_within_its_error():
    values = torch.tensor([0.01, -0.01, 0.0])
    deviation = 0.01  # as large as the values
    errors = make_independent_errors(variance=deviation**2, num_clients=3)

    intervals = joint_shares(values, errors)

    # By the values alone the shares are 1, 0 and 0.
    assert intervals.low[0] < 0.2
    assert intervals.high.min() > 0.3
    assert intervals.moved > 0.3
    # The sum of the values is 0: half of the draws have no gain.
    assert abs(intervals.without_gain - 0.5) < 0.02


def test_errors_of_few_seeds_have_the_wider_tails_of_students_t():
    errors = ValueErrors(torch.eye(2), freedom=4)

    sampled_values = draw_values(torch.zeros(2), [errors], draws=200_000)

    values_of_first_client = sampled_values[:, 0]
    percentile = values_of_first_client.quantile(0.95)
    percentile_of_students_t = 2.132  # scipy.stats.t.ppf(0.95, df=4); a normal's is 1.645
    assert abs(percentile - percentile_of_students_t) < 0.05


def test_client_without_a_value_has_no_interval_and_does_not_change_those_of_others():
    covariance = 0.01 * torch.eye(3)
    covariance[1] = NAN
    covariance[:, 1] = NAN
    values = torch.tensor([3.0, NAN, 1.0])

    intervals = joint_shares(values, [ValueErrors(covariance)])

    assert math.isnan(intervals.low[1])

    values_of_others = torch.tensor([3.0, 1.0])
    expected = joint_shares(values_of_others, make_independent_errors(0.01, 2))
    low_of_others = intervals.low[[0, 2]]
    assert low_of_others.tolist() == expected.low.tolist()


def test_values_without_a_claim_have_no_intervals():
    values = torch.tensor([-1.0, -2.0])

    intervals = joint_shares(values, make_independent_errors(0.01, 2))

    assert intervals.low.isnan().all()
    assert intervals.without_gain == 1.0


def make_correlated_errors() -> list[ValueErrors]:
    generator = make_generator()
    factor = 0.03 * torch.randn(
        5,
        5,
        dtype=torch.float64,
        generator=generator,
    )
    return [
        ValueErrors(factor @ factor.T),
        ValueErrors(
            0.0001 * torch.eye(5),
            freedom=4,
        ),
    ]


def transform_eigenvectors(monkeypatch, transform):
    """Make torch return eigenvectors as another machine may return them."""
    original_eigh = torch.linalg.eigh

    def transformed_eigh(matrix):
        variances, directions = original_eigh(matrix)
        return variances, directions @ transform.to(directions)

    monkeypatch.setattr(torch.linalg, "eigh", transformed_eigh)


SIGNS = [[-1.0, 1.0, 1.0, -1.0, 1.0], [1.0, -1.0, -1.0, 1.0, -1.0]]
FIVE_VALUES = torch.tensor([0.189, 0.214, 0.128, 0.104, 0.193], dtype=torch.float64)


@pytest.mark.parametrize("signs", SIGNS)
def test_intervals_do_not_depend_on_the_signs_of_eigenvectors(monkeypatch, signs):
    errors = make_correlated_errors()
    shares = joint_shares(FIVE_VALUES, errors)
    intervals = joint_intervals(FIVE_VALUES, errors)

    transform_eigenvectors(monkeypatch, torch.tensor(signs).diag())
    other_shares = joint_shares(FIVE_VALUES, errors)

    assert_close(joint_intervals(FIVE_VALUES, errors), intervals, rtol=0, atol=1e-10)
    assert_close(other_shares.low, shares.low, rtol=0, atol=1e-10)
    assert_close(other_shares.high, shares.high, rtol=0, atol=1e-10)
    assert other_shares.moved == pytest.approx(shares.moved, abs=1e-10)


def test_draws_do_not_depend_on_the_basis_of_equal_eigenvalues(monkeypatch):
    """Equal variances: any orthogonal matrix has eigenvectors."""
    errors = make_independent_errors(0.01, num_clients=2)
    values = torch.tensor([3.0, 1.0])
    draws = draw_values(values, errors)

    rotation = torch.tensor([[0.6, -0.8], [0.8, 0.6]])
    transform_eigenvectors(monkeypatch, rotation)

    assert_close(draw_values(values, errors), draws, rtol=0, atol=1e-7)
