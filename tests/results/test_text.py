"""Who is said to have contributed most."""

from typing import Any

import pytest

from flsv.results.text import ranking

NAN = float("nan")
CHANCE = {"told_apart": False}


@pytest.mark.parametrize(
    ("values", "learned", "said"),
    [
        ([0.3, 0.1, 0.3, NAN], {}, ["By sv, A and C contributed most, B least."]),
        ([0.30001, 0.1, 0.30002, NAN], {}, ["By sv, A and C contributed most, B least."]),  # shown alike
        ([0.2, 0.2, NAN, NAN], {}, ["By sv, all clients contributed the same."]),
        ([0.3, 0.0, 0.0, 0.0], {"paid_in": {"other": CHANCE}}, ["By sv, A contributed most, B, C and D least."]),
        ([0.3, 0.1, 0.2, 0.0], {"paid_in": {"sv": CHANCE}}, []),
        ([0.3, 0.1, 0.2, 0.0], {"paid_in": {"": CHANCE}}, []),
    ],
)
def test_ranking_names_ties_and_a_model_at_chance(values: list[float], learned: Any, said: list[str]) -> None:
    unknown = [NAN] * 4
    found = ranking("ABCD", (values, unknown, unknown), "sv", learned)
    assert found == said
