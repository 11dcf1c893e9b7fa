"""Charts of clients' values (bars, lines and heatmaps), in which NaN means no value."""
# NaN is no bar, a gap in a line, hatching in a heatmap. An error while drawing never stops a run, see `drawing`.

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas

LONGEST = 24

#: Ten colors that people with any of the common kinds of color blindness can tell apart: M. A. Petroff, "Accessible
#: Color Sequences for Data Visualization", 2021 (matplotlib's "petroff10", from version 3.10 on).
PALETTE = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)


@contextmanager
def drawing(picture: str) -> Iterator[None]:
    """Turn an error while drawing a picture into a warning that names it.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     with drawing("data/partition"):
        ...         raise ValueError("no room")
        >>> str(caught[0].message)
        'The picture data/partition could not be drawn (ValueError: no room). The run goes on without it.'
    """
    try:
        yield  # to saving, too: matplotlib finds most errors when a figure is rendered
    except Exception as error:
        why = f"{type(error).__name__}: {error}".strip().split("\n")[0]
        # The caller's caller: this function's frame, then contextlib's, then the with statement.
        warnings.warn(
            f"The picture {picture} could not be drawn ({why}). The run goes on without it.", UserWarning, stacklevel=3
        )


def shortened_name(name: object) -> str:
    """Return the name on one line, cut to at most 24 characters."""
    text = " ".join(str(name).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def label_text(name: object) -> str:
    """Return a name as text that matplotlib shows unchanged, on one line of at most 24 characters.

    Example:
        >>> print(label_text("$x^{$"), label_text("_background"))
        \\$x^{\\$  _background
    """
    # matplotlib reads text between dollar signs as a formula, and leaves labels that begin with "_" out of legends.
    text = shortened_name(name).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def client_label(client: int, names: Sequence[str] | None = None) -> str:
    """Return a client's name for readers, or "client" and its number.

    Example:
        >>> client_label(0, ["Boston", "1"]), client_label(1, ["Boston", "1"]), client_label(2)
        ('Boston', 'client 1', 'client 2')
    """
    name = str(client if names is None else names[client])
    return f"client {name}" if name.isdigit() else name


def client_labels(count: int, names: Sequence[str] | None = None) -> list[str]:
    """Return the :func:`client_label` of each of the clients 0 to ``count - 1``."""
    return [client_label(client, names) for client in range(count)]


#: Largest number of rows or bars that all get a label; of more, only those with the highest and lowest values do.
MOST_LABELS = 40
#: Largest number of clients that all get a color; of more, only those with the highest and lowest values do.
MOST_COLOURS = 20
#: Number of clients named at the top of a chart, and as many at the bottom.
ENDS = 5
TOP, BOTTOM, OTHERS = "#0b5fa5", "#c44e00", "0.72"
#: Largest number of labels on a heatmap's axis of columns, or of rows.
MOST_TICKS = 25
#: Largest number of cells in a heatmap that shows their numbers.
MOST_NUMBERS = 200
_LINES = ("-", "--", ":")

Names = Sequence[str] | None
Limits = tuple[float, float] | None


def draw_bars(
    ax: Any,
    values: np.ndarray,
    names: Names = None,
    *,
    unit: str = "",
    limits: Limits = None,
    errors: np.ndarray | None = None,
    of_seeds: bool = False,
) -> None:
    """Draw a bar per client for ``values [n]``, with whiskers from ``errors [2, n]``."""
    many = len(values) > MOST_LABELS
    labels = [label_text(i if names is None else names[i]) for i in range(len(values))]
    colors = _name_ends(ax, values, labels) if many else {}
    known = np.flatnonzero(np.isfinite(values)).tolist()
    bars: dict[str, Any] = {"color": [colors.get(i, OTHERS if many else PALETTE[0]) for i in known]}
    if errors is not None and not np.isnan(errors).all():
        bars |= {"yerr": errors[:, known], "ecolor": "0.2" if of_seeds else "0.65"}
        bars |= {"capsize": 0 if many else 3, "error_kw": {"elinewidth": 1}}
    ax.bar(known, values[known], **bars)
    ax.axhline(0, color="black", linewidth=0.8)
    if many:  # the top and bottom clients are named beside the axis
        ax.set_xticks([])
    else:
        set_xticks(ax, range(len(labels)), labels, max(map(len, labels), default=0) > 3)
        for place in {*range(len(labels))} - {*known}:
            ax.text(place, 0, " no value", rotation=90, ha="center", va="bottom", fontsize=8, color="0.5")
    ax.set_xlim(-0.7, len(values) - 0.3)
    label_axes(ax, "client", unit, limits)


def draw_lines(
    ax: Any,
    rows: np.ndarray,
    names: Names = None,
    *,
    unit: str = "",
    limits: Limits = None,
    rounds: Sequence[int] | None = None,
) -> None:
    """Draw one line per client for ``rows [r, n]``, the values in r rounds."""
    from matplotlib.ticker import MaxNLocator

    x = np.arange(1, len(rows) + 1) if rounds is None else np.asarray(rounds)
    labels = client_labels(rows.shape[1], names)
    for client, style in _styles(rows).items():
        line = rows[:, client]
        alone = _alone(line)
        if alone:  # a line through a single value would be invisible
            style = {"marker": "o", "markersize": 4, "markevery": alone} | style
        label = label_text(labels[client]) if style["zorder"] > 1 else None
        ax.plot(x, line, label=label, **style)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.margins(x=0.02)
    label_axes(ax, "round", unit, limits)


def draw_legend(ax: Any, clients: int) -> None:
    """Draw a legend with the clients' names to the right of the lines."""
    title = None if clients <= MOST_COLOURS else "top and bottom"
    ax.legend(fontsize="small", frameon=False, title=title, loc="center left", bbox_to_anchor=(1.0, 0.5))


def draw_heatmap(
    ax: Any,
    values: np.ndarray,
    titles: Sequence[str],
    names: Names = None,
    *,
    columns: str = "class",
    unit: str = "",
    limits: Limits = None,
) -> None:
    """Draw ``values [n, M]``, a row per client, with colors symmetric about 0 if some are negative."""
    import matplotlib

    known = np.isfinite(values)
    means = np.where(known, values, 0).sum(1) / np.where(known.any(1), known.sum(1), np.nan)
    low, high = limits or ((values[known].min(), values[known].max()) if known.any() else (0.0, 1.0))
    negative = low < 0
    high = max(-low, high) if negative else high or 1.0
    # Cells without a value let the hatching show through: white would mean 0.
    ax.set_facecolor("0.9")
    ax.patch.set(hatch="////", edgecolor="0.65")
    cells = np.where(known, values, np.nan)
    cmap = matplotlib.colormaps["RdBu" if negative else "Blues"]
    image = ax.imshow(
        cells, cmap=cmap, vmin=-high if negative else 0.0, vmax=high, aspect="auto", interpolation="nearest"
    )
    ax.figure.colorbar(image, ax=ax, label=unit)
    _label_rows(ax, means, names)
    every = 1 + (len(titles) - 1) // MOST_TICKS
    set_xticks(ax, range(0, len(titles), every), titles[::every], max(map(len, titles[::every])) > 3)
    ax.set_xlabel(label_text(columns))
    ax.set_ylabel("client")
    for (row, column), value in np.ndenumerate(cells) if cells.size <= MOST_NUMBERS else ():
        if value == value:
            text = f"{value:.2f}" if abs(value) < 100 else f"{value:.3g}"
            color = "white" if abs(value) > 0.6 * high else "black"
            ax.text(column, row, text, ha="center", va="center", fontsize=8, color=color)


def ends(values: Iterable[float]) -> tuple[list[int], list[int]]:
    """Return the up to five clients with the highest and with the lowest values.

    Example:
        >>> ends([0.5, float("nan"), 0.25, 0.75, 0.0])
        ([3, 0], [4, 2])
    """
    known = {i: float(value) for i, value in enumerate(values) if value == value}
    order = sorted(known, key=lambda i: -known[i])
    each = min(ENDS, len(order) // 2)
    return order[:each], order[::-1][:each]


def _styles(rows: np.ndarray) -> dict[int, dict[str, Any]]:
    """Return ``{client: style of its line}`` for ``rows [r, n]``, with colors only for the ends if n is large."""
    clients = range(rows.shape[1])
    if len(clients) <= MOST_COLOURS:
        looks = [{"color": color, "linestyle": line, "zorder": 2} for line in _LINES for color in PALETTE]
        return dict(zip(clients, looks))
    found: dict[int, dict[str, Any]] = {}
    for group, color in zip(ends(pandas.DataFrame(rows).ffill().iloc[-1]), (TOP, BOTTOM)):
        for place, client in enumerate(group):
            markers = {"marker": "os^Dv"[place], "markersize": 4, "markevery": max(1, len(rows) // 8)}
            found[client] = {"color": color, "linestyle": _LINES[place % 3], "zorder": 2, **markers}
    others = {"color": OTHERS, "linewidth": 0.7, "zorder": 1}
    return {**{i: others for i in clients if i not in found}, **found}


def _alone(line: np.ndarray) -> list[int]:
    """Return the indices of values without a neighbor, which a line would not show."""
    known = np.pad(~np.isnan(line), 1)
    return np.flatnonzero(known[1:-1] & ~known[:-2] & ~known[2:]).tolist()


def _name_ends(ax: Any, values: np.ndarray, labels: Sequence[str]) -> dict[int, str]:
    """Write the highest and lowest clients' names beside the axis, and return ``{client: color}``."""
    top, bottom = ends(values)
    for where, y, group, color in (("top", 1.0, top, TOP), ("bottom", 0.0, bottom, BOTTOM)):
        if group:
            said = "\n".join([f"{where} {len(group)}", *(labels[i] for i in group)])
            ax.text(1.01, y, said, color=color, fontsize=8, va=where, transform=ax.transAxes)
    return dict.fromkeys(top, TOP) | dict.fromkeys(bottom, BOTTOM)


def set_xticks(ax: Any, places: Sequence[int], texts: Sequence[str], turned: bool) -> None:
    """Put texts as tick labels on the x-axis, by 45 degrees if ``turned``."""
    ax.set_xticks(places, texts)
    for text in ax.get_xticklabels() if turned else ():
        text.set(rotation=45, horizontalalignment="right", rotation_mode="anchor")


def _label_rows(ax: Any, means: np.ndarray, names: Names) -> None:
    clients = len(means)
    labels = [label_text(i if names is None else names[i]) for i in range(clients)]
    if clients <= MOST_LABELS:
        ax.set_yticks(range(clients), labels, fontsize=8 if clients > 20 else None)
        return
    top, bottom = ends(means)
    every = 1 + (clients - 1) // MOST_TICKS
    marked = [*top, *bottom]
    near = {place + step for place in marked for step in range(-every + 1, every)}
    shown = sorted({*marked, *(place for place in range(0, clients, every) if place not in near)})
    ax.set_yticks(shown, [labels[place] for place in shown], fontsize=7)
    for place, text in zip(shown, ax.get_yticklabels()):
        if place in marked:
            text.set(color=TOP if place in top else BOTTOM, fontweight="bold")


def label_axes(ax: Any, xlabel: str, ylabel: str, limits: Limits = None) -> None:
    """Set the axes' titles and the y-limits, and remove the upper and right frame."""
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.spines[["top", "right"]].set_visible(False)
    if limits is not None:
        ax.set_ylim(*limits)
