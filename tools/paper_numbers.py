"""The papers' own numbers, in brackets beside ours.

    python tools/paper_numbers.py docs/results/*.md

They stand in ``paper_numbers.yaml``. ``run_table.py`` puts them into its reports; this writes them into pages that are
there already. A page that has them is left as it is.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_suffix(".yaml")
Numbers = Mapping[str, Mapping[str, str]]  # column to row to what the paper says


@cache
def known() -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Our table's name to captions and the numbers below them, which are texts: 96.90 keeps its 0."""
    return yaml.load(FILE.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)


def with_paper(text: str, name: str) -> str:
    """A table's Markdown with the paper's numbers.

    Args:
        text: of a page, or of a report. The caption of a table is the last line before it that is none of a table.
        name: of our table, such as ``pfedsv``; of one that has no paper nothing changes.

    Example:
        >>> table = "|  | beta |\\n| --- | --- |\\n| beta 0.3 | **81.0 ± 5.2** |"
        >>> print(with_paper(f"Test accuracy by beta, %:\\n\\n{table}", "shapleyfl"))
        Test accuracy by beta, %:
        <BLANKLINE>
        |  | beta |
        | --- | --- |
        | beta 0.3 | **81.0 ± 5.2** (58.22) |
    """
    caption, head, lines = "", None, []
    paragraph_ended = True
    for line in text.split("\n"):
        if not line.startswith("|"):
            if line.strip():
                caption = line if paragraph_ended else caption  # the first line of the last paragraph
            paragraph_ended, head = not line.strip(), None
            lines.append(line)
            continue
        cells = _cells(line)
        numbers = next((each["numbers"] for each in known().get(name, ()) if caption.startswith(each["under"])), {})
        if head is None:
            head = cells
        elif not set(line) <= set("|- :"):
            cells = [cells[0], *(_beside(cell, numbers, column, cells[0]) for column, cell in zip(head[1:], cells[1:]))]
            line = f"| {' | '.join(cells)} |" if numbers else line
        lines.append(line)
    return "\n".join(lines)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if line.strip("| ") else []


def _beside(cell: str, numbers: Numbers, column: str, row: str) -> str:
    plain = re.sub(r" \((received|trained)\)$", "", row.strip("*"))
    said = numbers.get(column, {}).get(plain)
    return cell if said is None or cell.endswith(f" ({said})") or cell == "-" else f"{cell} ({said})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path, help="pages whose names are those of our tables")
    for page in parser.parse_args().pages:
        text = page.read_text(encoding="utf-8")
        page.write_text(with_paper(text, page.stem), encoding="utf-8")


if __name__ == "__main__":
    main()
