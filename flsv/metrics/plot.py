"""Pictures of contributions: heatmaps for per-class values, bars for one value per client, lines for values over
rounds. Where a value is NaN, there is no bar, a gap in the line, or hatching in the heatmap.

The figures are not registered with pyplot, so they need not be closed. A notebook shows them as
:class:`flsv.utilities.display.Shown`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from flsv.utilities.display import PALETTE, Shown, client_labels, label_text

#: Largest number of clients in a picture. If there are more, those with the highest and the lowest values are drawn.
MAX_CLIENTS = 50
#: Largest number of labels on an axis. If there are more, evenly spaced ones are shown.
MAX_LABELS = 50
#: Largest number of clients whose lines all have a color and a name. If there are more, only the lines with the highest
#: and the lowest values have them.
MAX_NAMED_LINES = 20
NUM_NAMED_PER_END = 5
#: A heatmap shows its values as numbers if there are at most this many.
MAX_NUMBERS_IN_HEATMAP = 200
#: Style of the text in the place of a bar.
STYLE_OF_NO_VALUE = {
    "rotation": 90,
    "ha": "center",
    "va": "bottom",
    "fontsize": 8,
    "color": "0.5",
}
#: Limits of a figure's size, in inches, without its labels.
MIN_WIDTH, MAX_WIDTH = 4.2, 16
MIN_HEIGHT, MAX_HEIGHT = 2.4, 14
#: Space for a character of a label, in inches. Labels below the axis are rotated.
INCHES_PER_CHARACTER_BESIDE = 0.07
INCHES_PER_CHARACTER_BELOW = 0.06


def plot_contributions(
    val: Tensor | Sequence[Tensor],
    ax: Any = None,
    name: str = "contribution",
    column_names: Sequence[str] | None = None,
    kind_of_columns: str = "class",
    client_names: Sequence[str] | None = None,
    unit: str = "",
    limits: tuple[float, float] | None = None,
    intervals: tuple[Tensor, Tensor] | None = None,
    waterfall_from: float | None = None,
) -> Shown:
    """Draw values ``[n, M]`` as a heatmap, ``[n]`` as bars, a sequence of ``[n]`` as lines. Return (figure, axis).

    With ``waterfall_from``, the score of the untrained model, the bars of ``[n]`` are steps from it to the score of the
    model of all clients. Of more than 50 clients, the 25 with the highest and the 25 with the lowest values are drawn.
    """
    is_over_rounds = not isinstance(val, Tensor)
    is_heatmap = isinstance(val, Tensor) and val.ndim == 2
    rows = [val] if isinstance(val, Tensor) else list(val)
    _check_dimensions(rows, num_dimensions=2 if is_heatmap else 1)
    arrays = [_as_array(row) for row in rows]
    all_values = np.stack(arrays)  # [1, n, M], [1, n], or [R, n] of R rounds
    num_clients = all_values.shape[1]
    clients = _clients_to_draw(all_values)
    values = all_values[:, clients]
    names = _names_to_draw(clients, num_clients, client_names, is_over_rounds)
    note = _note_on_clients(len(clients), num_clients)

    if is_heatmap:
        ax = _heatmap(ax, values[0], column_names, names, unit, limits)
        ax.set_xlabel(label_text(kind_of_columns))
        ax.set_ylabel(f"client{note}")
    elif is_over_rounds:
        ax = ax or _new_axis(7.6, 3.8)
        _draw_lines(ax, values, names)
        ax.set_xlabel(f"round{note}")
        _finish_axis(ax, unit, limits)
    else:
        if intervals is not None:
            low, high = intervals
            intervals = low[clients], high[clients]
        sum_of_values = float(np.nansum(arrays[0]))
        ax = _bars(ax, values[0], names, intervals, waterfall_from, sum_of_values)
        ax.set_xlabel(f"client{note}")
        _finish_axis(ax, unit, limits)
    ax.set_title(label_text(name))
    return Shown((ax.figure, ax))


def _as_array(values: Tensor) -> np.ndarray:
    return values.detach().double().cpu().numpy()


def _names_to_draw(
    clients: Sequence[int],
    num_clients: int,
    client_names: Sequence[str] | None,
    is_over_rounds: bool,
) -> list[str]:
    labels: Sequence[Any] = client_names or range(num_clients)
    if is_over_rounds:  # in a legend a number alone would say too little
        labels = client_labels(num_clients, client_names)
    return [label_text(labels[client]) for client in clients]


def _heatmap(
    ax: Any,
    values: np.ndarray,
    column_names: Sequence[str] | None,
    names: Sequence[str],
    unit: str,
    limits: tuple[float, float] | None,
) -> Any:
    """Draw ``values [n, M]``, by default on a new axis. Return the axis."""
    num_clients, num_columns = values.shape
    columns = list(map(label_text, column_names or range(num_columns)))
    width = 2.9 + 0.5 * num_columns
    height = 1.5 + 0.3 * num_clients
    ax = ax or _new_axis(width, height, below=columns, beside=names)
    _draw_heatmap(ax, values, unit, limits)
    _label_axis(ax.xaxis, columns)
    _label_axis(ax.yaxis, names)
    return ax


def _bars(
    ax: Any,
    values: np.ndarray,
    names: Sequence[str],
    intervals: tuple[Tensor, Tensor] | None,
    waterfall_from: float | None,
    sum_of_values: float,
) -> Any:
    """Draw ``values [n]`` as bars or as a waterfall, by default on a new axis. Return the axis."""
    width = max(5.0, 2 + 0.42 * len(values))
    ax = ax or _new_axis(width, 3.8, below=names)
    if waterfall_from is None:
        _draw_bars(ax, values, names, intervals)
    else:
        scores = (waterfall_from, waterfall_from + sum_of_values)
        _draw_waterfall(ax, values, names, intervals, scores=scores)
    return ax


def _check_dimensions(rows: Sequence[Tensor], num_dimensions: int) -> None:
    if not rows or any(row.ndim != num_dimensions for row in rows):
        raise ValueError(
            "plot expected values [n, M] or [n], or a sequence of values [n]. To plot values per class over rounds, "
            "pass the values of one class."
        )


def _note_on_clients(num_drawn: int, num_clients: int) -> str:
    if num_drawn == num_clients:
        return ""
    return f" ({num_drawn} of {num_clients:,} clients: the highest and the lowest values)"


def _clients_to_draw(values: np.ndarray) -> list[int]:
    """Choose the clients to draw, by values ``[1, n, M]`` of M classes or ``[R, n]`` of R rounds."""
    num_clients = values.shape[1]
    if num_clients <= MAX_CLIENTS:
        return list(range(num_clients))
    overall_values = values
    if values.ndim == 3:
        overall_values = np.where(np.isnan(values).all(2), np.nan, np.nansum(values, axis=2))
    ranking = _ranking(overall_values)
    if len(ranking) > MAX_CLIENTS:
        num_per_end = MAX_CLIENTS // 2
        ranking = ranking[:num_per_end] + ranking[-num_per_end:]
    return sorted(ranking) or list(range(MAX_CLIENTS))


def _ranking(rows: np.ndarray) -> list[int]:
    """Sort the clients by their last finite values in ``rows [R, n]``, the highest first. Clients without a finite
    value are excluded.
    """
    last_values = np.full(rows.shape[1], np.nan)
    for row in rows:
        is_finite = np.isfinite(row)
        last_values[is_finite] = row[is_finite]
    num_values = int(np.isfinite(last_values).sum())
    ranking: list[int] = np.argsort(-last_values, kind="stable").tolist()  # NaN comes last
    return ranking[:num_values]


def _finish_axis(ax: Any, unit: str, limits: tuple[float, float] | None) -> None:
    ax.set_ylabel(unit)
    if limits is not None:
        ax.set_ylim(limits)
    ax.spines[["top", "right"]].set_visible(False)


def _new_axis(
    width: float,
    height: float,
    below: Sequence[str] = (),
    beside: Sequence[str] = (),
) -> Any:
    """Return the axis of a new figure, with space for labels below and beside it."""
    # Imported here because it is slow, and most runs draw nothing.
    from matplotlib.figure import Figure

    longest_beside = max(map(len, beside), default=0)
    longest_below = max(map(len, below), default=0)
    axis_width = min(max(width, MIN_WIDTH), MAX_WIDTH)
    axis_height = min(max(height, MIN_HEIGHT), MAX_HEIGHT)
    figure_width = axis_width + INCHES_PER_CHARACTER_BESIDE * longest_beside
    figure_height = axis_height + INCHES_PER_CHARACTER_BELOW * longest_below
    figure = Figure(figsize=(figure_width, figure_height), dpi=100, layout="constrained")
    return figure.subplots()


def _draw_bars(
    ax: Any,
    values: np.ndarray,
    names: Sequence[str],
    intervals: tuple[Tensor, Tensor] | None,
) -> None:
    has_value = np.isfinite(values)
    positions = np.arange(len(values))
    ax.bar(positions[has_value], values[has_value], color=PALETTE[0])
    if intervals is not None:
        _draw_intervals(ax, positions, heights=values, values=values, intervals=intervals)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set_xlim(-0.7, len(values) - 0.3)  # bars are 0.8 wide
    _label_axis(ax.xaxis, names)

    for client in np.flatnonzero(~has_value).tolist():
        ax.text(client, 0, " no value", **STYLE_OF_NO_VALUE)


def _draw_waterfall(
    ax: Any,
    values: np.ndarray,
    names: Sequence[str],
    intervals: tuple[Tensor, Tensor] | None,
    *,
    scores: tuple[float, float],
) -> None:
    """Draw values ``[n]`` as steps from the score of the untrained model to that of the model of all clients."""
    initial_score, _final_score = scores
    steps = np.nan_to_num(values)
    scores_after_steps = initial_score + steps.cumsum()
    scores_before_steps = scores_after_steps - steps
    last_position = len(values) + 1
    positions = np.arange(1, last_position)  # between the two scores
    colors = np.where(steps < 0, PALETTE[1], PALETTE[0])
    ax.bar([0, last_position], scores, color="0.6")
    ax.bar(positions, steps, bottom=scores_before_steps, color=colors)
    if intervals is not None:
        _draw_intervals(ax, positions, scores_after_steps, values, intervals)
    ax.axhline(0, color="black", linewidth=0.8)
    _label_axis(ax.xaxis, ["untrained", *names, "all"])


def _draw_intervals(
    ax: Any,
    positions: np.ndarray,
    heights: np.ndarray,
    values: np.ndarray,
    intervals: tuple[Tensor, Tensor],
) -> None:
    """Draw the intervals of ``values [n]`` as error bars at the points with these positions and heights."""
    low = _as_array(intervals[0])
    high = _as_array(intervals[1])
    # If there is a NaN, matplotlib cannot find the limits of the axes.
    has_interval = np.isfinite(values) & np.isfinite(low) & np.isfinite(high)
    # An interval may lie on one side of its value, as a bootstrap's, so it is drawn around its own middle.
    shifts = (low + high) / 2 - values
    half_lengths = (high - low) / 2
    ax.errorbar(
        positions[has_interval],
        (heights + shifts)[has_interval],
        yerr=half_lengths[has_interval],
        fmt="none",  # without markers
        ecolor="0.25",
        capsize=3,
    )


def _draw_lines(ax: Any, rows: np.ndarray, names: Sequence[str]) -> None:
    ranking = _ranking(rows)
    named_clients = list(range(len(names)))
    if len(names) > MAX_NAMED_LINES:
        lower_ranks = ranking[NUM_NAMED_PER_END:]
        named_clients = ranking[:NUM_NAMED_PER_END] + lower_ranks[-NUM_NAMED_PER_END:]

    rounds = range(1, len(rows) + 1)
    for client in sorted({*ranking} - {*named_clients}):
        ax.plot(rounds, rows[:, client], color="0.72", linewidth=0.7)
    for position, client in enumerate(named_clients):
        _draw_named_line(ax, rounds, rows[:, client], names[client], position)
    _finish_lines(ax, are_all_named=len(named_clients) == len(names))


def _draw_named_line(
    ax: Any,
    rounds: Sequence[int],
    values: np.ndarray,
    name: str,
    position: int,
) -> None:
    # When all colors are used, lines are dashed.
    ax.plot(
        rounds,
        values,
        label=name,
        marker=".",  # a line through a single value would be invisible
        color=PALETTE[position % len(PALETTE)],
        linestyle="-" if position < len(PALETTE) else "--",
    )


def _finish_lines(ax: Any, are_all_named: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.legend(
        fontsize="small",
        frameon=False,
        title=None if are_all_named else "top and bottom",
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
    )


def _draw_heatmap(
    ax: Any,
    values: np.ndarray,
    unit: str,
    limits: tuple[float, float] | None,
) -> None:
    is_finite = np.isfinite(values)
    lowest, highest = _color_range(values[is_finite], limits)
    # Where there is no value, the hatching is visible. White would mean 0.
    ax.set_facecolor("0.9")
    ax.patch.set(hatch="////", edgecolor="0.65")
    image = ax.imshow(
        np.where(is_finite, values, np.nan),
        aspect="auto",
        interpolation="nearest",
        cmap="RdBu" if lowest < 0 else "Blues",
        vmin=lowest,
        vmax=highest,
    )
    ax.figure.colorbar(image, ax=ax, label=unit)
    if values.size <= MAX_NUMBERS_IN_HEATMAP:
        _write_numbers(ax, values, bound=highest)


def _color_range(
    values: np.ndarray,
    limits: tuple[float, float] | None,
) -> tuple[float, float]:
    # With negative values, the color scale is symmetric about 0.
    if limits is not None:
        low, high = limits
    elif values.size:
        low, high = values.min(), values.max()
    else:
        low, high = 0.0, 1.0
    if low < 0:
        bound = max(-low, high)
        return -bound, bound
    return 0.0, high or 1.0


def _write_numbers(ax: Any, values: np.ndarray, bound: float) -> None:
    for row, column in np.argwhere(np.isfinite(values)).tolist():
        value = values[row, column]
        text = f"{value:.2f}" if abs(value) < 100 else f"{value:.3g}"
        color = "white" if abs(value) > 0.6 * bound else "black"
        ax.text(column, row, text, ha="center", va="center", fontsize=8, color=color)


def _label_axis(axis: Any, texts: Sequence[str]) -> None:
    # If there are more texts than MAX_LABELS, only every second, third, ... is shown.
    stride = 1 + (len(texts) - 1) // MAX_LABELS
    positions = range(0, len(texts), stride)
    axis.set_ticks(positions, [texts[position] for position in positions])
    longest = max(map(len, texts), default=0)
    if axis.axis_name == "x" and longest > 3:
        for label in axis.get_ticklabels():
            label.set(rotation=45, horizontalalignment="right", rotation_mode="anchor")
