"""Pictures of contributions: heatmaps of per-class values, bars of one vector, lines over rounds of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from flsv.drawing import PALETTE, client_labels, label_text

#: Rows or bars up to which every client has a label; of more, the top and the bottom ones have.
MOST_LABELS = 40
#: Clients with a colour each; of more, the top and the bottom ones have one.
MOST_COLOURS = 20
#: So many clients are at the top, and at the bottom.
ENDS = 5
TOP, BOTTOM, OTHERS = "#0b5fa5", "#c44e00", "0.72"
_LINES = ("-", "--", ":")


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
            return _small_multiples(torch.stack(val), ax, name, class_names, columns, client_names, unit, limits)
    if ax is None:
        matrix = isinstance(val, Tensor) and val.ndim == 2
        below = class_names if matrix else client_names if isinstance(val, Tensor) else None
        ax = new_figure(val, 1, _longest(below), _longest(client_names) if matrix else 0).subplots()
    if not isinstance(val, Tensor):
        _lines(ax, torch.stack(val), client_names, limits)
        ax.set_ylabel(unit)
        _legend(ax, len(val[0]))
    elif val.ndim == 2:
        _heatmap(ax, val.detach().float().cpu(), class_names, columns, client_names, unit, limits, sort)
    elif val.ndim == 1:
        _bars(ax, val.detach().float().cpu(), client_names, unit, limits, stderr, sort)
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


def ends(values: Tensor) -> tuple[list[int], list[int]]:
    """The clients at the top and at the bottom, best first, worst first; those without a value are neither."""
    order = [int(i) for i in values.argsort(descending=True) if values[i] == values[i]]
    each = min(ENDS, len(order) // 2)
    return order[:each], order[::-1][:each]


def _bars(
    ax: Any,
    values: Tensor,
    names: Sequence[str] | None,
    unit: str,
    limits: tuple[float, float] | None,
    stderr: Tensor | None,
    sort: bool,
) -> None:
    order = _order(values, sort)
    many = len(values) > MOST_LABELS
    top, bottom = ends(values) if many else ([], [])
    colors = [TOP if i in top else BOTTOM if i in bottom else OTHERS if many else PALETTE[0] for i in order]
    heights = values[order].numpy()
    errors = None if stderr is None else stderr.detach().float().cpu()[order].numpy()
    if errors is not None and math.isnan(errors.max()) and not (errors == errors).any():
        errors = None
    known = [place for place, height in enumerate(heights) if math.isfinite(height)]
    style = {"ecolor": "0.2", "capsize": 0 if many else 3, "error_kw": {"elinewidth": 1}}
    ax.bar(
        known,
        heights[known],
        color=[colors[place] for place in known],
        yerr=None if errors is None else errors[known],
        **style,
    )
    ax.axhline(0, color="black", linewidth=0.8)
    labels = _short(names, len(values))
    shown = [place for place, i in enumerate(order) if not many or i in top or i in bottom]
    long = max((len(labels[i]) for i in order), default=0) > 3
    ax.set_xticks(shown, [labels[order[place]] for place in shown], rotation=45 if long or many else 0, ha="center")
    if long or many:
        for text in ax.get_xticklabels():
            text.set_horizontalalignment("right")
            text.set_rotation_mode("anchor")
    if many:
        for place, text in zip(shown, ax.get_xticklabels()):
            text.set_color(colors[place])
        _spread_labels(ax, shown)
    ax.set_xlim(-0.7, len(values) - 0.3)
    for where, y, group, colour in (("top", 1.0, top, TOP), ("bottom", 0.0, bottom, BOTTOM)):
        said = "\n".join([f"{where} {len(group)}", *(labels[i] for i in group)])
        ax.text(1.01, y, said if group else "", color=colour, fontsize=8, va=where, transform=ax.transAxes)
    ax.set_xlabel("client")
    ax.set_ylabel(unit)
    if limits is not None:
        ax.set_ylim(*limits)
    ax.spines[["top", "right"]].set_visible(False)


def _spread_labels(ax: Any, places: list[int]) -> None:
    """Labels of neighbours, where there is one bar beside the other, would lie on each other: every other one goes."""
    room = max(1.0, (ax.get_xlim()[1] - ax.get_xlim()[0]) / 45)
    last = -math.inf
    for place, text in sorted(zip(places, ax.get_xticklabels()), key=lambda pair: pair[0]):
        if place - last < room:
            text.set_visible(False)
        else:
            last = place


def _lines(
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


def _legend(ax: Any, clients: int) -> None:
    handles, labels = ax.get_legend_handles_labels()
    title = None if clients <= MOST_COLOURS else "top and bottom"
    ax.legend(
        handles, labels, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, title=title
    )


def _small_multiples(
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
        _lines(axis, rows[:, :, column], client_names, limits, ranking)
        axis.set_title(label_text(_column(column, class_names, columns)), fontsize="small")
        if column + across < classes:
            axis.set_xlabel("")
        axis.tick_params(labelsize="small", labelbottom=column + across >= classes)
    handles, labels = axes[0].get_legend_handles_labels()
    title = None if rows.shape[1] <= MOST_COLOURS else "top and bottom"
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize="small", title=title)
    figure.supylabel(unit, fontsize="medium")
    figure.suptitle(label_text(name))
    return figure, axes[0]


def _heatmap(
    ax: Any,
    values: Tensor,
    class_names: Sequence[str] | None,
    columns: str,
    client_names: Sequence[str] | None,
    unit: str,
    limits: tuple[float, float] | None,
    sort: bool,
) -> None:
    clients, classes = values.shape
    means = values.nanmean(1)
    order = _order(means, sort)
    finite = values[values.isfinite()]
    low, high = limits or ((finite.min().item(), finite.max().item()) if len(finite) else (0.0, 1.0))
    if low < 0:
        # Symmetric about 0, so that colour says the sign.
        high = max(-low, high)
        low, cmap = -high, matplotlib.colormaps["RdBu"]
    else:
        low, high, cmap = 0.0, high or 1.0, matplotlib.colormaps["Blues"]
    # What is not known lets the hatching through: white would be 0.
    ax.set_facecolor("0.9")
    ax.patch.set(hatch="////", edgecolor="0.65")
    shown = values[order].masked_fill(~values[order].isfinite(), float("nan")).numpy()
    image = ax.imshow(shown, cmap=cmap, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    ax.figure.colorbar(image, ax=ax, label=unit)
    _client_rows(ax, order, means, client_names)
    every = 1 + (classes - 1) // 25
    labels = [label_text(_column(j, class_names, "")) for j in range(0, classes, every)]
    long = max(map(len, labels)) > 3
    ax.set_xticks(range(0, classes, every), labels)
    if long:
        for text in ax.get_xticklabels():
            text.set(rotation=45, horizontalalignment="right", rotation_mode="anchor")
    ax.set_xlabel(label_text(columns))
    ax.set_ylabel("client")
    if clients * classes <= 200:
        for place, i in enumerate(order):
            for j in range(classes):
                value = values[i, j].item()
                if value == value:
                    strong = abs(value) > 0.6 * high
                    text = f"{value:.2f}" if abs(value) < 100 else f"{value:.3g}"
                    ax.text(j, place, text, ha="center", va="center", fontsize=8, color="white" if strong else "black")


def _client_rows(ax: Any, order: list[int], means: Tensor, names: Sequence[str] | None) -> None:
    clients, labels = len(order), _short(names, len(order))
    if clients <= MOST_LABELS:
        ax.set_yticks(range(clients), [labels[i] for i in order], fontsize=8 if clients > 20 else None)
        return
    top, bottom = ends(means)
    every = 1 + (clients - 1) // 25
    marked = [place for place, i in enumerate(order) if i in top or i in bottom]
    near = {place + step for place in marked for step in range(-every + 1, every)}
    shown = sorted({*marked, *(place for place in range(0, clients, every) if place not in near)})
    ax.set_yticks(shown, [labels[order[place]] for place in shown], fontsize=7)
    for place, text in zip(shown, ax.get_yticklabels()):
        if order[place] in top:
            text.set(color=TOP, fontweight="bold")
        elif order[place] in bottom:
            text.set(color=BOTTOM, fontweight="bold")


def _order(values: Tensor, sort: bool) -> list[int]:
    """Clients in the order of their rows; those without a value come last."""
    if not sort:
        return list(range(len(values)))
    return values.nan_to_num(-math.inf, math.inf, -math.inf).argsort(descending=True, stable=True).tolist()


def _last(rows: Tensor) -> Tensor:
    """Of ``[rounds, n]``, every client's last number."""
    last = rows[0]
    for row in rows[1:]:
        last = torch.where(row.isnan(), last, row)
    return last


def _longest(names: Sequence[str] | None) -> int:
    return max((len(label_text(name)) for name in names or ()), default=0)


def _short(names: Sequence[str] | None, clients: int) -> list[str]:
    """Beside an axis that is called "client", a number is enough."""
    return [label_text(client if names is None else names[client]) for client in range(clients)]


def _column(column: int, names: Sequence[str] | None, kind: str) -> str:
    name = str(names[column]) if names else str(column)
    return f"{kind} {name}".strip() if name.isdigit() else name
