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
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def wing_of(file: str) -> str | None:
    """Return the wing of a file, a path below flsv without its ending, or None if it is the core's."""
    for name, wing in house()["wings"].items():
        if any(re.fullmatch(pattern, file) for pattern in wing["files"]):
            return name
    return None


def room_of(file: str) -> str:
    """Return the core's room of a file, a path below flsv without its ending."""
    folder, _, rest = file.partition("/")
    for name, room in house()["core"].items():
        if (folder if rest else ".") in room["folders"]:
            return name
    raise ValueError(f"tools/house.yaml: add the folder {folder} to a room or a wing")


def place_of(path: Path) -> str:
    """Return the room or the wing of one of flsv's files."""
    file = path.relative_to(PACKAGE).with_suffix("").as_posix()
    return wing_of(file) or room_of(file)


def wing_of_module(module: str) -> str | None:
    """Return the wing of a module such as ``flsv.sites.site``, or None if it is the core's."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    file = path / "__init__" if path.is_dir() else path
    return wing_of(file.relative_to(PACKAGE).as_posix())
