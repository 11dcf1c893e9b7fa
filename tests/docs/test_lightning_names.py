"""The page of Lightning's private names against the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import lightning

import flsv

PAGE = Path(__file__).parents[2] / "docs/reference/lightning_names.md"
#: Of flsv's own objects or of torch's, which Lightning has, too.
OTHERS = {"_computed", "_load", "_modules", "_start", "_trainer", "_module", "_run", "_version"}


def private_names_of_lightning() -> set[str]:
    found: set[str] = set()
    for path in Path(lightning.__file__).parent.rglob("*.py"):
        source = path.read_text()
        found |= {*re.findall(r"(?:def|class) (_[A-Za-z]\w*)", source), *re.findall(r"self\.(_[a-z]\w*)\b.*?=", source)}
    return found


def used(tree: ast.AST) -> set[str]:
    """Private names that are imported from Lightning, asked of another object than ``self``, or given as a string."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning"):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return {name for name in found if re.fullmatch(r"_[A-Za-z]\w*", name)}


def test_the_page_names_what_is_used():
    sources = Path(flsv.__file__).parent.rglob("*.py")
    names = set().union(*(used(ast.parse(path.read_text())) for path in sources)) & private_names_of_lightning()
    on_page = {
        name
        for row in PAGE.read_text().splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(_\w+)`", row.split("|")[1])
    }
    missing = names - on_page - OTHERS
    assert not missing, f"not on the page: {sorted(missing)}"
    assert on_page <= names, f"no longer used: {sorted(on_page - names)}"
