"""Pictures of contributions: heatmaps of per-class values, bars of one vector, lines over rounds of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from flsv.drawing import label_text


def plot_contributions(
    val: Tensor | Sequence[Tensor],
    ax: Any = None,
    name: str = "contribution",
    class_names: Sequence[str] | None = None,
    columns: str = "class",
) -> tuple[Any, Any]:
    """Draw contributions.

    Args:
        val: ``[n, M]``: a heatmap, clients down and classes across. ``[n]``: bars. A sequence of ``[n]``: a line per
            client over rounds. NaN is left blank.
        ax: a matplotlib axis; by default a new figure that belongs to nobody (no pyplot state, nothing to close).
        name: the title.
        class_names: labels of the columns, M of them.
        columns: what the columns of ``[n, M]`` are.

    Returns:
        ``(figure, axis)``.
    """
    if not isinstance(val, Tensor):
        val = list(val)
    if ax is None:
        ax = new_figure(val).subplots()
    if isinstance(val, Tensor) and val.ndim == 2:
        _heatmap(ax, val.detach().float().cpu(), class_names, columns)
    elif isinstance(val, Tensor) and val.ndim == 1:
        ax.bar(range(len(val)), val.detach().float().cpu().nan_to_num().numpy(), color="#4878a8")
        ax.set_xlabel("client")
    elif isinstance(val, list) and val and all(row.ndim == 1 for row in val):
        rows = torch.stack([row.detach().float().cpu() for row in val])
        for client, line in enumerate(rows.T):
            ax.plot(range(len(rows)), line.numpy(), label=f"client {client}" if rows.shape[1] <= 20 else None)
        ax.set_xlabel("round")
        if rows.shape[1] <= 20:
            ax.legend(fontsize="small", ncols=1 + rows.shape[1] // 8)
    else:
        raise ValueError("expected [n, M], [n] or a sequence of [n].")
    ax.set_title(label_text(name))
    return ax.figure, ax


def new_figure(val: Tensor | list[Tensor], panels: int = 1) -> Figure:
    """A figure, empty, for so many pictures like that of ``val`` side by side."""
    if isinstance(val, Tensor) and val.ndim == 2:
        clients, classes = val.shape
        size = (min(2.2 + 0.55 * classes, 16), min(1.4 + 0.36 * clients, 16))
    else:
        size = (6.4, 3.6)
    size = (panels * size[0], size[1])
    return Figure(figsize=size, dpi=100, layout="constrained")


def _heatmap(ax: Any, values: Tensor, class_names: Sequence[str] | None, columns: str) -> None:
    clients, classes = values.shape
    bound = values[values.isfinite()].abs().max().item() if values.isfinite().any() else 1.0
    # Symmetric about 0, so that colour says the sign.
    limits = {"vmin": -(bound or 1.0), "vmax": bound or 1.0}
    image = ax.imshow(values.numpy(), cmap="RdBu", **limits, aspect="auto", interpolation="nearest")
    ax.figure.colorbar(image, ax=ax)
    every = 1 + (clients - 1) // 25
    ax.set_yticks(range(0, clients, every), [str(i) for i in range(0, clients, every)])
    every = 1 + (classes - 1) // 25
    labels = [label_text(class_names[j] if class_names else j) for j in range(0, classes, every)]
    long = max(map(len, labels)) > 3
    ax.set_xticks(range(0, classes, every), labels, rotation=45 if long else 0, ha="right" if long else "center")
    ax.set_xlabel(label_text(columns))
    ax.set_ylabel("client")
    if clients * classes <= 200:
        for i in range(clients):
            for j in range(classes):
                value = values[i, j].item()
                if value == value:
                    ink = "white" if abs(value) > 0.6 * bound else "black"
                    ax.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=8, color=ink)
