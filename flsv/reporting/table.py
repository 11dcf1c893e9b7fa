"""The table at the end of a run: who had what, and what it was worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor


def client_table(
    num_samples: Tensor,
    values: Mapping[str, Tensor],
    weights: Tensor | None,
    accuracy: Tensor | None = None,
    rounds: Tensor | None = None,
) -> Table:
    """One row per client: what it had and what it was worth.

    Args:
        num_samples: ``[n]`` training samples.
        values: metric name to ``[n]``, a client's overall contribution.
        weights: ``[n]`` weights of the last aggregation, NaN for clients outside its cohort.
        accuracy: ``[n]`` accuracy of the clients' own models.
        rounds: ``[n]``, how many rounds each client took part in.
    """
    columns = {"client": [str(i) for i in range(len(num_samples))], "samples": _numbers(num_samples, 0)}
    if rounds is not None:
        columns["rounds"] = _numbers(rounds, 0)
    columns |= {name: _numbers(value, 3) for name, value in values.items()}
    if weights is not None:
        columns["weight"] = _numbers(weights, 3)
    if accuracy is not None:
        columns["own accuracy"] = _numbers(accuracy, 3)
    return _table("Contributions", columns)


def class_table(name: str, values: Tensor, class_names: Sequence[str] | None = None, columns: str = "class") -> Table:
    """One row per client and one column per class (or whatever ``columns`` are), of a metric's values ``[n, M]``."""
    cells = {"client": [str(i) for i in range(len(values))]}
    names = [str(class_names[j] if class_names else j) for j in range(values.shape[1])]
    for j, column in enumerate(values.T):
        # A class may have the name of another, or of the first column.
        header = names[j] if [*cells, *names].count(names[j]) == 1 else f"{names[j]} ({j})"
        cells[header] = [x.replace("0.", ".", 1) for x in _numbers(column, 2)]
    return _table(f"{name} by {columns}", cells)


def _table(title: str, columns: Mapping[str, list[str]]) -> Table:
    # Text, not str: names are the user's, and rich would read markup into "[/b]".
    table = Table(title=Text(title, style="table.title"), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for header in columns:
        table.add_column(Text(header), justify="right")
    for row in zip(*columns.values()):
        table.add_row(*row)
    return table


def _numbers(values: Tensor, digits: int) -> list[str]:
    numbers = values.tolist()
    if all(value != value or value % 1 == 0 for value in numbers):  # counts
        digits = 0
    return ["\N{EN DASH}" if value != value else f"{value:.{digits}f}" for value in numbers]
