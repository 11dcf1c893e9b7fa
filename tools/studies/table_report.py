"""From a table's results to Markdown and CSV: means over the seeds, and paired differences.

Runs of one seed have the same data, clients and initial weights in every row, so that rows are compared by their
differences seed by seed. A row is called better or worse only where the interval of the mean difference excludes 0. The
*best* other row of a column is chosen by its mean on the same runs, which flatters that row and not ours.

What stands under ``tables`` in a table's YAML, each with a ``title``:

    value:    path into what a cell measured; a list at its end is averaged. ``{row}`` or ``{column}`` in it: the keys
              found there are the table's rows or columns, in place of the cell's
    of:       "module:function" of a cell's result and those of the same column and seed by row: the path's start
    rows:     names or patterns, in the table's order; columns: the same
    digits:   of means (1), or a format
    ours:     rows, each compared with the best other one (of ``others``, by default all that are not ours)
    minus:    row to the rows that are subtracted from it
    average:  name of one more table: the mean over the columns, of the rows and seeds that all of them have
    paper:    column to row to what the paper says, in brackets beside ours
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
from cells import Results, named
from scipy import stats

from flsv.utilities.csv_files import save_csv

Tables = dict[str, pd.DataFrame]  # of texts, by title
KEYS = {
    "title",
    "value",
    "of",
    "rows",
    "columns",
    "digits",
    "ours",
    "others",
    "minus",
    "average",
    "paper",
}


def paired(ours: pd.Series, other: pd.Series) -> str:
    """Ours minus the other over the seeds that both have, with its 95 % interval by Student's t; bold where that
    excludes 0.

    Example:
        >>> paired(pd.Series([3.0, 2.5, 3.5]), pd.Series([1.0, 1.0, 1.0]))
        '**+2.00 [+0.76, +3.24]**'
    """
    found = (ours - other).dropna()
    if len(found) < 2:
        return "-" if found.empty else f"{found.mean():+.2f}"
    low = high = found.mean()
    if found.nunique() > 1:
        low, high = stats.ttest_1samp(found, 0.0).confidence_interval(0.95)
    text = f"{found.mean():+.2f} [{low:+.2f}, {high:+.2f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def spread(values: pd.Series, digits: int | str) -> str:
    """Mean and standard deviation, which a single seed has not. NaN is left out, and "-" stands for nothing.

    Example:
        >>> spread(pd.Series([60.0, 62.0]), 1), spread(pd.Series([60.0]), 1)
        ('61.0 ± 1.4', '60.0')
    """
    numbers = values.dropna()
    form = f".{digits}f" if isinstance(digits, int) else digits
    if numbers.empty:
        return "-"
    mean = f"{numbers.mean():{form}}"
    if len(numbers) == 1:
        return mean
    return f"{mean} ± {numbers.std():{form}}"


def matches(name: str, patterns: Sequence[str] | None) -> bool:
    """Whether a name is one of the patterns, or there are none."""
    return patterns is None or any(fnmatchcase(name, str(pattern)) for pattern in patterns)


def entries(
    value: Any, path: Sequence[str], row: str, column: str
) -> Iterator[tuple[str, str, float]]:
    """The numbers at the end of a path, with their row and column.

    Example:
        >>> list(entries({"a": {"x": [1.0, 3.0]}, "b": {"x": 5.0}}, ["{row}", "x"], "run", "digits"))
        [('a', 'digits', 2.0), ('b', 'digits', 5.0)]
    """
    if not path:
        numbers = [
            float(each)
            for each in (value if isinstance(value, list) else [value])
            if each is not None
        ]
        yield row, column, statistics.mean(numbers) if numbers else float("nan")
        return
    step, *rest = path
    inner = {
        str(key): each
        for key, each in (enumerate(value, 1) if isinstance(value, list) else value.items())
    }
    for key, each in inner.items():
        if each is not None and (step == key or step in ("{row}", "{column}")):
            yield from entries(
                each, rest, key if step == "{row}" else row, key if step == "{column}" else column
            )


def gathered(show: Mapping[str, Any], results: Results) -> pd.DataFrame:
    """A table's numbers: row, column, seed, value."""
    path = show["value"].split("/") if "value" in show else []
    rows = show.get("rows")
    lines: list[tuple[str, str, int, float]] = []
    for (row, column, seed), result in results.items():
        if not matches(column, show.get("columns")) or not ("{row}" in path or matches(row, rows)):
            continue
        value: Any = result
        if "of" in show:
            beside = {r: each for (r, c, s), each in results.items() if (c, s) == (column, seed)}
            value = named(show["of"])(result, beside, row, column)
        if value is not None:
            lines += [
                (r, c, seed, number)
                for r, c, number in entries(value, path, row, column)
                if matches(r, rows)
            ]
    found = pd.DataFrame(lines, columns=["row", "column", "seed", "value"])
    return found.drop_duplicates(["row", "column", "seed"], keep="last")


