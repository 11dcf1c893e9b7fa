"""The house: which room of the core or which wing a file of flsv belongs to, and how much code each has.

    python tools/house.py

prints tokens, without comments and docstrings. ``house.yaml`` has the rooms and the wings.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import yaml

PACKAGE = Path(__file__).parents[1] / "flsv"
LAYOUT = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER"}


@cache
def house() -> dict[str, Any]:
    """Return what ``house.yaml`` says."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def wing_of(file: str) -> str | None:
    """Return the wing of a file, a path below flsv without its ending, or None if it is the core's."""
    for name, wing in house()["wings"].items():
        if any(re.fullmatch(pattern, file) for pattern in wing["files"]):
            return name
    return None


def place_of(file: str) -> str:
    """Return the room or the wing of a file, a path below flsv without its ending."""
    wing = wing_of(file)
    if wing is not None:
        return wing
    folder = Path(file).parts[0] if "/" in file else "."
    for name, room in house()["core"].items():
        if folder in room["folders"]:
            return name
    raise ValueError(f"tools/house.yaml: add the folder {folder} to a room or a wing")


def wing_of_module(module: str) -> str | None:
    """Return the wing of a module such as ``flsv.sites.site``, or None if it is the core's."""
    _, *parts = module.split(".")
    if PACKAGE.joinpath(*parts).is_dir():
        parts.append("__init__")
    return wing_of("/".join(parts))


def count_tokens(source: str) -> int:
    """Count the tokens of code, without comments, layout and texts that stand alone, as docstrings do."""
    texts = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts.add((node.lineno, node.col_offset))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(
        token.start not in texts and tokenize.tok_name[token.type] not in LAYOUT for token in tokens
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    counts = Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE).with_suffix("").as_posix()
        counts[place_of(file)] += count_tokens(path.read_text(encoding="utf-8"))
    for place, count in [*counts.most_common(), ("flsv", counts.total())]:
        print(f"{place:10} {count:8,}")
