"""Contributions per class as a heatmap, clients down and columns across."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from torch import Tensor

from flsv.drawing import label_text
from flsv.metrics._marks import BOTTOM, MOST_LABELS, TOP, column_title, ends, order_of, short_labels


def draw_heatmap(
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
    order = order_of(means, sort)
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
    labels = [label_text(column_title(j, class_names, "")) for j in range(0, classes, every)]
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
    clients, labels = len(order), short_labels(names, len(order))
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
