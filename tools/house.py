"""The house: which room of the core or which wing a file of flsv belongs to, by ``house.yaml``."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "flsv"


@cache
def house() -> dict[str, Any]:
    """Return what ``house.yaml`` says."""
    path = Path(__file__).with_suffix(".yaml")
    text = path.read_text(encoding="utf-8")
    return yaml.safe_load(text)


def wing_of(file: str) -> str | None:
    """Return the wing of a file, a path below flsv without its ending, or None if it is the core's."""
    for name, wing in house()["wings"].items():
        for pattern in wing["files"]:
            if re.fullmatch(pattern, file):
                return name
    return None


def room_of(file: str) -> str:
    """Return the core's room of a file, a path below flsv without its ending."""
    folder = Path(file).parts[0] if "/" in file else "."
    for name, room in house()["core"].items():
        if folder in room["folders"]:
            return name
    raise ValueError(f"tools/house.yaml: add the folder {folder} to a room or a wing")


def place_of(path: Path) -> str:
    """Return the room or the wing of one of flsv's files."""
    relative_path = path.relative_to(PACKAGE)
    file = relative_path.with_suffix("").as_posix()
    return wing_of(file) or room_of(file)


def wing_of_module(module: str) -> str | None:
    """Return the wing of a module such as ``flsv.sites.site``, or None if it is the core's."""
    _, *parts = module.split(".")
    path = PACKAGE.joinpath(*parts)
    if path.is_dir():
        parts.append("__init__")
    return wing_of("/".join(parts))
