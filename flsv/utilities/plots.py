"""A waterfall of clients' contributions in the style of shap."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from flsv.utilities.charts import BOTTOM, TOP, client_labels, label_axes, label_text, set_xticks

__all__ = ["waterfall"]

#: Color of the first and the last bar of a waterfall.
_WHOLE = "#94a4a2"
_SIZE = (7.0, 3.8)
#: Position of the number above a bar.
_ABOVE: dict[str, Any] = {
    "xytext": (0, 2),
    "textcoords": "offset points",
    "ha": "center",
    "va": "bottom",
    "fontsize": 8,
}


_Plot = TypeVar("_Plot", bound=Callable[..., Any])


class Shown(tuple[Any, ...]):
    r"""A pair ``(figure, axis)`` that a notebook shows once as a picture.

    Example:
        >>> Shown(waterfall([0.5]))._repr_png_()[:4]
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


@shows
def waterfall(
    values: Any,
    names: Sequence[str] | None = None,
    *,
    start: float = 0.0,
    end: float | None = None,
    unit: str = "",
    title: str = "",
    ax: Any = None,
) -> tuple[Any, Any]:
    """Draw a model's performance from start to end, one step per client.

    Args:
        values: ``[n]``, the clients' values. A client with NaN has no step.
        names: the clients' names.
        start: the height at which the first step begins, such as the model's performance before training.
        end: the height at which the last step must end, by default ``start`` plus the sum of the values.
        unit: unit of the values.
        title: the picture's title.
        ax: a matplotlib axis, by default of a new figure outside of pyplot.

    Returns:
        ``(figure, axis)``.

    Raises:
        ValueError: the sum of the values differs from ``end - start`` by more than 1 %.

    Example:
        >>> figure, axis = waterfall([0.5, -0.1], ["Boston", "Quito"], start=0.3, end=0.7)
        >>> [label.get_text() for label in axis.get_xticklabels()]
        ['start', 'Boston', 'Quito', 'end']
    """
    heights, labels = _known(values, names)
    total = start + math.fsum(heights)
    if end is not None and abs(total - end) > 0.01 * abs(end - start) + 1e-12:
        raise ValueError(f"the values lead from {start:.6g} to {total:.6g}, not to {end:.6g}: they do not add up.")
    ax = ax or _axis()
    draw_steps(ax, heights, labels, start, total if end is None else end, unit=unit)
    ax.set_title(label_text(title) if title else "")
    return ax.figure, ax


def draw_steps(
    ax: Any,
    values: Sequence[float],
    names: Sequence[str],
    start: float,
    end: float,
    *,
    unit: str = "",
    less_is_better: bool = False,
) -> None:
    """Draw a bar for the start, a floating bar for each value, and a bar for the end."""
    levels = [start, *(start + math.fsum(values[: place + 1]) for place in range(len(values)))]
    low, high = min(*levels, end), max(*levels, end)
    # If all heights are far from 0, an axis from 0 would make the steps too thin to see.
    low = low - 0.25 * (high - low) if low > 0.5 * high > 0 else min(low, 0.0)
    high = max(high, 0.0)
    floor = max(low, 0.0)  # bars from 0 would cover the names below the axis
    ax.bar([0, len(values) + 1], [start - floor, end - floor], bottom=floor, color=_WHOLE, width=0.62)
    for place, (before, value) in enumerate(zip(levels, values), 1):
        gain = value <= 0 if less_is_better else value >= 0
        ax.bar(place, value, bottom=before, color=TOP if gain else BOTTOM, width=0.62)
        ax.annotate(f"{value:+.3g}", (place, max(before, before + value)), **_ABOVE)
    for place, level in enumerate(levels):
        ax.plot([place - 0.31, place + 1.31], [level, level], color="0.5", linewidth=0.7)
    for place, level in ((0, start), (len(values) + 1, end)):
        ax.annotate(f"{level:.3g}", (place, max(level, 0.0)), **_ABOVE)
    spread = high - low or 1.0
    ax.set_ylim(low - (0.02 * spread if low < 0 else 0), high + 0.12 * spread)
    ax.set_xlim(-0.6, len(values) + 1.6)
    labels = ["start", *names, "end"]
    set_xticks(ax, range(len(labels)), [*map(label_text, labels)], max(map(len, labels)) > 8 or len(labels) > 8)
    label_axes(ax, "", unit)


def _axis() -> Any:
    from matplotlib.figure import Figure  # imported here because it is slow, and most runs draw nothing

    return Figure(figsize=_SIZE, dpi=100, layout="constrained").subplots()


def _known(values: Any, names: Sequence[str] | None) -> tuple[list[float], list[str]]:
    """Return the finite numbers among ``values``, and the names of their clients."""
    row = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values, dtype=float)
    if row.ndim != 1:
        raise ValueError(f"expected [n], got {list(row.shape)}.")
    labels = client_labels(len(row), names)
    there = [place for place, value in enumerate(row.tolist()) if math.isfinite(value)]
    return [float(row[place]) for place in there], [labels[place] for place in there]
