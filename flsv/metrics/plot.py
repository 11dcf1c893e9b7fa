"""Pictures of contributions: heatmaps of per-class values, bars of one vector, lines over rounds of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from flsv.drawing import label_text
from flsv.metrics._bars import draw_bars
from flsv.metrics._heatmap import draw_heatmap
from flsv.metrics._lines import draw_legend, draw_lines, draw_small_multiples


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
    sort: bool = False,
) -> tuple[Any, Any]:
    """Draw contributions, in colours that colour-blind people can tell apart.

    Args:
        val: ``[n, M]``: a heatmap, clients down and columns across. ``[n]``: bars. A sequence of ``[n]``, one a round:
            a line per client. A sequence of ``[n, M]``: the same in a small picture per column. NaN is absent: hatched
            in a heatmap, no bar, a gap in a line.
        ax: a matplotlib axis; by default a new figure that belongs to nobody (no pyplot state, nothing to close).
            Small pictures need a figure of their own.
        name: the title.
        class_names: labels of the columns, M of them.
        columns: what the columns of ``[n, M]`` are.
        client_names: of the clients, n of them.
        unit: of a value.
        limits: lowest and highest value of the scale; by default those of ``val``.
        stderr: standard errors ``[n]`` of bars.
        sort: rows or bars by value, largest first.

    Returns:
        ``(figure, axis)``; of small pictures, the first axis.

    Raises:
        ValueError: another shape.

    Example:
        >>> figure, axis = plot_contributions(torch.tensor([0.5, float("nan")]), client_names=["Boston", "Lyon"])
        >>> [label.get_text() for label in axis.get_xticklabels()]
        ['Boston', 'Lyon']
    """
    if not isinstance(val, Tensor):
        val = [row.detach().float().cpu() for row in val]
        if not val or any(row.ndim not in (1, 2) for row in val):
            raise ValueError("expected [n, M], [n] or a sequence of these.")
        if val[0].ndim == 2:
            return draw_small_multiples(torch.stack(val), ax, name, class_names, columns, client_names, unit, limits)
    if ax is None:
        matrix = isinstance(val, Tensor) and val.ndim == 2
        below = class_names if matrix else client_names if isinstance(val, Tensor) else None
        ax = new_figure(val, 1, _longest(below), _longest(client_names) if matrix else 0).subplots()
    if not isinstance(val, Tensor):
        draw_lines(ax, torch.stack(val), client_names, limits)
        ax.set_ylabel(unit)
        draw_legend(ax, len(val[0]))
    elif val.ndim == 2:
        draw_heatmap(ax, val.detach().float().cpu(), class_names, columns, client_names, unit, limits, sort)
    elif val.ndim == 1:
        draw_bars(ax, val.detach().float().cpu(), client_names, unit, limits, stderr, sort)
    else:
        raise ValueError("expected [n, M], [n] or a sequence of these.")
    ax.set_title(label_text(name))
    return ax.figure, ax


def new_figure(val: Tensor | Sequence[Tensor], panels: int = 1, below: int = 0, beside: int = 0) -> Figure:
    """A figure, empty, for so many pictures like that of ``val`` side by side, with labels of so many characters below
    and on the left of each."""
    if isinstance(val, Tensor) and val.ndim == 2:
        clients, classes = val.shape
        size = (min(max(4.2, 2.9 + 0.5 * classes), 16), min(max(2.4, 1.5 + 0.3 * clients), 14))
    elif isinstance(val, Tensor):
        size = (min(max(5.0, 2 + 0.42 * len(val)), 12), 3.8)
    else:
        size = (7.6, 3.8)
    size = (size[0] + 0.07 * beside, size[1] + 0.06 * below)
    return Figure(figsize=(panels * size[0], size[1]), dpi=100, layout="constrained")


def _longest(names: Sequence[str] | None) -> int:
    return max((len(label_text(name)) for name in names or ()), default=0)
