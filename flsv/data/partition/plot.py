"""A partition as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import Normalize, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from flsv.drawing import PALETTE, label_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_LEGEND_ENTRIES = 20
_HATCH = "////"


def plot_partition(
    counts: Tensor, class_names: Sequence[str] | None = None, client_names: Sequence[str] | None = None
) -> tuple[Figure, Axes]:
    """Draw who has how many samples of which class: one bar per client, stacked by class.

    Up to 20 classes have a legend, in ten colours that colour-blind people can tell apart, hatched from the eleventh
    class on; more are coloured along a scale; a single one, as of data without classes, needs neither. The figure does
    not touch pyplot's global state.

    Args:
        counts: samples ``[num_clients, num_classes]``, as of :func:`~flsv.data.partition_counts`.
        class_names: ``num_classes`` names for the legend; the class numbers by default.
        client_names: ``num_clients`` names; the client numbers by default.

    Returns:
        ``(figure, axes)``.

    Example:
        >>> import torch
        >>> figure, axes = plot_partition(torch.tensor([[10, 0], [5, 5]]), class_names=["normal", "pneumonia"])
        >>> axes.get_xlabel()
        'samples'
    """
    samples = np.asarray(counts)
    clients, classes = samples.shape
    names = [label_text(name) for name in (range(classes) if class_names is None else class_names)]
    few = classes <= _MOST_LEGEND_ENTRIES
    colormap = matplotlib.colormaps["viridis"]
    colors = [to_rgba(PALETTE[c % len(PALETTE)]) if few else colormap(c / (classes - 1)) for c in range(classes)]
    hatches = [_HATCH if few and c >= len(PALETTE) else None for c in range(classes)]

    height = max(2.5, 1.2 + 0.26 * clients, 0.6 + 0.24 * classes if few else 0)
    figure = Figure(figsize=(8, min(height, 16)), layout="constrained")
    axes = figure.add_subplot()
    # One collection of rectangles [client, class, corner, xy]: a thousand clients draw as fast as ten.
    right = samples.cumsum(axis=1)
    left = right - samples
    bottom, top = (np.arange(clients)[:, None] + side * np.ones_like(right) for side in (-0.42, 0.42))
    corners = np.stack([left, bottom, left, top, right, top, right, bottom], axis=-1).reshape(clients, classes, 4, 2)
    for hatch in dict.fromkeys(hatches):
        drawn = (samples > 0) & np.array([other == hatch for other in hatches])
        style: dict[str, Any] = {} if hatch is None else {"hatch": hatch, "edgecolors": "white", "linewidths": 0.0}
        bars = PolyCollection(list(corners[drawn]), facecolors=np.array(colors)[np.nonzero(drawn)[1]], **style)
        axes.add_collection(bars)
    axes.set(xlabel="samples", ylabel="client", ylim=(clients - 0.5, -0.5), xlim=(0, right.max() * 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    # At most about 50 client numbers, or they run into each other.
    shown = range(0, clients, -(-clients // 50))
    axes.set_yticks(shown, [label_text(i if client_names is None else client_names[i]) for i in shown])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if classes > 1 and few:
        handles = [
            Patch(facecolor=color, label=name, hatch=hatch, edgecolor="white", linewidth=0)
            for color, name, hatch in zip(colors, names, hatches, strict=True)
        ]
        figure.legend(handles=handles, loc="outside right upper", title="class", frameon=False)
    elif classes > 1:
        # A scale, not a box per class: colour maps have 256 colours, and there may be more classes.
        scale = ScalarMappable(Normalize(0, classes - 1), colormap)
        figure.colorbar(scale, ax=axes, label="class", ticks=MaxNLocator(8, integer=True))
    return figure, axes
