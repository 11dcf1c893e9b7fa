"""Pictures of contributions: heatmaps for per-class values, bars for one value per client, lines for values over
rounds. NaN is no bar, a gap in a line, hatching in a heatmap.

The figures are not registered with pyplot, so that they need not be closed. :func:`shows` makes notebooks show them.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from flsv.utilities.charts import PALETTE, client_labels, label_text

#: Largest number of labels on an axis. Of more, as many are shown, evenly spaced.
MOST_LABELS = 40
#: Largest number of clients whose lines all get a color and a name. Of more, only the highest and lowest do.
MOST_LINES, ENDS = 20, 5
#: Largest number of cells in a heatmap that shows their numbers.
MOST_NUMBERS = 200

_Plot = TypeVar("_Plot", bound=Callable[..., Any])


class Shown(tuple[Any, ...]):
    r"""A pair ``(figure, axis)`` that a notebook shows once as a picture.

    Example:
        >>> Shown(plot_contributions(torch.tensor([0.5])))._repr_png_()[:4]
        b'\x89PNG'
    """

    def _repr_png_(self) -> bytes | None:
        figure, buffer = self[0], io.BytesIO()
        if figure.canvas.manager is not None:
            return None
        figure.savefig(buffer, format="png", bbox_inches="tight")
        return buffer.getvalue()


def shows(plot: _Plot) -> _Plot:
    """Decorate a plotting function so that notebooks show its result as a picture."""

    @functools.wraps(plot)
    def with_picture(*args: Any, **kwargs: Any) -> Any:
        drawn = plot(*args, **kwargs)
        return Shown(drawn) if isinstance(drawn, tuple) else drawn

    return cast(_Plot, with_picture)


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
        raise ValueError(
            "expected [n, M], [n] or a sequence of [n]: of values per class, those of one class."
        )
    values = torch.stack([row.detach().double().cpu() for row in rows]).numpy()
    names = [*map(label_text, client_names or range(values.shape[1]))]
    if isinstance(val, Tensor) and val.ndim == 2:
        titles = [*map(label_text, class_names or range(values.shape[2]))]
        ax = ax or _new_axis(2.9 + 0.5 * len(titles), 1.5 + 0.3 * len(names), titles, names)
        _draw_heatmap(ax, values[0], titles, names, unit, limits)
        ax.set_xlabel(label_text(columns))
        ax.set_ylabel("client")
    else:
        if isinstance(val, Tensor):
            ax = ax or _new_axis(max(5.0, 2 + 0.42 * len(names)), 3.8, names)
            _draw_bars(ax, values[0], names, stderr)
        else:
            ax = ax or _new_axis(7.6, 3.8)
            _draw_lines(ax, values, [*map(label_text, client_labels(len(names), client_names))])
        ax.set(ylabel=unit, **({} if limits is None else {"ylim": limits}))
        ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(label_text(name))
    return ax.figure, ax


def _new_axis(
    width: float, height: float, below: Sequence[str] = (), beside: Sequence[str] = ()
) -> Any:
    """Return the axis of a new figure, with room for labels below and beside it."""
    from matplotlib.figure import (
        Figure,
    )  # imported here because it is slow, and most runs draw nothing

    width, height = min(max(width, 4.2), 16), min(max(height, 2.4), 14)
    more = [
        size * max(map(len, texts), default=0) for size, texts in ((0.07, beside), (0.06, below))
    ]
    return Figure(
        figsize=(width + more[0], height + more[1]), dpi=100, layout="constrained"
    ).subplots()


def _draw_bars(ax: Any, values: np.ndarray, names: Sequence[str], stderr: Tensor | None) -> None:
    known, whiskers = np.flatnonzero(np.isfinite(values)), dict[str, Any]()
    if stderr is not None and not stderr.isnan().all():
        whiskers = {
            "yerr": stderr.detach().double().cpu().numpy()[known],
            "ecolor": "0.65",
            "capsize": 3,
        }
    ax.bar(known, values[known], color=PALETTE[0], **whiskers)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set(xlabel="client", xlim=(-0.7, len(values) - 0.3))
    _label(ax.xaxis, names)
    for place in {*range(len(values))} - {*known.tolist()} if len(values) <= MOST_LABELS else ():
        ax.text(
            place, 0, " no value", rotation=90, ha="center", va="bottom", fontsize=8, color="0.5"
        )


def _draw_lines(ax: Any, rows: np.ndarray, names: Sequence[str]) -> None:
    """Draw a line for each of n clients, its values in r rounds ``rows [r, n]``, with a legend to the right."""
    from matplotlib.ticker import MaxNLocator

    last = {client: column[np.isfinite(column)][-1:] for client, column in enumerate(rows.T)}
    order = sorted(
        (client for client in last if last[client].size), key=lambda client: -last[client][0]
    )
    named = (
        range(len(names)) if len(names) <= MOST_LINES else [*order[:ENDS], *order[ENDS:][-ENDS:]]
    )
    for client in {*order} - {*named}:
        ax.plot(range(1, len(rows) + 1), rows[:, client], color="0.72", linewidth=0.7)
    for place, client in enumerate(named):
        style = {
            "color": PALETTE[place % len(PALETTE)],
            "linestyle": ("-", "--")[place // len(PALETTE)],
        }
        # A line through a single value would be invisible.
        ax.plot(range(1, len(rows) + 1), rows[:, client], label=names[client], marker=".", **style)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.set_xlabel("round")
    title = None if len(named) == len(names) else "top and bottom"
    ax.legend(
        fontsize="small", frameon=False, title=title, loc="center left", bbox_to_anchor=(1.0, 0.5)
    )


def _draw_heatmap(
    ax: Any,
    values: np.ndarray,
    titles: Sequence[str],
    names: Sequence[str],
    unit: str,
    limits: tuple[float, float] | None,
) -> None:
    """Draw ``values [n, M]``, a row per client, with colors symmetric about 0 if some are negative."""
    known = values[np.isfinite(values)]
    low, high = limits or ((known.min(), known.max()) if known.size else (0.0, 1.0))
    negative = low < 0
    high = max(-low, high) if negative else high or 1.0
    # Cells without a value let the hatching show through: white would mean 0.
    ax.set_facecolor("0.9")
    ax.patch.set(hatch="////", edgecolor="0.65")
    cells = np.where(np.isfinite(values), values, np.nan)
    colors: dict[str, Any] = {
        "cmap": "RdBu" if negative else "Blues",
        "vmin": -high if negative else 0.0,
        "vmax": high,
    }
    image = ax.imshow(cells, aspect="auto", interpolation="nearest", **colors)
    ax.figure.colorbar(image, ax=ax, label=unit)
    _label(ax.xaxis, titles)
    _label(ax.yaxis, names)
    for (row, column), value in np.ndenumerate(cells) if cells.size <= MOST_NUMBERS else ():
        if value == value:
            text = f"{value:.2f}" if abs(value) < 100 else f"{value:.3g}"
            color = "white" if abs(value) > 0.6 * high else "black"
            ax.text(column, row, text, ha="center", va="center", fontsize=8, color=color)


def _label(axis: Any, texts: Sequence[str]) -> None:
    """Put texts as labels on an axis, rotated by 45 degrees if they are long and side by side."""
    places = range(0, len(texts), 1 + (len(texts) - 1) // MOST_LABELS)
    axis.set_ticks(places, [texts[place] for place in places])
    for label in (
        axis.get_ticklabels()
        if axis.axis_name == "x" and max(map(len, texts), default=0) > 3
        else ()
    ):
        label.set(rotation=45, horizontalalignment="right", rotation_mode="anchor")
