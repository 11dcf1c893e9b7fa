"""Terminal: the sink that writes to Lightning's progress bar, and prints tables at the end.

Columns that do not fit the terminal's width are printed in a second table below, with the clients' names again. Numbers
are never shortened. In a pipe or a file, tables have their full width.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar

from flsv.results.folder import run_folder, where_results_are
from flsv.results.round_result import RunResult, Sink
from flsv.results.text import (
    MESSAGES,
    describe_change,
    ends_of,
    format_numbers,
    highest_first,
    percent,
    shares_in,
    unbroken,
    with_intervals,
)
from flsv.utilities.display import shortened_name

if TYPE_CHECKING:
    from pandas import Series

    from flsv.results.basis import Basis
    from flsv.results.reading import Run

#: Largest number of clients that are all shown. Of more, the ten highest and the ten lowest are shown.
MAX_CLIENTS_SHOWN = 20
#: Largest number of classes whose values are printed.
_MAX_COLUMNS = 10
#: Performances whose names are words, and get a capital letter at the beginning of a sentence.
_TITLED_SCORES = {"accuracy", *MESSAGES["titles"]}


def print_contributions(run: Run, where: Sequence[str]) -> None:
    """Print a table of the values that the run's page shows, the verdict on them, and the lines ``where``."""
    from flsv.results.basis import preferred_basis  # it imports pandas

    basis = preferred_basis(run)
    if basis is None:
        _print_clients(run)
        lines = [f"{MESSAGES['no_metric']} {MESSAGES['name_one']}"]
    else:
        _print_values(run, basis)
        lines = basis.lines

    lines += performance_lines(run.record)
    logged_values = run.record.get("logged", {})
    if logged_values:
        texts = [f"{name} {value:.4g}" for name, value in logged_values.items()]
        lines.append(f"Model:   {', '.join(texts)}")
    print_lines(lines)
    for line in where:
        print(line)


def _print_clients(run: Run) -> None:
    rows = shown_clients(None, run.num_clients)
    columns = {
        "samples": _sample_counts(run),
        "rounds": format_numbers(run.final("rounds")),
    }
    print_table(f"Clients{_part_shown(rows, run)}", run.client_names, columns, rows)


def _print_values(run: Run, basis: Basis) -> None:
    rows = shown_clients(basis.estimates["value"], run.num_clients)
    part = _part_shown(rows, run, order=f", by {basis.key}")
    columns = {
        "samples": _sample_counts(run),
        basis.key: with_intervals(basis.estimates),
        **share_column(basis),
    }
    print_table(f"Contributions{part}", run.client_names, columns, rows)
    if basis.inputs.unsuitable:
        print_values_by_class(run, basis.key, rows)


def _part_shown(
    rows: Sequence[int],
    run: Run,
    order: str = "",
) -> str:
    """Return the end of a table's title: how many of the clients the table shows, or "" if it shows all."""
    if len(rows) == run.num_clients:
        return ""
    part = f"{len(rows)} of {run.num_clients} clients"
    return f" of {part}{order}; all are in contributions.csv"


def _sample_counts(run: Run) -> list[str]:
    return list(map(str, run.record["samples"]))


def print_values_by_class(
    run: Run,
    metric: str,
    rows: Sequence[int],
) -> None:
    """Print a table of a metric's values by class or other column, unless it has more than ten of them or none."""
    columns = run.columns(metric)
    if not 0 < len(columns) <= _MAX_COLUMNS:
        return
    kind = "class" if run.columns_are_classes(metric) else "column"
    cells = {}
    for position, (key, name) in enumerate(columns.items()):
        is_taken = name in cells  # another class has this name
        head = f"{name} ({position})" if is_taken else name
        values = run.final(metric, key)
        cells[head] = format_numbers(values, digits=2)
    print_table(f"{metric} by {kind}", run.client_names, cells, rows)


def print_lines(lines: Sequence[str]) -> None:
    """Print lines, wrapped to the terminal's width."""
    for line in lines:
        print(filled(line))


