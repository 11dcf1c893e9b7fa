"""Names that Lightning has not made public stand in one package, where a new release of it can be looked through."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import lightning

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "flsv" / "_lightning"
PRIVATE = re.compile(r"_[A-Za-z]\w*")
#: Names of torch that Lightning's sources define, too.
OF_TORCH = {"_version", "_modules", "_buffers", "_parameters"}


def names_defined_in(tree: ast.AST) -> set[str]:
    """Names of functions, classes, variables, arguments and attributes of ``self``."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.arg(arg=name):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def lightnings_private_names() -> set[str]:
    package = Path(lightning.__file__).parent
    names = set()
    for part in ("pytorch", "fabric"):
        for path in (package / part).rglob("*.py"):
            tree = ast.parse(path.read_text())
            names.update(names_defined_in(tree))

    private_names = set(filter(PRIVATE.fullmatch, names))
    return private_names - OF_TORCH


def names_used_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each name that is imported from Lightning, read of another object, or given as a text, and its line."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=aliases):
                if module.startswith("lightning"):
                    for alias in aliases:
                        yield alias.name, node.lineno
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name):
                yield name, node.lineno
            case ast.Constant(value=str(text)):
                yield text, node.lineno


def private_uses(folder: Path) -> list[str]:
    """Places of a folder's sources that use a private name of Lightning which the source itself does not define."""
    private_names = lightnings_private_names()
    uses = []
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        foreign_names = private_names - names_defined_in(tree)
        for name, line in names_used_in(tree):
            if name in foreign_names:
                uses.append(f"{path.relative_to(ROOT)}:{line} {name}")
    return uses


def test_private_names_of_lightning_stand_in_one_package() -> None:
    uses = private_uses(ROOT / "flsv")
    uses_elsewhere = [use for use in uses if not use.startswith("flsv/_lightning/")]
    assert not uses_elsewhere, f"move these into flsv/_lightning, with the reason: {uses_elsewhere}"


def test_the_package_uses_private_names_that_the_search_finds() -> None:
    names = set()
    for use in private_uses(ROOM):
        names.add(use.rpartition(" ")[2])
    assert {"_LoggerConnector", "_data_connector", "_current_fx_name"} <= names
    assert len(names) <= 31