def over_columns(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """One column: the mean of all, for the rows and seeds that every column has."""
    wide = table.pivot_table(
        index=["row", "seed"], columns="column", values="value", sort=False
    ).dropna()
    return wide.mean(axis=1).reset_index(name="value").assign(column=name)


def means(wide: pd.DataFrame, rows: Sequence[str], show: Mapping[str, Any]) -> pd.DataFrame:
    """Mean and deviation over the seeds; the paper's number in brackets."""
    columns, paper = wide.columns.unique("column"), show.get("paper", {})
    texts = pd.DataFrame("-", rows, columns)
    for row, column in wide.columns.intersection([*product(rows, columns)]):
        text = spread(wide[row, column], show.get("digits", 1))
        theirs = paper.get(column, {}).get(row)
        texts.loc[row, column] = text if theirs is None or text == "-" else f"{text} ({theirs})"
    return texts


def differences(wide: pd.DataFrame, rows: Sequence[str], show: Mapping[str, Any]) -> pd.DataFrame:
    """Ours against the best other row of each column, which is named; and the rows of ``minus``."""
    columns, ours = wide.columns.unique("column"), show.get("ours", ())
    texts = pd.DataFrame("-", pd.Index([], name="minus"), columns)
    means_of_runs = wide.mean()

    for row in ours:
        texts.loc[f"{row} minus the best other"] = "-"
        for column in columns:
            others = [(each, column) for each in show.get("others", rows) if each not in ours]
            known = means_of_runs.reindex(others).dropna()
            if len(known) and (row, column) in wide:
                best = known.idxmax()
                text = f"{paired(wide[row, column], wide[best])} against {best[0]}"
                texts.loc[f"{row} minus the best other", column] = text
    for row, others in show.get("minus", {}).items():
        for other in others:
            texts.loc[f"{row} minus {other}"] = "-"
            for column in columns:
                if (row, column) in wide and (other, column) in wide:
                    text = paired(wide[row, column], wide[other, column])
                    texts.loc[f"{row} minus {other}", column] = text
    return texts


def report(shows: Sequence[Mapping[str, Any]], results: Results) -> Tables:
    """Every table that has a number, by its title."""
    made: Tables = {}
    for show in shows:
        table, title = gathered(show, results), show["title"]
        parts = {title: table}
        if "average" in show and table["column"].nunique() > 1:
            parts[f"{title}: {show['average']}"] = over_columns(table, show["average"])
        for name, part in parts.items():
            if part.empty:
                continue
            wide = part.pivot(index="seed", columns=["row", "column"], values="value")
            wide = wide[[*dict.fromkeys(zip(part["row"], part["column"]))]]
            patterns = show.get("rows", ["*"])
            rows = [r for p in patterns for r in part["row"].unique() if fnmatchcase(r, str(p))]
            rows = [*dict.fromkeys(rows)]
            made[name] = means(wide, rows, show)
            compared = differences(wide, rows, show)
            if len(compared):
                made[f"{name}: differences, 95 % paired interval"] = compared
    return made


def markdown(tables: Tables) -> str:
    """All tables below their titles."""
    return "\n\n".join(f"{title}:\n\n{grid(table)}" for title, table in tables.items())


def grid(table: pd.DataFrame) -> str:
    """A Markdown table, its head first."""
    head = [table.index.name or "", *table.columns]
    lines = [head, ["---"] * len(head), *table.reset_index().to_numpy()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_csv(path: Path, tables: Tables) -> None:
    """A line per entry: table, row, column, value."""
    lines = [["table", "row", "column", "value"]]
    for title, table in tables.items():
        lines += [[title, *place, text] for place, text in table.stack().items()]
    save_csv(path, lines)
