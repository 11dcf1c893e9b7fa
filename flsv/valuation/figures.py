"""Figures of a valuation for the server, and pictures and tables for each client only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flsv.core import LocalData
from flsv.core.artifacts import keep_artifact
from flsv.utilities.charts import PALETTE, client_label, label_text
from flsv.utilities.csv_files import save_csv
from flsv.valuation.fedbary import Valuation
from flsv.valuation.questions import SampleValues

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_PANELS = 24


def histograms_of(found: Valuation, names: Sequence[str] | None = None) -> Figure:
    """Draw each client's histogram of its samples' calibrated gradients."""
    from matplotlib.figure import Figure

    shown = min(len(found.clients), MOST_PANELS)
    columns = min(5, shown)
    rows = math.ceil(shown / columns)
    figure = Figure(figsize=(max(4.0, 2.3 * columns), 0.5 + 1.7 * rows), dpi=100, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis in axes[shown:]:
        axis.axis("off")
    for client, (axis, verdict, flagged) in enumerate(zip(axes[:shown], found.verdicts, found.flagged_shares)):
        share = f", {flagged:.1%} flagged" if flagged >= 0 else ""
        axis.set_title(label_text(client_label(client, names)) + share, size=8)
        axis.tick_params(labelsize=7)
        if verdict is not None:
            axis.stairs(verdict.counts.numpy(), verdict.edges.numpy(), fill=True, color=PALETTE[0])
            axis.axvline(0, color="black", linewidth=0.6)
    figure.supxlabel("calibrated gradient (positive: harmful)", size=8)
    return figure


def draw_contributions(found: Valuation, names: Sequence[str] | None = None) -> Figure:
    """Draw bar charts of the clients' distances and contribution shares."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.4), dpi=100, layout="constrained")
    panels = (("Wasserstein distance", found.distances), ("contribution share", found.shares))
    labels = [label_text(client if names is None else names[client]) for client in found.clients]
    for axis, (title, values) in zip(figure.subplots(1, 2), panels):
        axis.bar(range(len(labels)), values.double().numpy(), tick_label=labels, color=PALETTE[0])
        axis.tick_params(axis="x", rotation=45)
        axis.set_title(title)
    return figure


MOST_HARMFUL = "most_harmful"


def keep_pictures(local: LocalData, count: int) -> None:
    """Store a picture of the most harmful samples, valued images, at the client.

    This function runs at the client (``client.ask(keep_pictures, count)``). Nothing is sent to the server.

    Args:
        local: the client's own data.
        count: largest number of samples in the picture. 0: no picture.
    """
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
    """Draw images in a grid, titled with label and gradient, in red where flagged."""
    from matplotlib.figure import Figure
    from torchvision.utils import make_grid

    columns = min(8, math.ceil(math.sqrt(len(images))))
    finite = images[images.isfinite()]
    low, high = (finite.min(), finite.max()) if finite.numel() else (torch.tensor(0.0), torch.tensor(1.0))
    shown = ((images - low) / (high - low).clamp(min=1e-12)).nan_to_num(0.0, 1.0, 0.0).clamp(0, 1)
    # One picture of all images: an axis for each takes much longer.
    gap, side = max(2, shown.shape[2] // 4), shown.shape[3]
    canvas = make_grid(shown, columns, padding=gap, pad_value=1.0)
    figure = Figure(figsize=(1.3 * columns, 1.3 * columns * canvas.shape[1] / canvas.shape[2]), dpi=100)
    axis = figure.add_axes((0, 0, 1, 1))
    axis.axis("off")
    axis.imshow(canvas.permute(1, 2, 0).numpy())
    for place, (label, value, bad) in enumerate(zip(labels, gradients, flagged)):
        x = gap + (place % columns) * (side + gap) + side / 2
        y = (place // columns) * (shown.shape[2] + gap) + gap / 2
        axis.text(x, y, f"{label}: {value:.3g}", size=7, ha="center", va="center", color="#b03030" if bad else "black")
    return figure


FLAGGED = "flagged.csv"


def write_flagged(local: LocalData, folder: Path, indices: Tensor, class_names: Sequence[str] | None = None) -> None:
    """Write ``flagged.csv``, the client's flagged samples, into its folder.

    This function runs at the client (``client.ask(write_flagged, ...)``). Nothing is sent to the server. The columns
    are the sample's ``index`` in the data set, its ``label`` (the class's name, if there are names), its ``score``,
    the calibrated gradient in squared feature units or empty if it is not finite, and ``why``. The most harmful samples
    come first. If no sample is flagged, the file has only the header. If the client has not valued its samples, no file
    is written.

    Args:
        local: the client's own data.
        folder: the client's own folder, which is created if it does not exist.
        indices: int64 ``[m]``, indices of the client's training samples in the data set, in the order in which the
            client reads them.
        class_names: names of the M classes. None: the file has the classes' numbers.
    """
    found: SampleValues | None = local.memory.get(SampleValues)
    if found is None or len(found.why) != len(found.gradients):
        return
    y = local.samples()[1].tolist()
    rows: list[tuple[object, ...]] = [("index", "label", "score", "why")]
    for place in found.gradients.argsort(descending=True, stable=True).tolist():
        if found.flagged[place]:
            score = found.gradients[place].item()
            label = y[place] if class_names is None else class_names[y[place]]
            known = f"{score:.6g}" if score < float("inf") else ""
            rows.append((int(indices[place]), label, known, found.why[place]))
    folder.mkdir(parents=True, exist_ok=True)
    save_csv(folder / FLAGGED, rows)
