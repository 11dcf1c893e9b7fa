"""Runs the cells of a table, several at once, and keeps each that is finished, so that a killed table goes on.

What is kept is a file of JSON lines. A line counts for a cell if its command, its measurement and the version of the
sources are the same: of ``flsv/``, of the cell's configuration files and of the function that measures.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import inspect
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path

from table_runs import CONFIGS, Cell, Measured, measure

import flsv

Results = dict[tuple[str, str, int], Measured]  # by row, column and seed


class CellsFailed(RuntimeError):
    """Some cells failed; the others are kept."""


@cache
def source_version() -> str:
    """A digest of the package's sources."""
    digest = hashlib.sha256()
    package = Path(flsv.__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def version(cell: Cell) -> str:
    """Of all that a cell's outcome hangs on, beside its command."""
    module, _, name = cell.measure.partition(":")
    digest = hashlib.sha256(source_version().encode())
    digest.update(inspect.getsource(getattr(importlib.import_module(module), name)).encode())
    for file in cell.files:
        digest.update((CONFIGS / file).read_bytes())
    return digest.hexdigest()[:16]


class Kept:
    """The finished cells in a file.

    Args:
        path: of the file; it need not be there.
        any_version: lines of other versions count too, the last one of a command.
    """

    def __init__(self, path: Path, any_version: bool = False) -> None:
        self.path, self.any_version = path, any_version
        self._lines: dict[tuple[str, str, str], Measured] = {}
        if path.exists():
            for text in path.read_text().splitlines():
                try:
                    line = json.loads(text)
                except json.JSONDecodeError:
                    continue  # the line that was being written when the table was killed
                of = "" if any_version else line["version"]
                self._lines[line["command"], line["measure"], of] = line["result"]

    def _key(self, cell: Cell) -> tuple[str, str, str]:
        return cell.command, cell.measure, "" if self.any_version else version(cell)

    def find(self, cell: Cell) -> Measured | None:
        return self._lines.get(self._key(cell))

    def keep(self, cell: Cell, result: Measured) -> None:
        """Append a line, and wait until it is on the disk."""
        self._lines[self._key(cell)] = result
        line = {"row": cell.row, "column": cell.column, "seed": cell.seed, "command": cell.command}
        line |= {"measure": cell.measure, "version": version(cell), "result": result}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _measure(cell: Cell, root: str) -> Measured:
    try:
        return measure(cell, root)
    finally:
        # A trainer and its data refer to each other: a worker would hold the data of several cells.
        gc.collect()


def finish(cells: Sequence[Cell], kept: Kept, root: str, workers: int = 2) -> Results:
    """What was measured of every cell; those that are kept are not run again.

    Raises:
        ValueError: two cells with one row, column and seed.
        CellsFailed: some cannot be run; all others have been.
    """
    if len({cell.key for cell in cells}) < len(cells):
        raise ValueError("two cells of the table have the same row, column and seed.")
    results = {cell.key: found for cell in cells if (found := kept.find(cell)) is not None}
    missing = [cell for cell in cells if cell.key not in results]
    print(f"{len(results)} of {len(cells)} cells are kept in {kept.path}", flush=True)
    start, failed = time.perf_counter(), []
    with ProcessPoolExecutor(workers) as pool:
        running = {pool.submit(_measure, cell, root): cell for cell in missing}
        for done, future in enumerate(as_completed(running), 1):
            cell = running[future]
            if error := future.exception():
                failed.append(f"{cell.row}, {cell.column}, seed {cell.seed}: {error}\n  {cell.command}")
                print(f"failed: {failed[-1]}", flush=True)
                continue
            results[cell.key] = future.result()
            kept.keep(cell, results[cell.key])
            seconds = time.perf_counter() - start
            print(f"{done}/{len(missing)} {cell.column}, {cell.row}, seed {cell.seed}: {seconds:.0f} s", flush=True)
    if failed:
        raise CellsFailed(f"{len(failed)} of {len(cells)} cells failed, the first:\n{failed[0]}")
    return results
