"""Shares of a budget against a few lines of arithmetic."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from flsv import allocate
from flsv.payment.allocation import largest_remainder
from helpers import make_generator, refused

NAN = float("nan")


def allocate_shares(values, budget=120.0, **rules):
    return allocate(torch.tensor(values), budget, **rules).tolist()


def test_shares_follow_the_rule_for_negative_values():
    budget = 120
    values = [3.0, 1.0, -1.0]
    shifted = [4.0, 2.0, 0.0]  # by the lowest
    powers = np.exp(np.array(values) / np.std(values))

    shares = {}
    for rule in ("zero", "shift", "softmax"):
        shares[rule] = allocate_shares(values, negatives=rule)

    by_shifted = [budget * value / sum(shifted) for value in shifted]
    by_powers = budget * powers / powers.sum()
    assert shares["zero"] == pytest.approx([90, 30, 0])  # 3 : 1 : 0
    assert shares["shift"] == pytest.approx(by_shifted)
    assert shares["softmax"] == pytest.approx(
        by_powers.tolist(),
        rel=1e-6,
    )
    with refused(r"clients \[2\] have values below"):
        allocate_shares(values, negatives="refuse")


@pytest.mark.parametrize(
    "values",
    [[-1.0, -2.0], [0.0, 0.0], [NAN, NAN]],
)
def test_shares_without_a_positive_claim_raise(values):
    with refused("no client gets a share"):
        allocate_shares(values)


def test_client_without_a_value_has_no_share():
    assert allocate_shares([3.0, NAN, 1.0]) == pytest.approx([90, 0, 30])  # 3 : 0 : 1 of 120


@pytest.mark.parametrize("seed", range(5))
def test_cents_sum_to_the_budget_and_are_nearest(seed):
    generator = make_generator(seed)
    values = torch.rand(7, generator=generator)
    budget = int(torch.randint(1, 100_000, (1,), generator=generator)) / 100

    amounts = allocate(values, budget, unit=0.01).tolist()

    cents = [round(amount * 100) for amount in amounts]
    assert [round(cent / 100, 2) for cent in cents] == amounts
    assert sum(cents) == round(budget * 100)

    shares = values.double() / values.double().sum()
    exact = 100 * budget * shares
    rounded = torch.tensor(cents)
    assert (rounded - exact).abs().max() < 1

    # Nobody who was rounded down has a larger remainder than one who was rounded up.
    remainders = exact % 1
    is_up = rounded > exact
    if is_up.any() and not is_up.all():
        assert remainders[is_up].min() >= remainders[~is_up].max()


@pytest.mark.parametrize(
    "budget",
    [0.07, 0.1 + 0.2, 1e9, 7_000_000_000.01, 1e12],
)
def test_large_budgets_are_in_whole_cents(budget):
    paid = allocate(
        torch.tensor([1.0] * 6),
        budget,
        unit=0.01,
    ).tolist()
    assert all(Decimal(str(amount)) % Decimal("0.01") == 0 for amount in paid)
    assert sum(Decimal(str(amount)) for amount in paid) == Decimal(f"{budget:.2f}")
    with refused("must be a multiple"):
        allocate(torch.tensor([1.0]), budget + 0.001, unit=0.01)


@pytest.mark.parametrize("size", [1e308, 1e160, 1e-160, 5e-324])
@pytest.mark.parametrize("negatives", ["zero", "shift", "softmax"])
def test_shares_do_not_depend_on_the_unit_of_the_values(size, negatives):
    """Nor do sums of the largest floats overflow, or squares of the smallest vanish."""
    expected = allocate_shares([1.0, 1.0, -1.0, 0.0], negatives=negatives)
    values = torch.tensor(
        [size, size, -size, 0.0],
        dtype=torch.float64,
    )

    amounts = allocate(values, 120.0, negatives)

    assert amounts.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("budget", "unit"),
    [(1e308, 0.01), (1.0, 1e-320), (2.0**53, 1.0)],
)
def test_a_budget_of_more_units_than_a_float_can_count_is_refused(budget, unit):
    without_unit = allocate_shares([1.0, 1.0], budget)
    assert sum(without_unit) == budget

    with refused("units, but float64 is exact"):
        allocate_shares([1.0, 1.0], budget, unit=unit)


def test_first_of_equal_remainders_is_rounded_up_and_zero_claims_get_nothing():
    assert largest_remainder(
        [1 / 3, 1 / 3, 1 / 3],
        4,
    ) == [2, 1, 1]
    assert largest_remainder(
        [0.0, 0.5, 0.5],
        3,
    ) == [0, 2, 1]
    paid = allocate(
        torch.tensor([0.0, 1.0, 1.0]),
        0.01,
        unit=0.01,
    ).tolist()
    assert paid == [0.0, 0.01, 0.0]
    assert sum(map(Fraction, paid)) == Fraction(0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"values": torch.zeros(2, 2)}, "per_client"),
        (
            {"values": torch.tensor([1.0, math.inf])},
            "expected finite values",
        ),
    ],
)
def test_allocate_with_wrong_arguments_raises(arguments, message):
    values = torch.tensor([1.0, 2.0])
    all_arguments = {"values": values, "budget": 10.0, **arguments}
    with refused(message):
        allocate(**all_arguments)
