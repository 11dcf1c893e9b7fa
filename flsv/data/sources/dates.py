"""Columns of dates as numbers and categories."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from flsv.data.sources.table import Table
from flsv.errors import ColumnError, ConfigurationError

DAYS, PARTS = "days", "parts"
_DAY = np.timedelta64(1, "D")


def date_columns(name: str, how: str) -> Mapping[str, str]:
    """What a column of dates becomes: names of columns, and what each holds.

    Example:
        >>> date_columns("seen", "parts")
        {'seen year': 'year', 'seen month': 'month', 'seen weekday': 'weekday'}
        >>> date_columns("left", "came"), date_columns("seen", "days")
        ({'left': 'days since came'}, {'seen': 'days since 1970'})
    """
    if how == PARTS:
        return {f"{name} {part}": part for part in ("year", "month", "weekday")}
    return {name: "days since 1970" if how == DAYS else f"days since {how}"}


def without_dates(table: Table, name: str, how: str, form: str | None, gaps: Collection[str]) -> Table:
    """A table of what one column of dates becomes.

    Args:
        table: the rows.
        name: of the column.
        how: ``"days"``, ``"parts"``, or the column of dates from which days are counted.
        form: how dates are written, as of ``strftime``; None: ISO 8601, ``2024-03-31``.
        gaps: what a missing date looks like.

    Raises:
        ColumnError: a value that is no such date.

    Example:
        >>> table = Table("a.csv", pd.DataFrame({"came": ["2024-01-30", ""], "left": ["2024-02-02"] * 2}), np.arange(2))
        >>> without_dates(table, "left", "came", None, {""}).frame
           left
        0   3.0
        1   NaN
        >>> without_dates(table, "left", "parts", None, {""}).frame.iloc[0].map(str).tolist()
        ['2024.0', 'February', 'Friday']
    """
    days = _days(table, name, form, gaps)
    if how == PARTS:
        parts = (days.dt.year.astype(float), days.dt.month_name(), days.dt.day_name())
        made = dict(zip(date_columns(name, how), (parts[0], *(part.astype(object) for part in parts[1:]))))
    else:
        since = pd.Series(np.datetime64(0, "D"), index=days.index) if how == DAYS else _days(table, how, form, gaps)
        made = {name: (days - since) / _DAY}
    return replace(table, frame=pd.DataFrame(made), typed=True, _texts={})


def _days(table: Table, name: str, form: str | None, gaps: Collection[str]) -> pd.Series:
    column = table.column(name, "dates").reset_index(drop=True)
    if pd.api.types.is_datetime64_any_dtype(column):
        return column.dt.tz_localize(None).astype("datetime64[us]")
    missing = table.gaps(name, gaps)
    texts = pd.Series(table.text(name)).mask(missing, None)
    days = pd.to_datetime(texts, format=form or "ISO8601", errors="coerce", utc=True)
    wrong = np.flatnonzero(days.isna().to_numpy() & ~missing)
    if len(wrong):
        raise ColumnError(
            f"{table.path}, {table.places([int(wrong[0])])}: {texts[wrong[0]]!r} in {name!r} is no date as "
            f"{form or 'YYYY-MM-DD'}. Say how dates are written, such as date_format: '%d.%m.%Y'; what stands for a "
            "gap belongs into gaps.",
            {"exclude": [name]},
        )
    return days.dt.tz_localize(None)


def date_remedy(name: str, values: Sequence[str]) -> dict[str, Any]:
    """Options with which a column of days can be used: it is left out where the day cannot be told from the month.

    Example:
        >>> date_remedy("seen", ["31.1.2024"]), date_remedy("seen", ["1/2/2024"]), date_remedy("seen", ["2024-01-31"])
        ({'dates': {'seen': 'days'}, 'date_format': '%d.%m.%Y'}, {'exclude': ['seen']}, {'dates': {'seen': 'days'}})
    """
    texts = pd.Series(list(values), dtype=object)
    fitting = [
        form
        for form in (None, "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y")
        if pd.to_datetime(texts, format=form or "ISO8601", errors="coerce", utc=True).notna().all()
    ]
    if len(fitting) != 1:
        return {"exclude": [name]}
    return {"dates": {name: DAYS}} | ({} if fitting[0] is None else {"date_format": fitting[0]})


def check_dates(owner: str, dates: Mapping[str, str], others: Mapping[str, Sequence[str] | None]) -> None:
    """Raise ConfigurationError where ``dates`` says nothing that can be done, or a column has two roles.

    Args:
        owner: whose argument this is, for messages.
        dates: column to what becomes of it.
        others: names of other arguments, and the columns that these have.
    """
    if not isinstance(dates, Mapping) or not all(isinstance(how, str) for how in dates.values()):
        raise ConfigurationError(
            f"{owner}(dates={dates!r}): expected for each column of dates 'days' (since 1970), 'parts' (year, month "
            "and weekday), or the name of the column of dates from which days are counted."
        )
    for name, how in dates.items():
        if name == how:
            raise ConfigurationError(f"{owner}: dates counts the days of {name!r} from itself, which are none.")
        for argument, columns in others.items():
            if name in (columns or ()):
                raise ConfigurationError(f"{owner}: {name!r} is in dates and in {argument}. Keep one.")
