"""Charts as inline SVG: they take their ink from the page, so that they are legible on light and dark alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from flsv.report.page.blocks import Bars, Heat, Lines, number, numbers

#: Okabe and Ito's colours, which the colour-blind can tell apart; yellow is left out, which vanishes on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
WIDTH = 720
#: Lines with a colour and a name; of more, the highest and the lowest.
NAMED = 6
LONGEST = 22


def bars(block: Bars) -> str:
    """A horizontal bar per name, its interval, and a line at 0."""
    known = [x for x in (*block.values, *(block.low or ()), *(block.high or ())) if math.isfinite(x)]
    low, high = min([0.0, *known]), max([0.0, *known])
    if low == high:
        high = low + 1.0
    step, left, right, top = 22, 8 + 7 * max((len(short(n)) for n in block.names), default=0), 76, 8
    height = top + step * len(block.names) + 26
    ticks = nice_ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (WIDTH - left - right)

    parts = [_grid(x(t), top, x(t), height - 24, f"{t:g}", x(t), height - 8) for t in ticks]
    shown = numbers(block.values)
    for row, (name, value) in enumerate(zip(block.names, block.values)):
        middle = top + step * row + step / 2
        parts.append(_text(left - 8, middle + 4, short(name), "end", name))
        if not math.isfinite(value):
            parts.append(_text(x(0.0) + 6, middle + 4, "no value", "start", css="dim"))
            continue
        start, end = sorted((x(0.0), x(value)))
        colour = COLOURS[0] if value >= 0 else COLOURS[1]
        title = f"<title>{escape(name)}: {number(value)}</title>"
        parts.append(
            f'<rect x="{start:.1f}" y="{middle - 7:.1f}" width="{max(end - start, 0.5):.1f}" height="14" '
            f'fill="{colour}">{title}</rect>'
        )
        if block.low is not None and block.high is not None and _finite(block.low[row], block.high[row]):
            a, b = x(block.low[row]), x(block.high[row])
            parts.append(
                f'<path class="ink" d="M{a:.1f} {middle:.1f}H{b:.1f}M{a:.1f} {middle - 4:.1f}v8M{b:.1f} '
                f'{middle - 4:.1f}v8"/>'
            )
        parts.append(_text(WIDTH - 4, middle + 4, shown[row], "end"))
    parts.append(f'<path class="ink" d="M{x(0.0):.1f} {top}V{height - 24}"/>')
    return _svg(height, "".join(parts), f"bars of {len(block.names)} values")


def lines(block: Lines) -> str:
    """A line per name over the rounds."""
    rounds, count = block.numbers, len(block.names)
    known = [value for row in block.values for value in row if math.isfinite(value)]
    if not known:
        return ""
    colours = colours_of(block)
    longest = max(len(short(block.names[client])) for client in colours)
    ticks = nice_ticks(min(known), max(known))
    low, high = min(ticks[0], *known), max(ticks[-1], *known)
    left, right, top, height = 14 + 7 * max(len(f"{t:g}") for t in ticks), 26 + 7 * longest, 10, 300
    bottom, first, last = height - 40, rounds[0], rounds[-1]

    def x(index: float) -> float:
        return left + ((index - first) / (last - first) if last > first else 0.5) * (WIDTH - left - right)

    def y(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - top)

    parts = [_grid(left, y(t), WIDTH - right, y(t), f"{t:g}", left - 6, y(t) + 4, "end") for t in ticks]
    for index in round_ticks(first, last):
        parts.append(_text(x(index), bottom + 16, str(index), "middle"))
    parts.append(_text((left + WIDTH - right) / 2, height - 6, "round", "middle", css="dim"))
    ends: list[tuple[float, str, str]] = []
    for client in sorted(range(count), key=lambda i: i in colours):  # named ones on top of the grey
        points = [
            (x(r), y(row[client])) if math.isfinite(row[client]) else None for r, row in zip(rounds, block.values)
        ]
        if not any(points):
            continue
        colour = colours.get(client, "")
        style = f'stroke="{colour}" stroke-width="2"' if colour else 'class="faint"'
        parts.append(
            f'<path fill="none" {style} d="{_path(points)}"><title>{escape(block.names[client])}</title></path>'
        )
        for point in _alone(points):
            parts.append(f'<circle cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="2.5" fill="{colour or "#888"}"/>')
        if colour:
            end = next(point for point in reversed(points) if point)
            ends.append((end[1], block.names[client], colour))
    for place, name, colour in spread(ends, 14, top + 4, bottom + 4):
        parts.append(
            f'<rect x="{WIDTH - right + 6}" y="{place - 5:.1f}" width="8" height="8" fill="{colour}"/>'
            + _text(WIDTH - right + 18, place + 3, short(name), "start", name)
        )
    return _svg(height, "".join(parts), f"lines of {count} over {len(rounds)} rounds")


def heat(block: Heat) -> str:
    """A grid of colours without numbers, for many columns; a cell says its value to the mouse."""
    known = [abs(value) for row in block.values for value in row if math.isfinite(value)]
    bound = max(known, default=0.0) or 1.0
    columns, size = len(block.columns), 22 if len(block.columns) <= 25 else 11
    left = 8 + 7 * max((len(short(n)) for n in block.names), default=0)
    every = 1 if size == 22 else 1 + (columns - 1) // 20
    longest = max((len(short(c)) for c in block.columns[::every]), default=0)
    top = 10 + 6 * longest if longest > 3 else 22
    row_height = 16
    width, height = left + size * columns + 8 + 4 * longest, top + row_height * len(block.names) + 4
    parts = []
    for j in range(0, columns, every):
        at = left + size * j + size / 2
        turned = f' transform="rotate(-60 {at:.1f} {top - 6})"' if longest > 3 else ""
        anchor = "start" if longest > 3 else "middle"
        parts.append(_text(at, top - 6, short(block.columns[j]), anchor, block.columns[j], extra=turned))
    for i, (name, row) in enumerate(zip(block.names, block.values)):
        place = top + row_height * i
        parts.append(_text(left - 6, place + 12, short(name), "end", name))
        for j, value in enumerate(row):
            style = cell_style(value, bound) or 'fill="none" class="hollow"'
            parts.append(
                f'<rect x="{left + size * j}" y="{place}" width="{size - 1}" height="{row_height - 1}" {style}>'
                f"<title>{escape(name)}, {escape(block.columns[j])}: {number(value)}</title></rect>"
            )
    return _svg(height, "".join(parts), f"{len(block.names)} rows by {columns} columns", width)


def cell_style(value: float, bound: float) -> str:
    """The colour of a value: blue above 0 and orange below, stronger away from it, never so strong that ink is lost."""
    if not math.isfinite(value):
        return ""
    colour = COLOURS[0] if value >= 0 else COLOURS[1]
    return f'fill="{colour}" fill-opacity="{0.08 + 0.72 * min(1.0, abs(value) / bound):.2f}"'


def highlighted(block: Lines) -> list[int]:
    """Whose lines have a colour and a name: all of few; of many those that end highest and lowest."""
    last = {}
    for client in range(len(block.names)):
        known = [row[client] for row in block.values if math.isfinite(row[client])]
        if known:
            last[client] = known[-1]
    order = sorted(last, key=lambda client: (-last[client], client))
    return order if len(order) <= NAMED else order[: NAMED // 2] + order[-NAMED // 2 :]


def colours_of(block: Lines) -> dict[int, str]:
    """Of the lines that have one, by their place; the same in every chart of the same few names."""
    chosen = highlighted(block)
    few = len(block.names) <= NAMED
    return {client: COLOURS[client if few else place] for place, client in enumerate(chosen)}


def spread(
    ends: Sequence[tuple[float, str, str]], gap: float, top: float, bottom: float
) -> list[tuple[float, str, str]]:
    """Labels at these heights, moved apart as little as keeps them ``gap`` from each other."""
    ordered = sorted(ends)
    places: list[float] = []
    for place, _, _ in ordered:
        places.append(max(place, places[-1] + gap if places else top))
    limit = bottom
    for index in range(len(places) - 1, -1, -1):
        places[index] = min(places[index], limit)
        limit = places[index] - gap
    return [(place, name, colour) for place, (_, name, colour) in zip(places, ordered)]


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from one at or below ``low`` to one at or above ``high``.

    Example:
        >>> nice_ticks(0.0, 0.83)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if high <= low:
        low, high = low - abs(low) * 0.1 - 1e-9, high + abs(high) * 0.1 + 1e-9
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    places = max(0, -math.floor(math.log10(step)))
    return [round(index * step, places) for index in range(first, last + 1)]


def round_ticks(first: int, last: int) -> list[int]:
    """Up to some ten whole numbers of rounds.

    Example:
        >>> round_ticks(4, 19)
        [4, 6, 8, 10, 12, 14, 16, 18]
    """
    raw = max(1.0, (last - first + 1) / 10)
    power = 10 ** math.floor(math.log10(raw))
    step = int(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw))
    return list(range(-(-first // step) * step, last + 1, step))


def short(name: str) -> str:
    """On one line, and not longer than there is room."""
    name = " ".join(name.split())
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


Point = tuple[float, float] | None


def _path(points: Sequence[Point]) -> str:
    """Lines through neighbours that are both known."""
    text, pen = "", False
    for point in points:
        if point:
            text += f"{'L' if pen else 'M'}{point[0]:.1f} {point[1]:.1f}"
        pen = point is not None
    return text


def _alone(points: Sequence[Point]) -> list[tuple[float, float]]:
    """Points without a neighbour, of which a path shows nothing."""
    padded = [None, *points, None]
    return [p for before, p, after in zip(padded, points, padded[2:]) if p and not before and not after]


def _finite(*values: float) -> bool:
    return all(map(math.isfinite, values))


def _grid(x1: float, y1: float, x2: float, y2: float, label: str, x: float, y: float, anchor: str = "middle") -> str:
    return f'<path class="grid" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>' + _text(x, y, label, anchor)


def _text(x: float, y: float, text: str, anchor: str, whole: str | None = None, css: str = "", extra: str = "") -> str:
    title = f"<title>{escape(whole)}</title>" if whole is not None and whole != text else ""
    css = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{css}{extra}>{escape(text)}{title}</text>'


def _svg(height: float, content: str, label: str, width: float = WIDTH) -> str:
    css = ' class="chart"' if width == WIDTH else ""
    return (
        f'<svg{css} viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img" '
        f'aria-label="{escape(label)}">{content}</svg>'
    )
