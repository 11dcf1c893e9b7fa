"""Rows that are run by turn."""

import pytest
from rows import TURNS, turn_of


@pytest.mark.parametrize(("lines", "columns"), [(5, 5), (6, 10), (12, 11)])
def test_each_turn_has_rows_of_each_line_and_each_column(lines, columns):
    cells_by_turn = {turn: [] for turn in range(TURNS)}
    for place in range(lines * columns):
        cells_by_turn[turn_of(place)].append(divmod(place, columns))

    for cells in cells_by_turn.values():
        assert {line for line, _ in cells} == set(range(lines))
        assert {column for _, column in cells} == set(range(columns))
