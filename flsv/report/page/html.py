"""A report as one HTML file: no script, nothing from a network, legible on paper, phones and dark screens."""

from __future__ import annotations

import math
from html import escape

from flsv.report.page import charts
from flsv.report.page.blocks import Bars, Block, Bullets, Code, Heat, Page, Section, Table, Text, number

#: Columns up to which a heatmap is a table with numbers.
NUMBERED = 12

STYLE = """
:root { color-scheme: light dark; --ink: #1c1f24; --dim: #5d6570; --paper: #fff; --rule: #d8dce2; --soft: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --dim: #a0a8b4; --paper: #14171c; --rule: #343a44; --soft: #1d2129; }
}
@media print { :root { --ink: #000; --dim: #444; --paper: #fff; --rule: #bbb; --soft: #fff; } }
@media print { section { break-inside: avoid; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 58rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .5rem; padding-bottom: .25rem; border-bottom: 1px solid var(--rule);
  overflow-wrap: anywhere; }
p { margin: .6rem 0; max-width: 46rem; overflow-wrap: anywhere; }
p.subtitle { color: var(--dim); margin-top: .3rem; }
ul { padding-left: 1.2rem; max-width: 46rem; }
li { overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: .9rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th { color: var(--dim); font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child, table.texts th, table.texts td { text-align: left; }
table.texts td { white-space: normal; overflow-wrap: anywhere; vertical-align: top; }
table.texts td:first-child { white-space: nowrap; color: var(--dim); }
table.heat td { border: 2px solid var(--paper); }
table.heat td:first-child { border-left: 0; }
svg { display: block; }
svg.chart { width: 100%; height: auto; min-width: 30rem; max-width: 45rem; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--ink); }
svg .dim { fill: var(--dim); }
svg .grid { stroke: var(--rule); fill: none; }
svg .ink { stroke: var(--ink); fill: none; stroke-width: 1.2; }
svg .faint { stroke: var(--dim); stroke-opacity: .35; stroke-width: 1; }
svg .hollow { stroke: var(--rule); }
pre { background: var(--soft); padding: .8rem 1rem; overflow-x: auto; font-size: .85rem; border-radius: 4px; }
p.key { display: none; font-size: .85rem; }
p.key span { margin-right: 1em; white-space: nowrap; }
p.key i { display: inline-block; width: .7em; height: .7em; margin-right: .35em; }
@media (max-width: 40rem) { p.key { display: block; } body { padding: 1.25rem .9rem 3rem; } h1 { font-size: 1.4rem; } }
"""


def to_html(page: Page) -> str:
    """The whole file."""
    body = "\n".join(_section(section) for section in page.sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Whatever a name holds, nothing is run or fetched.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(page.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<h1>{escape(page.title)}</h1>\n<p class="subtitle">{escape(page.subtitle)}</p>\n{body}\n</body>\n</html>\n'
    )


def _section(section: Section) -> str:
    blocks = "\n".join(_block(block) for block in section.blocks)
    return f"<section>\n<h2>{escape(section.title)}</h2>\n{blocks}\n</section>"


def _block(block: Block) -> str:
    if isinstance(block, Text):
        return f"<p>{escape(block.text)}</p>"
    if isinstance(block, Bullets):
        return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in block.items)}</ul>"
    if isinstance(block, Code):
        return f"<pre>{escape(block.text)}</pre>"
    if isinstance(block, Table):
        rows = [[escape(cell) for cell in row] for row in block.rows]
        return _table([escape(cell) for cell in block.head], rows, "texts" if block.texts else "")
    if isinstance(block, Heat):
        return _heat_table(block) if len(block.columns) <= NUMBERED else _wide(charts.heat(block))
    if isinstance(block, Bars):
        return _wide(charts.bars(block))
    # On a small screen the names at the lines' ends are out of sight.
    key = "".join(
        f'<span><i style="background: {colour}"></i>{escape(charts.short(block.names[client]))}</span>'
        for client, colour in charts.colours_of(block).items()
    )
    return f'<p class="key">{key}</p>{_wide(charts.lines(block))}'


def _wide(content: str) -> str:
    return f'<div class="wide">{content}</div>'


def _table(head: list[str], rows: list[list[str]], css: str = "") -> str:
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    css = f' class="{css}"' if css else ""
    return _wide(f"<table{css}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>")


def _heat_table(block: Heat) -> str:
    known = [abs(value) for row in block.values for value in row if math.isfinite(value)]
    bound = max(known, default=0.0) or 1.0
    head = "".join(f"<th>{escape(charts.short(cell))}</th>" for cell in (block.corner, *block.columns))
    body = ""
    for name, row in zip(block.names, block.values):
        cells = "".join(f"<td{_background(value, bound)}>{number(value, 2)}</td>" for value in row)
        body += f"<tr><td>{escape(name)}</td>{cells}</tr>"
    return _wide(f'<table class="heat"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def _background(value: float, bound: float) -> str:
    if not math.isfinite(value):
        return ""
    red, green, blue = (int(charts.COLOURS[value < 0][i : i + 2], 16) for i in (1, 3, 5))
    # Half transparent at most: the ink stays legible, on light and on dark.
    return f' style="background: rgba({red}, {green}, {blue}, {0.05 + 0.45 * min(1.0, abs(value) / bound):.2f})"'
