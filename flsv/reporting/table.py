"""The table at the end of a run: who had what, and what it was worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor


def client_table(
    num_samples: Tensor, values: Mapping[str, Tensor], weights: Tensor | None, accuracy: Tensor | None = None
) -> Table:
    """One row per client: what it had and what it was worth.

    Args:
        num_samples: ``[n]`` training samples.
        values: metric name to ``[n]``, a client's overall contribution.
        weights: ``[n]`` weights of the last aggregation, NaN for clients outside its cohort.
        accuracy: ``[n]`` accuracy of the clients' own models.
    """
    columns = {"client": [str(i) for i in range(len(num_samples))], "samples": [str(int(s)) for s in num_samples]}
    columns |= {name: _numbers(value, 3) for name, value in values.items()}
    if weights is not None:
        columns["weight"] = _numbers(weights, 3)
    if accuracy is not None:
        columns["own accuracy"] = _numbers(accuracy, 3)
    return _table("Contributions", columns)


def class_table(name: str, values: Tensor, class_names: Sequence[str] | None = None, columns: str = "class") -> Table:
    """One row per client and one column per class (or whatever ``columns`` are), of a metric's values ``[n, M]``."""
    cells = {"client": [str(i) for i in range(len(values))]}
    cells |= {
        str(class_names[j] if class_names else j): [x.replace("0.", ".", 1) for x in _numbers(column, 2)]
        for j, column in enumerate(values.T)
    }
    return _table(f"{name} by {columns}", cells)


def _table(title: str, columns: Mapping[str, list[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for header in columns:
        table.add_column(header, justify="right")
    for row in zip(*columns.values()):
        table.add_row(*row)
    return table


def _numbers(values: Tensor, digits: int) -> list[str]:
    digits = digits if values.is_floating_point() else 0
    return ["-" if value != value else f"{value:.{digits}f}" for value in values.tolist()]
