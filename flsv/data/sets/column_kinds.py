"""What a table's column holds: what its library says of it, or, of a file's text, what all of it can be read as."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from flsv.data.sets.csv_file import CSVFile
from flsv.errors import ConfigurationError

NUMBERS, CATEGORIES, TRUTH = "numbers", "categories", "truth values"
_KNOWN = (NUMBERS, CATEGORIES, TRUTH)
_DAY = re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?|\d{1,2}[./-]\d{1,2}[./-]\d{4}( .*)?")
#: How many names a line shows.
_SHOWN = 20


def kind_of(values: Iterable[Any]) -> str:
    """The kind of a column's values, gaps left out.

    Returns:
        ``"numbers"``, ``"categories"`` of words, ``"truth values"``, or else the names of the values' types; empty
        where there is no value.

    Example:
        >>> kind_of([3, 0.5]), kind_of(["01234"]), kind_of([True, False]), kind_of([1, "1"]), kind_of([])
        ('numbers', 'categories', 'truth values', 'int, str', '')
    """
    types = {type(value) for value in values}
    bases = ((bool, TRUTH), (Number, NUMBERS), (str, CATEGORIES))
    kinds = {next((kind for base, kind in bases if issubclass(each, base)), each.__name__) for each in types}
    return kinds.pop() if len(kinds) == 1 else ", ".join(sorted(each.__name__ for each in types))


def declared_kind(tables: Sequence[CSVFile], name: str) -> str | None:
    """The kind of a column in all tables; None where only its text can tell.

    Raises:
        ConfigurationError: of several kinds, or of one that is no feature, such as dates.
    """
    found = {table.kinds[name]: table for table in tables if table.kinds is not None and table.kinds[name]}
    strange = next((kind for kind in found if kind not in _KNOWN), None)
    if strange is not None:
        raise ConfigurationError(
            f"{found[strange].path}: {name!r} has values of the type {strange}; expected numbers, words or truth "
            f"values. {_advice(name)}"
        )
    if len(found) > 1:
        told = " and ".join(f"{kind} in {table.path}" for kind, table in found.items())
        raise ConfigurationError(f"{name!r} has {told}: make it the same kind in all, or name it in categorical.")
    kind = next(iter(found), None)
    return kind if kind == CATEGORIES or all(table.kinds is not None for table in tables) else None


def _advice(name: str) -> str:
    return (
        f"Make numbers of them (of a date, the days since another), or leave the column out (exclude: [{name}]); "
        f"categorical: [{name}] makes a category of each."
    )


def check_no_days(table: CSVFile, name: str, values: Iterable[str]) -> None:
    """Raise ConfigurationError where all values are days: a category of each would say nothing of any other."""
    if all(_DAY.fullmatch(value) for value in values):
        raise ConfigurationError(
            f"{table.path}: the values of {name!r} are dates; a category for each day is no feature. {_advice(name)}"
        )


def say_kinds(table: CSVFile, kinds: Mapping[str, str], gaps: Mapping[str, Collection[str]]) -> None:
    """Say what the columns were taken for, a line for each kind.

    Args:
        table: the first of all.
        kinds: of each column that is used.
        gaps: what a column's gaps look like, where it has any.
    """
    told = {kind: [name for name, each in kinds.items() if each == kind] for kind in dict.fromkeys(kinds.values())}
    told["gaps"] = [
        name + "".join(f" {text!r}" for text in sorted(set(texts) - {""})) for name, texts in gaps.items() if texts
    ]
    lines = [f"  {what}: {_some(names)}" for what, names in told.items() if names]
    hint = " (otherwise: categorical, gaps and exclude of the columns)" if table.kinds is None else ""
    rank_zero_info("\n".join([f"{table.path} is read as{hint}", *lines]))


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
