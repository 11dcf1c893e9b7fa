"""Shamir's secret sharing: of k shares any t tell the secret, and t - 1 tell nothing.

Shamir, "How to Share a Secret", Communications of the ACM 22(11), 1979. A polynomial of degree t - 1 with random
coefficients has the secret at 0; a share is its value at a place, and t values tell the polynomial (Lagrange). All in
the integers modulo a prime.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping

from flsv.errors import ConfigurationError

#: A Mersenne prime above all secrets of 32 bytes.
PRIME = 2**521 - 1
SECRET_BYTES = 32


def split_secret(secret: int, places: Collection[int], threshold: int, prime: int = PRIME) -> dict[int, int]:
    """The shares of a secret, by place.

    Args:
        secret: from 0 to ``prime`` - 1.
        places: where the shares are, distinct numbers from 1 to ``prime`` - 1.
        threshold: t, how many tell the secret.
        prime: the modulus.

    Raises:
        ConfigurationError: a number out of range, a place twice, fewer places than ``threshold``.

    Example:
        >>> shares = split_secret(1979, [1, 2, 3, 4, 5], threshold=3)
        >>> join_shares({place: shares[place] for place in (5, 1, 3)})
        1979
    """
    if not 0 <= secret < prime:
        raise ConfigurationError("split_secret: the secret is not below the prime.")
    if len(set(places)) < len(places) or not all(0 < place < prime for place in places):
        raise ConfigurationError(f"split_secret(places={list(places)}): expected distinct numbers from 1 on.")
    if not 1 <= threshold <= len(places):
        raise ConfigurationError(f"split_secret(threshold={threshold}): expected 1 to {len(places)}, the shares.")
    coefficients = [secret, *(secrets.randbelow(prime) for _ in range(threshold - 1))]
    return {place: _value(coefficients, place, prime) for place in places}


def join_shares(shares: Mapping[int, int], prime: int = PRIME) -> int:
    """The secret of as many shares as its threshold; of fewer, or of wrong ones, some number."""
    secret = 0
    for place, share in shares.items():
        above = below = 1
        for other in shares:
            if other != place:
                above, below = above * other % prime, below * (other - place) % prime
        secret = (secret + share * above * pow(below, -1, prime)) % prime
    return secret


def _value(coefficients: list[int], place: int, prime: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):  # Horner
        value = (value * place + coefficient) % prime
    return value
