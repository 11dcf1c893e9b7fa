"""A report as Markdown: the same numbers, with some rounds of each line chart."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flsv.report.page.blocks import Bars, Block, Bullets, Code, Heat, Page, Table, Text, number, numbers

#: Rounds of a history that are shown.
SHOWN = 6


def to_markdown(page: Page) -> str:
    """The whole file."""
    parts = [f"# {plain(page.title)}", plain(page.subtitle)]
    for section in page.sections:
        parts.append(f"## {plain(section.title)}")
        parts += [text for block in section.blocks if (text := _block(block))]
    return "\n\n".join(parts) + "\n"


def plain(text: str) -> str:
    """A text on one line that Markdown shows as it is.

    Example:
        >>> print(plain("a|b *c*"), plain("<b>"))
        a\\|b \\*c\\* &lt;b&gt;
    """
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_|\[\]])", r"\\\1", text)


def _block(block: Block) -> str:
    if isinstance(block, Text):
        return plain(block.text)
    if isinstance(block, Bullets):
        return "\n".join(f"- {plain(item)}" for item in block.items)
    if isinstance(block, Code):
        return f"```\n{block.text}\n```"
    if isinstance(block, Table):
        return _table(block.head, block.rows, block.texts)
    if isinstance(block, Bars):
        return ""  # a table with the numbers stands beside it
    if isinstance(block, Heat):
        rows = [[name, *(number(value, 2) for value in row)] for name, row in zip(block.names, block.values)]
        return _table([block.corner, *block.columns], rows)
    rounds = chosen_rounds(len(block.values))
    head = ["", *(f"round {block.numbers[index]}" for index in rounds)]
    count = len(rounds)
    cells = numbers([block.values[r][i] for i in range(len(block.names)) for r in rounds])
    return _table(head, [[name, *cells[i * count : (i + 1) * count]] for i, name in enumerate(block.names)])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: bool = False) -> str:
    align = ["---", *["---" if texts else "---:"] * (len(head) - 1)]
    lines = [[plain(cell) or " " for cell in head], align, *([plain(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def chosen_rounds(rounds: int) -> list[int]:
    """The first, the last and some between.

    Example:
        >>> chosen_rounds(20)
        [0, 4, 8, 11, 15, 19]
    """
    if rounds <= SHOWN:
        return list(range(rounds))
    return [round(place * (rounds - 1) / (SHOWN - 1)) for place in range(SHOWN)]
