"""Draws a grid of a client's most harmful samples, for that client only."""

from __future__ import annotations

import math
from functools import partial

import torch
from matplotlib.figure import Figure
from torch import Tensor

from flsv.participants import LocalData
from flsv.participants.artifacts import keep_artifact
from flsv.valuation.questions import SampleValues

MOST_HARMFUL = "most_harmful"


def keep_pictures(local: LocalData, count: int) -> None:
    """Asked of a client that has judged its samples: keep a picture of the most harmful ones, if they are images."""
    found: SampleValues | None = local.memory.get(SampleValues)
    if found is None or count < 1:
        return
    x, y = local.samples()
    if x.ndim != 4 or x.shape[1] not in (1, 3):
        return
    worst = found.gradients.argsort(descending=True, stable=True)[:count]
    images, labels = x[worst.to(x.device)].float().cpu(), y[worst.to(y.device)].tolist()
    draw = partial(draw_grid, images, labels, found.gradients[worst].tolist(), found.flagged[worst].tolist())
    keep_artifact(local, MOST_HARMFUL, draw)


def draw_grid(images: Tensor, labels: list[int], gradients: list[float], flagged: list[bool]) -> Figure:
    """Images ``[k, C, H, W]``, with their labels and values above; those flagged in red."""
    columns = min(8, math.ceil(math.sqrt(len(images))))
    rows = math.ceil(len(images) / columns)
    finite = images[images.isfinite()]
    low, high = (finite.min(), finite.max()) if finite.numel() else (torch.tensor(0.0), torch.tensor(1.0))
    shown = ((images - low) / (high - low).clamp(min=1e-12)).nan_to_num(0.0, 1.0, 0.0).clamp(0, 1)
    _, channels, height, width = shown.shape
    # One picture of all of them: an axis for each takes much longer.
    gap_y, gap_x = max(2, height // 4), max(1, width // 16)
    canvas = torch.ones(channels, rows * (height + gap_y), columns * (width + gap_x))
    figure = Figure(figsize=(1.1 * columns, 1.1 * rows * (height + gap_y) / (width + gap_x)), dpi=100)
    axis = figure.add_axes((0, 0, 1, 1))
    axis.axis("off")
    for i, (image, label, value, bad) in enumerate(zip(shown, labels, gradients, flagged)):
        top, left = (i // columns) * (height + gap_y) + gap_y, (i % columns) * (width + gap_x)
        canvas[:, top : top + height, left : left + width] = image
        place, colour = (left + width / 2, top - gap_y / 2), "#b03030" if bad else "black"
        axis.text(*place, f"{label}: {value:.3g}", size=7, ha="center", va="center", color=colour)
    axis.imshow(canvas.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1, aspect="auto")
    return figure
