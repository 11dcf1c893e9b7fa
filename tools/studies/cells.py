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
import logging
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import joblib
import lightning as L
import torch
import yaml

import flsv
from flsv import FederatedLoop
from flsv.cli.parser import FederatedCLI, make_cli

# Studies import the package benchmark, which is beside their folder.
sys.path.append(str(Path(__file__).parents[1]))
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
    """Run a cell in this process, with one thread and without a word of Lightning's."""
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
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


def finish(cells: Sequence[Cell], folder: Path, root: str, workers: int = 2) -> Results:
    """What was measured of every cell; those that are kept in the folder are not run again.

    Raises:
        ValueError: two cells have one row, column and seed.
        RuntimeError: some cells failed; all others are kept.
    """
    if len({cell.key for cell in cells}) < len(cells):
        raise ValueError("two cells of the table have the same row, column and seed.")
    memory = joblib.Memory(folder, verbose=0)
    start, results, failed = time.perf_counter(), Results(), []
    jobs = (joblib.delayed(outcome)(cell, root, memory) for cell in cells)
    done = joblib.Parallel(workers, return_as="generator_unordered")(jobs)
    for number, (cell, result, error) in enumerate(done, 1):
        name = f"{number}/{len(cells)} {cell.column}, {cell.row}, seed {cell.seed}"
        if error:
            failed.append(f"{name}: {error}\n  {cell.command}")
            print(f"failed: {failed[-1]}", flush=True)
            continue
        results[cell.key] = result
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(cells)} cells failed, the first:\n{failed[0]}")
    return {cell.key: results[cell.key] for cell in cells}  # in the table's order


def outcome(cell: Cell, root: str, memory: joblib.Memory) -> tuple[Cell, Measured, str]:
    """A cell, what was measured of it, now or before, and why there is nothing."""
    kept = memory.cache(measure_once, ignore=["cell", "root"])
    try:
        return cell, kept(cell.key, cell.command, version(cell), cell, root), ""
    except Exception as error:  # the other cells go on
        return cell, {}, str(error) or repr(error)


def measure_once(
    key: tuple[str, str, int], command: str, version: str, cell: Cell, root: str
) -> Measured:
    """What is kept by a cell's place and command, and the version of its sources."""
    return measure(cell, root)


# ---- the command line


def _seeds(seed: int) -> dict[str, int]:
    return {"seed_everything": seed, "data.splits.seed": seed, "federation.seed": seed}


def _options(options: Mapping[str, Any], seed: int) -> list[str]:
    return [f"--{name}={written(seeded(value, seed))}" for name, value in options.items()]


def written(value: Any) -> str:
    """As YAML, of which JSON is a part; a string as it is."""
    return value if isinstance(value, str) else json.dumps(value)
