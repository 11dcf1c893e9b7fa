"""Values by enumeration."""

import re

import pytest

from flsv.functional import exact_shapley
from helpers import refused


def test_too_many_players_fail_at_once_and_name_the_cost():
    with refused(re.escape("2^25 = 33,554,432 evaluations")):
        exact_shapley(lambda masks: pytest.fail("evaluated"), 25)
