"""The table at the end of a run: who had what, and what it was worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from torch import Tensor


def contribution_table(
    num_samples: Tensor,
    values: Mapping[str, Tensor],
    weights: Tensor | None,
    per_class: Mapping[str, Tensor],
    class_names: Sequence[str] | None = None,
    accuracy: Tensor | None = None,
) -> Table:
    """One row per client.

    Args:
        num_samples: ``[n]`` training samples.
        values: metric name to ``[n]``, a client's overall contribution.
        weights: ``[n]`` weights of the last aggregation, NaN for clients outside its cohort.
        per_class: metric name to ``[n, M]``; shown where the classes fit (at most 10).
        class_names: names of the M classes.
        accuracy: ``[n]`` accuracy of the clients' own models.
    """
    table = Table(title="Contributions", title_justify="left")
    columns: list[tuple[str, list[str]]] = [("client", [str(i) for i in range(len(num_samples))])]
    columns.append(("samples", [str(int(s)) for s in num_samples]))
    columns += [(name, [_number(v) for v in value]) for name, value in values.items()]
    if weights is not None:
        columns.append(("weight", [_number(w) for w in weights]))
    if accuracy is not None:
        columns.append(("own accuracy", [_number(a) for a in accuracy]))
    for name, matrix in per_class.items():
        if matrix.shape[1] <= 10:
            prefix = f"{name}\nclass " if len(per_class) > 1 else "class\n"
            for j in range(matrix.shape[1]):
                label = class_names[j] if class_names else j
                columns.append((f"{prefix}{label}", [_number(v, 2) for v in matrix[:, j]]))
    for header, _ in columns:
        table.add_column(header, justify="right")
    for row in zip(*(cells for _, cells in columns)):
        table.add_row(*row)
    return table


def _number(value: Tensor, digits: int = 3) -> str:
    return "-" if value.isnan() else f"{value.item():.{digits}f}"
