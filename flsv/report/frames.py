"""Runs as tidy pandas DataFrames."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flsv.report.reading import NAN, open_run

if TYPE_CHECKING:
    import pandas
    from torch import Tensor

COLUMNS = ("round", "metric", "client", "client_name", "class", "class_name", "value", "low", "high")


def read_run(path: str | Path) -> pandas.DataFrame:
    """What a run has measured, one row per round, metric, client and class.

    A value is there in the rounds in which it changed, or its interval did, as in ``contributions.csv``: to have it in
    every round, pivot and fill forward.

    Args:
        path: the run's folder, see :func:`flsv.report.open_run`; also a killed run's.

    Returns:
        Columns ``round`` (from 0), ``metric`` (``"weight"``, ``"accuracy"`` and ``"update_norm"`` among them, and what
        diagnostics say as ``"<metric>/stderr"``), ``client`` (its number), ``client_name``, ``class`` (the number of a
        class, or the name of another column, as text; None for a client's overall value), ``class_name``, ``value``,
        ``low`` and ``high`` (the ends of an overall value's interval, NaN where none is known).

    Raises:
        ConfigurationError: there is no run there.
        ImportError: pandas is not installed.

    Example:
        >>> frame = read_run("runs/lightning_logs/version_0")  # doctest: +SKIP
        >>> cssv = frame[(frame["metric"] == "cssv") & frame["class"].isna()]  # doctest: +SKIP
        >>> cssv.pivot(index="round", columns="client_name", values="value").ffill()  # doctest: +SKIP
    """
    run = open_run(path)
    return _frame(
        (
            row.round,
            row.metric,
            row.client,
            run.client_names[row.client],
            row.column or None,
            run.column_name(row.metric, row.column) if row.column else None,
            row.value,
            row.low,
            row.high,
        )
        for row in run.rows
    )


def current_frame(
    tables: Iterable[tuple[str, Tensor, Sequence[str] | None, Sequence[str] | None]],
    client_names: Sequence[str],
    round_index: int,
    intervals: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> pandas.DataFrame:
    """What a loop knows between two rounds, in the columns of :func:`read_run`.

    Args:
        tables: name, values ``[n]`` or ``[n, M]``, and of the latter the columns' keys and names.
        client_names: n names.
        round_index: of the last round.
        intervals: name to low and high ends ``[n]`` of its overall values.
    """
    rows: list[tuple[Any, ...]] = []
    for metric, values, keys, names in tables:
        ends = (intervals or {}).get(metric) if keys is None else None
        both = [(NAN, NAN)] * len(values) if ends is None else list(zip(*(end.double().tolist() for end in ends)))
        numbers = values.detach().double().cpu()
        for client, line in enumerate(numbers.reshape(len(numbers), -1).tolist()):
            for key, name, number in zip(keys or (None,), names or (None,), line):
                if number == number:
                    rows.append((round_index, metric, client, client_names[client], key, name, number, *both[client]))
    return _frame(rows)


def _frame(rows: Iterable[tuple[Any, ...]]) -> pandas.DataFrame:
    try:
        import pandas
    except ImportError as error:
        raise ImportError("DataFrames need pandas, which flsv does not: pip install pandas") from error
    return pandas.DataFrame(list(rows), columns=list(COLUMNS))
