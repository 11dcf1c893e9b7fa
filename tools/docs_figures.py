"""Print each sentence with a figure of the first pages, its file and the command that made it.

    python tools/docs_figures.py

``docs/figures.yaml`` lists the sentences, with expressions that are computed from the file. Exits with 1 if a figure
differs, or a number is neither computed nor listed as not measured.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

import pandas as pd
import yaml
from scipy import stats

ROOT = Path(__file__).parents[1]
LIST = yaml.safe_load((ROOT / "docs/figures.yaml").read_text())
FIGURE = r"[+-]?(?:\d[\d,]*\d|\d)(?:\.\d+)?(?:e[+-]\d+)?"
_IN_WORDS = (
    r"(?:eleven|twelve|\w+teen|twenty|thirty|forty|fifty|\w+ty-\w+|hundred|thousand|million)"
)
NUMBER = re.compile(rf"(?<![\w.^]){FIGURE}|\b{_IN_WORDS}\b", re.IGNORECASE)
NO_PROSE = re.compile(r"`[^`]*`|\]\([^)]*\)|<[^>]*>")


@cache
def scope_of(source: str) -> dict[str, Any]:
    """``t``: a table, a table's cells by ``(table, row, column)``, or what YAML files say; and what follows from it."""
    made = LIST["sources"][source]
    file, by = ROOT / made["file"], made.get("by")
    if file.suffix != ".csv":
        found = [yaml.safe_load(each.read_text()) for each in sorted(file.glob("*.yaml")) or [file]]
        scope: dict[str, Any] = {"t": found if file.is_dir() else found[0]}
    else:
        table = pd.read_csv(file).query(made.get("where", "index == index"))
        cells = [*table] == ["table", "row", "column", "value"]
        table = (
            table.set_index(["table", "row", "column"] if cells else by) if cells or by else table
        )
        assert table.index.is_unique, f"{file} has a row twice"
        scope = {
            "t": table["value"].map(number).to_dict() if cells else table,
            "numbers": numbers,
            "stats": stats,
        }
    for word, expression in made.get("let", {}).items():
        scope[word] = eval(expression, scope)
    return scope


def number(cell: str | float) -> str | float:
    return float(cell) if re.fullmatch(FIGURE, str(cell)) else cell


def numbers(text: str) -> list[float]:
    return [float(each) for each in re.findall(FIGURE, text)]


def sentences(page: str) -> list[str]:
    """Sentences, rows of tables and items of lists; tests compare what commands print with what they print."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    blocks = [" ".join(block.split()) for block in re.split(r"\n\s*\n|\n(?=[|#-])", text)]
    return [
        each
        for block in blocks
        for each in re.split(r"(?<=[.:?!])\s+(?=[A-Z`*\[(!])", block)
        if each
    ]


def claims(name: str) -> Iterator[tuple[str, list[str], str]]:
    """Of a page each listed sentence as a pattern, its computed figures, and where they come from."""
    for entry in LIST["pages"][name]:
        made = LIST["sources"].get(entry.get("from"))
        scope = scope_of(entry["from"]) if made else {}
        source = (
            f"{made['file']}, by: {made['command']}"
            if made
            else f"not measured: {entry['not measured']}"
        )
        for row, key in entry.get("rows", {"": ""}).items():
            for text in entry["says"]:
                pattern, values = "", []
                for before, field, spec, _ in Formatter().parse(text):
                    pattern += re.escape(before)
                    if field:
                        pattern += f"({re.escape(row) if field == 'row' else FIGURE})"
                        values.append(
                            format(eval(field, {**scope, "row": row, "key": key}), spec or "")
                        )
                yield pattern, values, source


def check(name: str, page: str) -> tuple[list[str], list[str]]:
    """Sentences with figures and their sources, and what differs or has no source."""
    known, errors, lines = sentences(page), [], []
    sources: list[dict[tuple[int, int], str]] = [{} for _ in known]
    for pattern, values, source in claims(name):
        places = [
            (number, match)
            for number, each in enumerate(known)
            for match in re.finditer(pattern, each)
        ]
        if not places:
            errors.append(f"{name} does not say: {re.sub(re.escape(f'({FIGURE})'), '#', pattern)}")
        for number, match in places:
            spans = [match.span(group) for group in range(1, len(values) + 1)] or [match.span()]
            sources[number] |= dict.fromkeys(spans, source)
            if values and [*match.groups()] != values:
                errors.append(
                    f"{name} says {[*match.groups()]}, and {values} follows from {source}: {known[number]}"
                )
    for each, found in zip(known, sources):
        prose = NO_PROSE.sub(lambda match: " " * len(match[0]), each)
        for match in NUMBER.finditer(prose):
            if not any(start <= match.start() and match.end() <= end for start, end in found):
                errors.append(f"{name}: {match[0]!r} has no source: {each}")
        lines += (
            [f"{name}: {each}", *(f"    {source}" for source in dict.fromkeys(found.values()))]
            if found
            else []
        )
    return lines, errors


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    results = [check(name, (ROOT / name).read_text()) for name in LIST["pages"]]
    print("\n".join(line for lines, _ in results for line in lines))
    errors = [error for _, each in results for error in each]
    print("\n".join(errors), file=sys.stderr)
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
