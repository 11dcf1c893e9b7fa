"""A cell of a table: how it is built and measured, and how finished ones are kept, so that a killed table goes on.

What an algorithm is stands in ``configs/``; what a table changes stands in its overrides, arguments of ``flsv fit``, so
that every cell is a command that can be repeated by hand.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import inspect
import json
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from common import be_quiet

import flsv
from flsv import FederatedLoop
from flsv.cli.parser import FederatedCLI, make_cli
from flsv.utilities.errors import ConfigurationError

CONFIGS = Path(__file__).parents[2] / "configs"
QUIET = {
    "trainer.logger": False,
    "trainer.enable_checkpointing": False,
    "trainer.enable_progress_bar": False,
    "trainer.enable_model_summary": False,
    "trainer.num_sanity_val_steps": 0,
    "trainer.limit_val_batches": 0,
    "federation.reporting.figures": 0,
    "federation.reporting.table": False,
    "federation.evaluation.every": 0,
}
Measured = dict[str, Any]  # what JSON can hold
Results = dict[tuple[str, str, int], Measured]  # by row, column and seed


@dataclass(frozen=True)
class Cell:
    """One run of a table.

    Args:
        row: its row, as the table calls it.
        column: its column.
        seed: of the initial weights, of all splits and of everything in the files that has a ``seed``. Cells that
            differ in their rows only are paired: they have the same data, clients and initial weights.
        files: configuration files, paths below ``configs/``; later ones override.
        overrides: option of ``flsv fit`` to value, after the files.
        measure: ``"module:function"``, a function of the cell and the folder of the data that gives what JSON can hold.
    """

    row: str
    column: str
    seed: int
    files: tuple[str, ...]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    measure: str = "cells:global_accuracy"

    @property
    def key(self) -> tuple[str, str, int]:
        return self.row, self.column, self.seed

    @property
    def command(self) -> str:
        """The same run by hand; every ``seed`` in the files is the cell's, too."""
        files = [part for file in self.files for part in ("--config", f"configs/{file}")]
        return shlex.join(
            ["flsv", "fit", *files, *_options({**_seeds(self.seed), **self.overrides}, self.seed)]
        )


def named(path: str) -> Any:
    """What ``"module:name"`` is."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def measure(cell: Cell, root: str) -> Measured:
    """Run a cell in this process."""
    be_quiet()
    try:
        return named(cell.measure)(cell, root)
    finally:
        gc.collect()  # a trainer and its data refer to each other, and are large


@contextmanager
def built(cell: Cell, root: str, **more: Any) -> Iterator[FederatedCLI]:
    """The trainer, module and data of a cell, in a folder that is gone afterwards; ``more`` overrides once more."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = []
        for place, file in enumerate(cell.files):
            copy = Path(folder, f"{place}.yaml")
            content = yaml.safe_load((CONFIGS / file).read_text(encoding="utf-8"))
            copy.write_text(yaml.safe_dump(seeded(content, cell.seed)), encoding="utf-8")
            arguments += ["--config", str(copy)]
        options = {**QUIET, "data.files.root": root, **_seeds(cell.seed), **cell.overrides, **more}
        arguments += _options({**options, "trainer.default_root_dir": folder}, cell.seed)
        cli = make_cli(arguments, run=False)
        check_seeds(cli, cell.seed)
        yield cli


def seeded(tree: Any, seed: int) -> Any:
    """The same tree, in which everything called ``seed`` is this one.

    Example:
        >>> seeded({"attacks": [{"fraction": 0.3, "seed": 0}]}, 4)
        {'attacks': [{'fraction': 0.3, 'seed': 4}]}
    """
    if isinstance(tree, Mapping):
        return {
            name: seed if name == "seed" else seeded(value, seed) for name, value in tree.items()
        }
    return [seeded(value, seed) for value in tree] if isinstance(tree, list) else tree


def check_seeds(cli: FederatedCLI, seed: int) -> None:
    """Raise if a random part has another seed than the cell's: else all seeds of a table would share it."""
    loop = federated_loop(cli.trainer)
    for part in (cli.datamodule.partitioner, *cli.datamodule.corruptions, *loop.uploads):
        while part is not None:
            if getattr(part, "seed", seed) != seed:
                raise ValueError(
                    f"{part!r} has another seed than the cell's, {seed}: say seed: 0 in its file."
                )
            part = getattr(part, "partitioner", None)


def federated_loop(trainer: L.Trainer) -> FederatedLoop:
    """The loop among a trainer's callbacks."""
    (loop,) = (each for each in trainer.callbacks if isinstance(each, FederatedLoop))  # type: ignore[attr-defined]
    return loop


