"""Pictures of contributions: heatmaps for per-class values, bars for one value per client, lines for values over
rounds.

The figures are not registered with pyplot, so that they need not be closed. :func:`flsv.utilities.plots.shows` makes
notebooks show them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flsv.utilities.charts import draw_bars, draw_heatmap, draw_legend, draw_lines, label_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_contributions(
    val: Tensor | Sequence[Tensor],
    ax: Any = None,
    name: str = "contribution",
    class_names: Sequence[str] | None = None,
    columns: str = "class",
    client_names: Sequence[str] | None = None,
    unit: str = "",
    limits: tuple[float, float] | None = None,
    stderr: Tensor | None = None,
) -> tuple[Any, Any]:
    """Draw values ``[n, M]`` as a heatmap, ``[n]`` as bars, a sequence of ``[n]`` as lines. Return (figure, axis)."""
    rows = [val] if isinstance(val, Tensor) else list(val)
    if not rows or any(row.ndim not in (1, 2 if row is val else 1) for row in rows):
        raise ValueError("expected [n, M], [n] or a sequence of [n]: of values per class, those of one class.")
    values = torch.stack([row.detach().double().cpu() for row in rows]).numpy()
    if not isinstance(val, Tensor):
        ax = ax or new_figure(val).subplots()
        draw_lines(ax, values, client_names, unit=unit, limits=limits)
        draw_legend(ax, values.shape[1])
    elif val.ndim == 2:
        ax = ax or new_figure(val, _longest(class_names), _longest(client_names)).subplots()
        titles = _titles(val.shape[1], class_names, "")
        draw_heatmap(ax, values[0], titles, client_names, columns=columns, unit=unit, limits=limits)
    else:
        ax = ax or new_figure(val, _longest(client_names)).subplots()
        errors = None if stderr is None else stderr.detach().double().cpu().expand(2, -1).numpy()
        draw_bars(ax, values[0], client_names, unit=unit, limits=limits, errors=errors)
    ax.set_title(label_text(name))
    return ax.figure, ax


def new_figure(val: Tensor | Sequence[Tensor], below: int = 0, beside: int = 0) -> Figure:
    """Make an empty figure that is large enough for ``val`` and for labels of so many characters."""
    from matplotlib.figure import Figure

    if isinstance(val, Tensor) and val.ndim == 2:
        clients, classes = val.shape
        size = (min(max(4.2, 2.9 + 0.5 * classes), 16), min(max(2.4, 1.5 + 0.3 * clients), 14))
    elif isinstance(val, Tensor):
        size = (min(max(5.0, 2 + 0.42 * len(val)), 12), 3.8)
    else:
        size = (7.6, 3.8)
    size = (size[0] + 0.07 * beside, size[1] + 0.06 * below)
    return Figure(figsize=size, dpi=100, layout="constrained")


def _longest(names: Sequence[str] | None) -> int:
    return max((len(label_text(name)) for name in names or ()), default=0)


def _titles(count: int, names: Sequence[str] | None, kind: str) -> list[str]:
    texts = [str(names[column]) if names else str(column) for column in range(count)]
    return [label_text(f"{kind} {text}".strip() if text.isdigit() else text) for text in texts]
