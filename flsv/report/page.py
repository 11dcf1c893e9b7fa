"""A run's page as a file: HTML without scripts, legible on paper, phones and dark screens."""

from __future__ import annotations

import math
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
from flsv.report.blocks import Bars, Heat, Lines, Page, Steps, Table, number
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
) -> Path:
    """Write a run's report: of all clients, or the page that one of them may see.

    Args:
        path: the run's folder; of a killed run, too.
        client: number or name of the client whose page it is; None: for whoever runs the federation.
        out: the file, ``.html``; None: ``report.html`` in the run's folder, or ``clients/<name>/report.html``.
        valuation: folder of ``flsv value`` on the same data, whose findings are added.
        budget: to be shared out by the run's values: the amounts stand on the page, those of all clients also in
            ``shares.csv`` beside it.

    Returns:
        The file.

    Raises:
        ConfigurationError: no run there, no such client, a file of another kind; values that no budget may be shared
            out by, see :func:`flsv.report.shares.basis_of`. Then nothing is written.
    """
    run = open_run(path, valuation)
    who = None if client is None else client_number(client, run.client_names, "client")
    shares = None if budget is None else shares_of(run, budget)
    page = page_for_all(run, shares) if who is None else page_for_one(run, who, shares)
    folder = run.folder if who is None else run.folder / "clients" / run.folders[who]
    file = folder / "report.html" if out is None else Path(out)
    if file.suffix != ".html":
        raise ConfigurationError(f"out={str(out)!r}: expected a file that ends with .html.")
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as draft:
        draft.write(to_html(page).encode())
    if shares is not None and who is None:
        shares.save(file.parent / SHARES, run.client_names)
    return file


#: Columns up to which a heatmap has numbers.
NUMBERED = 12
_POSITIVE, _NEGATIVE = "0, 114, 178", "213, 94, 0"


def to_html(page: Page) -> str:
    """The whole file."""
    return _templates.get_template("report.html").render(page=page, numbered=NUMBERED)


def _chart(block: Bars | Steps | Lines) -> Markup:
    draw: Any = {Bars: drawing.bars, Steps: drawing.steps, Lines: drawing.lines}[type(block)]
    return Markup(draw(block))  # made of escaped texts and numbers


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
