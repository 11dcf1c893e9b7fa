"""A partition as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from flsv.drawing import label_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_LEGEND_ENTRIES = 20


def plot_partition(counts: Tensor, class_names: Sequence[str] | None = None) -> tuple[Figure, Axes]:
    """Draw who has how many samples of which class: one bar per client, stacked by class.

    Up to 20 classes have a legend; more are coloured along a scale; a single one, as of data without classes, needs
    neither. The figure does not touch pyplot's global state.

    Args:
        counts: samples ``[num_clients, num_classes]``, as of :func:`~flsv.data.partition_counts`.
        class_names: ``num_classes`` names for the legend; the class numbers by default.

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
    colormap = matplotlib.colormaps["tab10" if classes <= 10 else "tab20" if few else "viridis"]
    colors = [colormap(c if few else c / (classes - 1)) for c in range(classes)]

    height = max(2.5, 1.2 + 0.26 * clients, 0.6 + 0.24 * classes if few else 0)
    figure = Figure(figsize=(8, min(height, 16)), layout="constrained")
    axes = figure.add_subplot()
    # One collection of rectangles [client, class, corner, xy]: a thousand clients draw as fast as ten.
    right = samples.cumsum(axis=1)
    left = right - samples
    bottom, top = (np.arange(clients)[:, None] + side * np.ones_like(right) for side in (-0.42, 0.42))
    corners = np.stack([left, bottom, left, top, right, top, right, bottom], axis=-1).reshape(clients, classes, 4, 2)
    drawn = samples > 0
    axes.add_collection(PolyCollection(list(corners[drawn]), facecolors=np.array(colors)[np.nonzero(drawn)[1]]))
    axes.set(xlabel="samples", ylabel="client", ylim=(clients - 0.5, -0.5), xlim=(0, right.max() * 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    # At most about 50 client numbers, or they run into each other.
    axes.set_yticks(range(0, clients, -(-clients // 50)))
    if classes > 1 and few:
        handles = [Patch(color=color, label=name) for color, name in zip(colors, names, strict=True)]
        figure.legend(handles=handles, loc="outside right upper", title="class", frameon=False)
    elif classes > 1:
        # A scale, not a box per class: colour maps have 256 colours, and there may be more classes.
        scale = ScalarMappable(Normalize(0, classes - 1), colormap)
        figure.colorbar(scale, ax=axes, label="class", ticks=MaxNLocator(8, integer=True))
    return figure, axes
