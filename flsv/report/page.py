"""A run's page as a file: HTML without scripts, legible on paper, phones and dark screens, and Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from flsv._lightning.durable import replacing
from flsv.arguments import client_number
from flsv.charts import shortened
from flsv.errors import ConfigurationError
from flsv.report import drawing
from flsv.report.blocks import (
    Bars,
    Block,
    Bullets,
    Code,
    Heat,
    Lines,
    Page,
    Section,
    Steps,
    Table,
    Text,
    Warning,
    markdown_table,
    number,
    numbers,
    plain,
)
from flsv.report.for_all import page_for_all
from flsv.report.for_one import page_for_one
from flsv.report.reading import open_run
from flsv.report.shares import SHARES, Budget, shares_of


def write_report(
    path: str | Path,
    client: int | str | None = None,
    out: str | Path | None = None,
    valuation: str | Path | None = None,
    budget: Budget | None = None,
) -> list[Path]:
    """Write a run's report: of all clients, or the page that one of them may see.

    Args:
        path: the run's folder; of a killed run, too.
        client: number or name of the client whose page it is; None: for whoever runs the federation.
        out: the file, ``.html`` or ``.md``; None: both, ``report.html`` and ``report.md`` in the run's folder, or
            ``clients/<name>/report.html`` and ``.md``.
        valuation: folder of ``flsv value`` on the same data, whose findings are added.
        budget: to be shared out by the run's values: the amounts stand on the page, those of all clients also in
            ``shares.csv`` beside it.

    Returns:
        The files.

    Raises:
        ConfigurationError: no run there, no such client, another ending; values that no budget may be shared out by,
            see :func:`flsv.report.shares.basis_of`. Then nothing is written.
    """
    run = open_run(path, valuation)
    who = None if client is None else client_number(client, run.client_names, "client")
    shares = None if budget is None else shares_of(run, budget)
    page = page_for_all(run, shares) if who is None else page_for_one(run, who, shares)
    if out is None:
        folder = run.folder if who is None else run.folder / "clients" / run.folders[who]
        files = [folder / f"report{ending}" for ending in WRITERS]
    else:
        files = [Path(out)]
        if files[0].suffix not in WRITERS:
            raise ConfigurationError(f"out={str(out)!r}: expected a file that ends with one of {list(WRITERS)}.")
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as draft:
            draft.write(WRITERS[file.suffix](page).encode())
    if shares is not None and who is None:
        files.append(files[0].parent / SHARES)
        shares.save(files[-1], run.client_names)
    return files


#: Columns up to which a heatmap has numbers.
NUMBERED = 12
_POSITIVE, _NEGATIVE = "0, 114, 178", "213, 94, 0"


def to_html(page: Page) -> str:
    """The whole file."""
    return _templates.get_template("report.html").render(page=page, numbered=NUMBERED)


_CHARTS: dict[type, Callable[[Any], str]] = {
    Bars: drawing.bars,
    Steps: drawing.steps,
    Lines: drawing.lines,
}


def _chart(block: Bars | Steps | Lines) -> Markup:
    return Markup(_CHARTS[type(block)](block))  # made of escaped texts and numbers


def _shade(value: float, block: Heat) -> str:
    """The colour of a cell: blue above 0 and orange below, stronger away from it."""
    if not math.isfinite(value):
        return ""
    # Half transparent at most: the ink stays legible, on light and on dark.
    strength = 0.05 + 0.45 * min(1.0, abs(value) / block.bound)
    return f"background: rgba({_POSITIVE if value >= 0 else _NEGATIVE}, {strength:.2f})"


#: Columns of a table beside its first one; those of a wider one stand in further tables below it.
WIDEST = 7
#: Columns of a heatmap without numbers beside its first one, likewise.
WIDEST_NARROW = 20


def pieces(block: Table | Heat) -> list[Table] | list[Heat]:
    """A table as tables that fit on a page, the names in each."""
    if isinstance(block, Table):
        return [
            replace(
                block,
                head=[block.head[0], *block.head[1:][part]],
                rows=[[row[0], *row[1:][part]] for row in block.rows],
                caption=block.caption if not part.start else "",
            )
            for part in _parts(len(block.head) - 1, WIDEST)
        ]
    widest = WIDEST if len(block.columns) <= NUMBERED else WIDEST_NARROW
    return [
        replace(
            block,
            columns=block.columns[part],
            values=[row[part] for row in block.values],
            caption=block.caption if not part.start else "",
            scale=block.bound,
        )
        for part in _parts(len(block.columns), widest)
    ]


def _parts(count: int, most: int) -> list[slice]:
    """So many columns in as few parts as there can be, of about one size."""
    parts = max(1, math.ceil(count / most))
    size = math.ceil(count / parts)
    return [slice(start, start + size) for start in range(0, max(count, 1), size or 1)]


def _table_class(block: Table) -> str:
    """One without a head has no names that a card would need."""
    return " ".join(["texts"] * block.texts + ["cards"] * (any(block.head) and len(block.head) > 2))


_templates = Environment(
    loader=PackageLoader("flsv.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_templates.filters |= {
    "kind": lambda block: type(block).__name__,
    "pieces": pieces,
    "table_class": _table_class,
    "chart": _chart,
    "shade": _shade,
    "short": shortened,
    "number": number,
}


#: Rounds of a history that are shown.
SHOWN = 6


def to_markdown(page: Page) -> str:
    """The whole file."""
    parts = [f"# {plain(page.title)}", plain(page.subtitle), *_sections(page.sections)]
    if page.appendix:
        parts += ["# Appendix", *_sections(page.appendix)]
    return "\n\n".join(parts) + "\n"


def _sections(sections: Sequence[Section]) -> list[str]:
    parts = []
    for section in sections:
        parts += [f"## {plain(section.title)}"] if section.title else []
        parts += [text for block in section.blocks if (text := _block(block))]
    return parts


def _block(block: Block) -> str:
    if isinstance(block, Text):
        return plain(block.text)
    if isinstance(block, Warning):
        return f"> **{plain(block.text)}**"
    if isinstance(block, Bullets):
        return "\n".join(f"- {plain(item)}" for item in block.items)
    if isinstance(block, Code):
        return f"```\n{block.text}\n```"
    if isinstance(block, Bars):
        return ""  # a table with the numbers stands beside it
    return _with_caption(block.caption, _cells_of(block))


def _with_caption(caption: str, text: str) -> str:
    return f"{plain(caption)}:\n\n{text}" if caption else text


def _cells_of(block: Table | Steps | Heat | Lines) -> str:
    if isinstance(block, Table):
        return _table(block.head, block.rows, block.texts)
    if isinstance(block, Steps):
        names, cells = ["start", *block.names, "end"], numbers([block.start, *block.values, block.end])
        return _table(["", block.unit or "value"], [list(row) for row in zip(names, cells)])
    if isinstance(block, Heat):
        rows = [[name, *(number(value, 2) for value in row)] for name, row in zip(block.names, block.values)]
        return _table([block.corner, *block.columns], rows)
    rounds = chosen_rounds(len(block.values))
    head = ["", *(f"round {block.numbers[index]}" for index in rounds)]
    count = len(rounds)
    cells = numbers([block.values[r][i] for i in range(len(block.names)) for r in rounds])
    return _table(head, [[name, *cells[i * count : (i + 1) * count]] for i, name in enumerate(block.names)])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: bool = False) -> str:
    shown = [[plain(cell) for cell in row] for row in (head, *rows)]
    return markdown_table([cell or " " for cell in shown[0]], shown[1:], "---" if texts else "---:")


def chosen_rounds(rounds: int) -> list[int]:
    """The first, the last and some between.

    Example:
        >>> chosen_rounds(20)
        [0, 4, 8, 11, 15, 19]
    """
    if rounds <= SHOWN:
        return list(range(rounds))
    return [round(place * (rounds - 1) / (SHOWN - 1)) for place in range(SHOWN)]


WRITERS = {".html": to_html, ".md": to_markdown}