def global_accuracy(cell: Cell, root: str) -> Measured:
    """``accuracy`` and ``balanced_accuracy`` of the last global model on the test set, in %."""
    with built(cell, root) as cli:
        cli.trainer.fit(cli.model, cli.datamodule)
        return test_accuracies(cli)


def test_accuracies(cli: FederatedCLI) -> Measured:
    """Of the last global model, in %."""
    scores = cli.trainer.test(cli.model, cli.datamodule, verbose=False)[0]
    return {name: 100 * scores[f"test_{name}"] for name in ("accuracy", "balanced_accuracy")}


# ---- what is kept


@cache
def source_version() -> str:
    """A digest of the package's sources."""
    digest = hashlib.sha256()
    package = Path(flsv.__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def version(cell: Cell) -> str:
    """Of the sources that a cell's outcome depends on."""
    digest = hashlib.sha256(source_version().encode())
    digest.update(inspect.getsource(named(cell.measure)).encode())
    for file in cell.files:
        digest.update((CONFIGS / file).read_bytes())
    return digest.hexdigest()[:16]


class Kept:
    """The finished cells in a file of JSON lines; it need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: dict[tuple[str, str], Measured] = {}
        for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue  # the line that was being written when the table was killed
            self._lines[line["command"], line["version"]] = line["result"]

    def find(self, cell: Cell) -> Measured | None:
        return self._lines.get((cell.command, version(cell)))

    def keep(self, cell: Cell, result: Measured) -> None:
        """Append a line."""
        line = {"row": cell.row, "column": cell.column, "seed": cell.seed, "command": cell.command}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
        with self.path.open("a") as file:
            file.write(
                "\n" * cut + json.dumps({**line, "version": version(cell), "result": result}) + "\n"
            )


def check_sources(cells: Sequence[Cell], root: str) -> None:
    """Raise SystemExit with one line if the data of a cell cannot be read: one cell of each source is tried."""
    by_source: dict[str, Cell] = {}
    for cell in cells:
        by_source.setdefault(source_of(cell), cell)
    for source, cell in by_source.items():
        try:
            with built(cell, root) as cli:
                cli.datamodule.prepare_data()
                cli.datamodule.setup("fit")
        except (ConfigurationError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise SystemExit(
                f"the data {source} are needed, and cannot be read below {root} (--root): {reason}"
            ) from error


def source_of(cell: Cell) -> str:
    """Return the name of the data of a cell."""
    source: Any = cell.overrides.get("data.source")
    for file in cell.files:
        if source is None:
            content = yaml.safe_load((CONFIGS / file).read_text())
            source = content.get("data", {}).get("source")
    return str(source)


def finish(cells: Sequence[Cell], kept: Kept, root: str, workers: int = 2) -> Results:
    """What was measured of every cell; those that are kept are not run again.

    Raises:
        ValueError: two cells have one row, column and seed.
        RuntimeError: some cells failed; all others are kept.
    """
    if len({cell.key for cell in cells}) < len(cells):
        raise ValueError("two cells of the table have the same row, column and seed.")
    results = {cell.key: result for cell in cells if (result := kept.find(cell)) is not None}
    missing = [cell for cell in cells if cell.key not in results]
    print(f"{len(results)} of {len(cells)} cells are kept in {kept.path}", flush=True)
    start, failed = time.perf_counter(), []
    with ProcessPoolExecutor(workers) as pool:
        running = {pool.submit(measure, cell, root): cell for cell in missing}
        for done, future in enumerate(as_completed(running), 1):
            cell = running[future]
            name = f"{cell.column}, {cell.row}, seed {cell.seed}"
            if error := future.exception():
                failed.append(f"{name}: {error}\n  {cell.command}")
                print(f"failed: {failed[-1]}", flush=True)
                continue
            results[cell.key] = future.result()
            kept.keep(cell, results[cell.key])
            print(f"{done}/{len(missing)} {name}: {time.perf_counter() - start:.0f} s", flush=True)
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(cells)} cells failed, the first:\n{failed[0]}")
    return results


# ---- the command line


def _seeds(seed: int) -> dict[str, int]:
    return {"seed_everything": seed, "data.splits.seed": seed, "federation.seed": seed}


def _options(options: Mapping[str, Any], seed: int) -> list[str]:
    return [f"--{name}={written(seeded(value, seed))}" for name, value in options.items()]


def written(value: Any) -> str:
    """As YAML, of which JSON is a part; a string as it is."""
    return value if isinstance(value, str) else json.dumps(value)
