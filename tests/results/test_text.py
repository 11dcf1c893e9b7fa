"""Who is said to have contributed most."""

import pytest

from flsv.results.text import ranking

NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.3, 0.1, 0.3, NAN], ["By sv, A and C contributed most, B least."]),
        ([0.30001, 0.1, 0.30002, NAN], ["By sv, A and C contributed most, B least."]),  # shown alike
        ([0.2, 0.2, NAN, NAN], ["By sv, all clients contributed the same."]),
        ([0.3, 0.0, 0.0, 0.0], ["By sv, A contributed most, B, C and D least."]),
    ],
)
def test_ranking_names_ties(values: list[float], said: list[str]) -> None:
    unknown = [NAN] * 4
    found = ranking("ABCD", (values, unknown, unknown), "sv")
    assert found == said
