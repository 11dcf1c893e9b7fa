"""Measurements for tests: they leave a mark when they run, and one waits for ever the first time."""

from __future__ import annotations

import time
from pathlib import Path

from table_runs import Cell, Measured


def marked(cell: Cell, root: str) -> Measured:
    with Path(root, "ran.txt").open("a") as file:
        file.write(f"{cell.row} {cell.seed}\n")
    return {"value": 10.0 * cell.seed + len(cell.row)}


def stuck_at_first(cell: Cell, root: str) -> Measured:
    if cell.row == "last" and not Path(root, "go").exists():
        time.sleep(600)
    return marked(cell, root)


def failing(cell: Cell, root: str) -> Measured:
    if cell.row == "bad":
        raise ValueError("no such thing")
    return marked(cell, root)
