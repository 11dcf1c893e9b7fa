"""Shamir's shares against Lagrange's formula in rational numbers, and what too few of them tell."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations

import pytest

from flsv.engines.remote.secure.shamir import PRIME, join_shares, split_secret
from flsv.errors import ConfigurationError


def at_zero(points: dict[int, int], prime: int) -> int:
    """Lagrange's polynomial at 0, in rational numbers, whose denominators are inverted at the end."""
    value = Fraction(0)
    for x, y in points.items():
        term = Fraction(y)
        for other in points:
            if other != x:
                term *= Fraction(other, other - x)
        value += term
    return value.numerator * pow(value.denominator, prime - 2, prime) % prime


@pytest.mark.parametrize("secret", [0, 1, 2**256 - 1, PRIME - 1])
def test_any_t_shares_tell_the_secret(secret: int) -> None:
    shares = split_secret(secret, [1, 2, 3, 7, 40], threshold=3)
    for places in combinations(shares, 3):
        some = {place: shares[place] for place in places}
        assert join_shares(some) == secret == at_zero(some, PRIME)
    assert join_shares(shares) == secret


def test_too_few_shares_tell_nothing() -> None:
    """Modulo 5, two shares of three needed are every pair equally often, whatever the secret is (25 polynomials)."""
    seen = {}
    for secret in range(5):
        pairs = Counter((s[1], s[2]) for s in (split_secret(secret, [1, 2, 3], 3, prime=5) for _ in range(2_500)))
        assert set(pairs) == {(a, b) for a in range(5) for b in range(5)}
        # 100 expected of each; a deviation of 6 sigma is one in 10^9.
        assert all(abs(count - 100) < 6 * 100**0.5 for count in pairs.values())
        seen[secret] = pairs
    assert seen[0] != seen[1]  # drawn anew


def test_shares_are_drawn_anew() -> None:
    first, second = (split_secret(7, [1, 2, 3], 2) for _ in range(2))
    assert all(first[place] != second[place] for place in first)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((PRIME, [1, 2], 2), "not below the prime"),
        ((1, [0, 1], 2), "distinct numbers from 1"),
        ((1, [1, 1], 2), "distinct numbers from 1"),
        ((1, [1, 2], 3), "threshold=3"),
    ],
)
def test_wrong_arguments(arguments: tuple, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        split_secret(*arguments)
