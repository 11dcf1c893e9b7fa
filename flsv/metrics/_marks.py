"""Who stands out in a picture of many clients, in what order they stand, and what they are called."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from flsv.drawing import label_text

#: Rows or bars up to which every client has a label; of more, the top and the bottom ones have.
MOST_LABELS = 40
#: Clients with a colour each; of more, the top and the bottom ones have one.
MOST_COLOURS = 20
#: So many clients are at the top, and at the bottom.
ENDS = 5
TOP, BOTTOM, OTHERS = "#0b5fa5", "#c44e00", "0.72"


def ends(values: Tensor) -> tuple[list[int], list[int]]:
    """The clients at the top and at the bottom, best first, worst first; those without a value are neither."""
    order = [int(i) for i in values.argsort(descending=True) if values[i] == values[i]]
    each = min(ENDS, len(order) // 2)
    return order[:each], order[::-1][:each]


def order_of(values: Tensor, sort: bool) -> list[int]:
    """Clients in the order of their rows; those without a value come last."""
    if not sort:
        return list(range(len(values)))
    return values.nan_to_num(-math.inf, math.inf, -math.inf).argsort(descending=True, stable=True).tolist()


def short_labels(names: Sequence[str] | None, clients: int) -> list[str]:
    """Beside an axis that is called "client", a number is enough."""
    return [label_text(client if names is None else names[client]) for client in range(clients)]


def column_title(column: int, names: Sequence[str] | None, kind: str) -> str:
    name = str(names[column]) if names else str(column)
    return f"{kind} {name}".strip() if name.isdigit() else name
