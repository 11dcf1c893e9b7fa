"""What can be computed from all that a site tells about its table: never a number of fewer rows than ``min_rows``."""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest

from flsv.data.sources.agreed import NUMBERS_KIND, WORDS_KIND
from flsv.data.sources.columns import ColumnCard
from flsv.data.sources.summaries import count_frequent, summarize_column

#: Rows of each table: everybody knows them, since a site's weight is its number of samples.
NUM_ROWS = 11
GAP = "gap"
WORDS = ("no", "unclear", "yes")
FLAGS = (0.0, 1.0)
GRADES = (0.0, 1.0, 2.0)


def split_rows(cells: tuple[Any, ...]) -> Iterator[dict[Any, int]]:
    """Yield all tables of a column: how many rows have each of the values ``cells``."""
    possible_counts = range(NUM_ROWS + 1)
    for counts in product(possible_counts, repeat=len(cells)):
        if sum(counts) == NUM_ROWS:
            yield dict(zip(cells, counts))


def tell_column(
    rows_by_cell: dict[Any, int],
    min_rows: int,
    kind: str,
) -> Any:
    values: list[Any] = []
    for cell, num_rows in rows_by_cell.items():
        value = None if cell == GAP else cell
        values += [value] * num_rows
    dtype = object if kind == WORDS_KIND else float
    column = pd.Series(values, dtype=dtype)
    card = ColumnCard("column", kind, column)
    rows = np.arange(NUM_ROWS)
    summary = summarize_column(card, rows, min_rows)
    return summary.to_plain()


def tell_classes(
    rows_by_cell: dict[Any, int],
    min_rows: int,
) -> Any:
    labels = []
    for label, num_rows in rows_by_cell.items():
        labels += [label] * num_rows
    return count_frequent(labels, min_rows)


tell_words = partial(tell_column, kind=WORDS_KIND)
tell_numbers = partial(tell_column, kind=NUMBERS_KIND)
CASES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "classes": (WORDS, tell_classes),
    "categories": ((*WORDS, GAP), tell_words),
    "flags": ((*FLAGS, GAP), tell_numbers),
    "grades": ((*GRADES, GAP), tell_numbers),
}


@pytest.mark.parametrize("min_rows", [3, 4])
@pytest.mark.parametrize("name", CASES)
def test_no_number_of_few_rows_can_be_computed_from_all_that_is_told(
    name: str,
    min_rows: int,
) -> None:
    """All tables that tell the same are the same to whoever listens."""
    cells, tell = CASES[name]
    tables_by_answer = defaultdict(list)
    for table in split_rows(cells):
        if table.get(GAP) == NUM_ROWS:
            continue  # a column without a value is said to have none
        answer = tell(table, min_rows)
        tables_by_answer[str(answer)].append(table)

    assert len(tables_by_answer) > len(cells)
    for answer, tables in tables_by_answer.items():
        for cell in cells:
            possible_numbers = {table[cell] for table in tables}
            is_known = len(possible_numbers) == 1
            is_of_few_rows = min(possible_numbers) in range(1, min_rows)
            assert not is_known or not is_of_few_rows, answer


def test_one_death_and_three_gaps_are_not_told_by_what_is_told_of_the_others() -> None:
    for num_deaths in (1, 4):
        deaths = ["no"] * (100 - num_deaths) + ["yes"] * num_deaths
        assert count_frequent(deaths, min_rows=5) == {"no": 96}

    rows = np.arange(100)
    for num_gaps in range(6):
        ages = pd.Series(40.0 + rows)
        ages[rows >= 100 - num_gaps] = np.nan
        card = ColumnCard("age", NUMBERS_KIND, ages)
        summary = summarize_column(card, rows, min_rows=5)

        assert summary.moments is not None
        counts = summary.moments.count, summary.missing
        if num_gaps == 0:
            assert counts == (100, 0)
        elif num_gaps < 5:
            assert counts == (96, 0)
        else:
            assert counts == (95, 5)
