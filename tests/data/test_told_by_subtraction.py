"""What can be computed from all that a site tells about its table: never a number of fewer rows than ``min_rows``."""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest

from flsv.data.sources.columns import NUMBERS_KIND, WORDS_KIND, ColumnCard
from flsv.data.sources.summaries import count_frequent, summarize_column

#: Rows of each table: everybody knows them, since a site's weight is its number of samples.
NUM_ROWS = 11
GAP = "gap"
WORDS = ("no", "unclear", "yes")
FLAGS = (0.0, 1.0)
GRADES = (0.0, 1.0, 2.0)


def split_rows(cells: tuple[Any, ...]) -> Iterator[dict[Any, int]]:
    """Yield all tables of a column: how many rows have each of the values ``cells``."""
    for counts in product(range(NUM_ROWS + 1), repeat=len(cells)):
        if sum(counts) == NUM_ROWS:
            yield dict(zip(cells, counts))


def tell_column(rows_by_cell: dict[Any, int], min_rows: int, kind: str) -> Any:
    values: list[Any] = []
    for cell, num_rows in rows_by_cell.items():
        values += [None if cell == GAP else cell] * num_rows
    dtype = object if kind == WORDS_KIND else float
    card = ColumnCard("column", kind, pd.Series(values, dtype=dtype))
    return summarize_column(card, np.arange(NUM_ROWS), min_rows).to_plain()


def tell_classes(rows_by_cell: dict[Any, int], min_rows: int) -> Any:
    labels = []
    for label, num_rows in rows_by_cell.items():
        labels += [label] * num_rows
    return count_frequent(labels, min_rows)


CASES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "classes": (WORDS, tell_classes),
    "categories": ((*WORDS, GAP), partial(tell_column, kind=WORDS_KIND)),
    "flags": ((*FLAGS, GAP), partial(tell_column, kind=NUMBERS_KIND)),
    "grades": ((*GRADES, GAP), partial(tell_column, kind=NUMBERS_KIND)),
}


@pytest.mark.parametrize("min_rows", [3, 4])
@pytest.mark.parametrize("name", CASES)
def test_no_number_of_few_rows_can_be_computed_from_all_that_is_told(
    name: str, min_rows: int
) -> None:
    """All tables that tell the same are the same to whoever listens."""
    cells, tell = CASES[name]
    tables_by_answer = defaultdict(list)
    for table in split_rows(cells):
        if table.get(GAP, 0) < NUM_ROWS:  # a column without a value is said to have none
            tables_by_answer[str(tell(table, min_rows))].append(table)

    assert len(tables_by_answer) > len(cells)
    for answer, tables in tables_by_answer.items():
        for cell in cells:
            possible_numbers = {table[cell] for table in tables}
            is_known = len(possible_numbers) == 1
            assert not is_known or min(possible_numbers) not in range(1, min_rows), answer


def test_one_death_and_three_gaps_are_not_told_by_what_is_told_of_the_others() -> None:
    assert count_frequent(["no"] * 99 + ["yes"], min_rows=5) == {"no": 96}
    assert count_frequent(["no"] * 96 + ["yes"] * 4, min_rows=5) == {"no": 96}

    for num_gaps in range(6):
        ages = pd.Series([40.0 + row for row in range(100 - num_gaps)] + [np.nan] * num_gaps)
        card = ColumnCard("age", NUMBERS_KIND, ages)
        summary = summarize_column(card, np.arange(100), min_rows=5)
        assert summary.moments is not None
        told = summary.moments.count, summary.missing
        if num_gaps == 0:
            assert told == (100, 0)
        elif num_gaps < 5:
            assert told == (96, 0)
        else:
            assert told == (95, 5)
