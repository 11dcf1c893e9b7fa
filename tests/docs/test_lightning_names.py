"""The page of Lightning's private names against the source."""

import ast
import re
from pathlib import Path

import lightning

import flsv

PAGE = Path(__file__).parents[2] / "docs/reference/lightning_names.md"
#: Of flsv's own objects or of torch's, which Lightning has, too.
OTHERS = {"_computed", "_load", "_modules", "_start", "_trainer", "_module", "_run", "_timeout", "_version"}


def private_names_of_lightning() -> set[str]:
    source = "\n".join(path.read_text() for path in Path(lightning.__file__).parent.rglob("*.py"))
    return {*re.findall(r"(?:def|class) (_[A-Za-z]\w*)", source), *re.findall(r"self\.(_[a-z]\w*)\b.*?=", source)}


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


def test_page_of_private_lightning_names_lists_those_the_code_uses():
    sources = Path(flsv.__file__).parent.rglob("*.py")
    names = set().union(*(used(ast.parse(path.read_text())) for path in sources)) & private_names_of_lightning()
    cells = re.findall(r"^\| (`.*?)\|", PAGE.read_text(), re.MULTILINE)
    on_page = {name for cell in cells for name in re.findall(r"`(_\w+)`", cell)}
    assert names - OTHERS <= on_page <= names
