"""Values by enumeration: Shapley and leave-one-out."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flsv.functional import exact_shapley, leave_one_out
from helpers import refused

#: Of a coalition of s that the player joins, of n players.
Weight = Callable[[int, int], float]


VALUES: dict[str, tuple[Any, Weight]] = {
    "shapley": (exact_shapley, lambda n, s: 1 / (n * math.comb(n - 1, s))),
    "leave_one_out": (leave_one_out, lambda n, s: float(s == n - 1)),
}


def values_by_all_coalitions(table: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Every coalition that a player can join, one by one."""
    n = len(table).bit_length() - 1
    values = torch.zeros(n, *table.shape[1:], dtype=torch.float64)
    for player in range(n):
        for coalition in range(2**n):
            is_member = coalition >> player & 1
            if is_member:
                continue
            joined = coalition | 1 << player
            gain = table[joined] - table[coalition]
            values[player] += weight(n, coalition.bit_count()) * gain
    return values


def test_too_many_players_fail_at_once_and_name_the_cost():
    with refused(re.escape("2^25 = 33,554,432 evaluations")):
        exact_shapley(lambda masks: pytest.fail("evaluated"), 25)