def filled(line: str) -> str:
    """Wrap a line to the terminal's width, indented after a label."""
    label = line[:9] if line[6:9] == "   " else ""
    indent = " " * len(label)
    text = textwrap.fill(
        unbroken(line),
        width() or 10_000,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    return text.replace("\u00a0", " ")


def share_column(basis: Basis) -> dict[str, list[str]]:
    """Format the clients' shares as ``{column: cells}``, empty if the verdict forbids a payment."""
    if basis.verdict().forbids_payment:
        return {}
    return {"share": list(map(percent, shares_in(basis.values)))}


def shown_clients(values: Series | None, num_clients: int) -> list[int]:
    """Return the ids of the clients to show in a table.

    They are all clients, or of more than 20 the ten with the highest and the ten with the lowest values.
    """
    if num_clients <= MAX_CLIENTS_SHOWN or values is None:
        return ends_of(range(num_clients), MAX_CLIENTS_SHOWN)
    return ends_of(highest_first(values.dropna()), MAX_CLIENTS_SHOWN)


def print_table(
    title: str,
    names: Sequence[str],
    columns: Mapping[str, Sequence[str]],
    rows: Sequence[int] | None = None,
    corner: str = "client",
) -> None:
    """Print a table of columns ``{header: cells}`` with a row per name. A table wider than the terminal is split."""
    import pandas  # not at the start: it takes most of the time in which flsv is imported

    row_names = list(map(shortened_name, names))
    table = pandas.DataFrame(dict(columns), index=row_names, dtype=object)
    table.columns.name = corner
    if rows is not None:
        table = table.iloc[list(rows)]
    print(filled(title))
    with pandas.option_context("display.unicode.east_asian_width", True):
        text = table.to_string(line_width=width())
        print(text, end="\n\n")


def width() -> int | None:
    """Return the terminal's width. None (no limit) for a pipe or file, unless the variable COLUMNS is set."""
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
        return None
    return shutil.get_terminal_size().columns


def performance_lines(record: Mapping[str, Any]) -> list[str]:
    """Describe the model's performances at the start and end of training, from the run's learning record.

    Example:
        >>> verdict = {"by": "accuracy", "start": 0.1, "end": 0.3, "majority": 0.25}
        >>> performance_lines({"paid_in": {"sv": verdict, "value": verdict}})
        ['Accuracy on the validation set: from 10.0 % to 30.0 % (always predicting the most frequent class: 25.0 %).']
    """
    lines = []
    performances = record.get("paid_in", {})  # by metric, what its values distribute
    for performance in performances.values():
        sentence = f"{describe_change(performance)}."
        score, _, _positive_class = performance["by"].partition(" of ")  # as in "auroc of yes"
        if score in _TITLED_SCORES:  # a name that the module logs is not changed
            sentence = sentence[0].upper() + sentence[1:]
        lines.append(sentence)
    lines += record.get("coalitions", [])
    for metric, sentence in record.get("missing", {}).items():
        lines.append(f"There are no values by {metric}. {sentence}")
    return list(dict.fromkeys(lines))


def _show_progress_on(
    bar: ProgressBar,
    progress: Callable[[], dict[str, str]],
) -> None:
    """Let this bar alone show the progress of the training, too."""
    get_metrics = bar.get_metrics

    def metrics_and_progress(
        trainer: L.Trainer,
        module: L.LightningModule,
    ) -> dict[str, Any]:
        items = dict(get_metrics(trainer, module))
        items.pop("v_num", None)  # the number of the run's folder
        if trainer.training:
            items |= progress()
        return items

    bar.get_metrics = metrics_and_progress  # type: ignore[method-assign, assignment]


class Terminal(Sink):
    """Sink that adds round and client to the trainer's progress bar, and prints a table at the end."""

    def __init__(
        self,
        trainer: L.Trainer,
        table: bool,
        files: bool,
        progress: Callable[[], dict[str, str]],
    ) -> None:
        self._trainer = trainer
        self._bar = trainer.progress_bar_callback
        self._prints_table = table
        self._writes_files = files
        self._result: RunResult | None = None
        if self._bar is not None:
            _show_progress_on(self._bar, progress)

    def finish(self, result: RunResult) -> None:
        """Store the result for :meth:`show_table`, since a live progress bar would erase a table."""
        self._result = result

    def show_table(self) -> None:
        """Print the clients' table, if the fit has a result and the argument ``table`` is True."""
        if not self._prints_table or self._result is None:
            return
        record = self._result.record
        where = []
        if self._writes_files:
            where = where_results_are(self._trainer, has_ended="ended" in record)
        from flsv.results.reading import Run  # it imports pandas

        run = Run(run_folder(self._trainer), record, self._result.table)
        print_contributions(run, where)

    def close(self, failed: bool = False) -> None:
        """Give the progress bar its own method back."""
        if self._bar is not None:
            self._bar.__dict__.pop("get_metrics", None)
