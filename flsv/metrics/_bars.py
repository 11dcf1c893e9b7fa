"""Contributions as bars, one a client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flsv.drawing import PALETTE
from flsv.metrics._marks import BOTTOM, MOST_LABELS, OTHERS, TOP, ends, order_of, short_labels


def draw_bars(
    ax: Any,
    values: Tensor,
    names: Sequence[str] | None,
    unit: str,
    limits: tuple[float, float] | None,
    stderr: Tensor | None,
    sort: bool,
) -> None:
    order = order_of(values, sort)
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
    labels = short_labels(names, len(values))
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
