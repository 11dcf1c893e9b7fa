"""Contributions over rounds, a line a client; of values per class a small picture of them for each column."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from flsv.drawing import PALETTE, client_labels, label_text
from flsv.metrics._marks import BOTTOM, MOST_COLOURS, OTHERS, TOP, column_title, ends

_LINES = ("-", "--", ":")


def draw_lines(
    ax: Any,
    rows: Tensor,
    names: Sequence[str] | None,
    limits: tuple[float, float] | None,
    ranking: Tensor | None = None,
) -> None:
    """``[rounds, n]``; the last numbers say who is at the top, or ``ranking [n]``."""
    clients = rows.shape[1]
    labels = client_labels(clients, names)
    if clients <= MOST_COLOURS:
        for client, line in enumerate(rows.T):
            style: dict[str, Any] = {"color": PALETTE[client % len(PALETTE)]}
            style["linestyle"] = _LINES[client // len(PALETTE)]
            marker = "o" if len(rows) == 1 else None
            ax.plot(range(len(rows)), line.numpy(), label=label_text(labels[client]), marker=marker, **style)
    else:
        top, bottom = ends(_last(rows) if ranking is None else ranking)
        for client, line in enumerate(rows.T):
            if client not in (*top, *bottom):
                ax.plot(range(len(rows)), line.numpy(), color=OTHERS, linewidth=0.7, zorder=1)
        for group, colour in ((top, TOP), (bottom, BOTTOM)):
            for place, client in enumerate(group):
                style = {"color": colour, "linestyle": _LINES[place % 3], "marker": "os^Dv"[place], "markersize": 4}
                style["markevery"] = max(1, len(rows) // 8)
                ax.plot(range(len(rows)), rows[:, client].numpy(), label=label_text(labels[client]), **style)
    ax.set_xlabel("round")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.margins(x=0.02)
    ax.spines[["top", "right"]].set_visible(False)
    if limits is not None:
        ax.set_ylim(*limits)


def draw_legend(ax: Any, clients: int) -> None:
    handles, labels = ax.get_legend_handles_labels()
    title = None if clients <= MOST_COLOURS else "top and bottom"
    ax.legend(
        handles, labels, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, title=title
    )


def draw_small_multiples(
    rows: Tensor,
    ax: Any,
    name: str,
    class_names: Sequence[str] | None,
    columns: str,
    client_names: Sequence[str] | None,
    unit: str,
    limits: tuple[float, float] | None,
) -> tuple[Any, Any]:
    """``[rounds, n, M]``: one scale, and one colour per client, in all of them."""
    if ax is not None:
        raise ValueError("a sequence of [n, M] needs a figure of its own: leave ax out.")
    classes = rows.shape[2]
    # The same clients stand out in all of them.
    ranking = _last(rows.nanmean(2))
    across = min(4, classes)
    down = math.ceil(classes / across)
    figure = Figure(figsize=(2.6 * across + 1.6, 0.9 + 1.9 * down), dpi=100, layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flatten()
    for column, axis in enumerate(axes):
        if column >= classes:
            axis.axis("off")
            continue
        draw_lines(axis, rows[:, :, column], client_names, limits, ranking)
        axis.set_title(label_text(column_title(column, class_names, columns)), fontsize="small")
        if column + across < classes:
            axis.set_xlabel("")
        axis.tick_params(labelsize="small", labelbottom=column + across >= classes)
    handles, labels = axes[0].get_legend_handles_labels()
    title = None if rows.shape[1] <= MOST_COLOURS else "top and bottom"
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize="small", title=title)
    figure.supylabel(unit, fontsize="medium")
    figure.suptitle(label_text(name))
    return figure, axes[0]


def _last(rows: Tensor) -> Tensor:
    """Of ``[rounds, n]``, every client's last number."""
    last = rows[0]
    for row in rows[1:]:
        last = torch.where(row.isnan(), last, row)
    return last
