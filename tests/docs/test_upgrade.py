"""The page on upgrading: names that are gone cannot be imported, and those in their place can."""

import importlib
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "upgrade.md"


def is_there(name):
    """Return whether a module, or a name in one, can be imported."""
    parent, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        try:
            return hasattr(importlib.import_module(parent), attribute)
        except ModuleNotFoundError:
            return False

    return True


def test_removed_names_are_gone_and_their_successors_are_there():
    gone = []
    successors = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `flsv."):
            _, first_cell, second_cell, *_reason = line.split("|")
            gone += re.findall(r"`(flsv\.[\w.]+)`", first_cell)
            successors += re.findall(r"`(flsv\.[\w.]+)`", second_cell)

    assert gone
    assert [name for name in gone if is_there(name)] == []
    assert [name for name in successors if not is_there(name)] == []
