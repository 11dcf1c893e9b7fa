"""Runs a table: rows, columns and cells stand in a YAML file, and what it measures and reports is named there.

    python tools/run_table.py tools/tables/shapfed.yaml [--out FILE.md] [--images docs/images]
    python tools/run_table.py tools/tables/shapfed.yaml --list           every cell as a command of flsv fit
    python tools/run_table.py tools/tables/shapfed.yaml --full --short   the paper's setting, a round of each cell

The options are those of ``table_presets.py``, which also says what a preset is. The file holds:

    about:    what the table shows, for --help
    seeds:    how many there are by default (5)
    asked:    columns, or beginnings of their names, that run only where they are asked for
    short:    what --short overrides; or "module:function" of a cell
    report:   "module:function" from the results and the cells to Markdown
    images:   "module:function" of the results and a folder, for --images
    measure:  "module:function" of a cell and the folder of the data; blocks and parts may name another
    blocks:   what the cells are made of, see below; or ``cells``, "module:function" from full and the seeds to cells
    first_seed, alone, counted: see ``table_presets.Preset``

A block has ``axes``, each a mapping from names to parts (or a list of names), and a cell for every choice of one name
from each. A part says what its choice changes: ``files`` (below ``configs/``), ``set`` (options of flsv fit), ``small``
and ``full`` (the same in one preset only), ``full_files``, ``measure``, and ``only: full`` or ``only: small`` where it
is in one preset. The block itself is the first part, its ``rules`` are the last ones: a rule counts for the cells that
its ``if`` matches (axis to a name or a pattern), and may ``drop`` them or take options away (``unset``). ``row`` and
``column`` are what the table calls a cell; in them and in files and options ``{axis}`` stands for the chosen name.
``also: "module:function"`` gives further options, from the choice and the seed.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import table_presets
import yaml
from paper_numbers import with_paper
from table_cells import Results
from table_presets import Preset
from table_runs import Cell

Choice = dict[str, Any]  # axis to the chosen name
TABLES = Path(__file__).with_name("tables")
KEYS = {"about", "seeds", "asked", "short", "report", "images", "measure", "blocks", "cells"}
KEYS |= {"first_seed", "alone", "counted"}
PART = {"files", "full_files", "set", "small", "full", "unset", "measure", "only", "drop", "also"}
BLOCK = PART | {"axes", "rules", "row", "column"}


def read_table(path: Path) -> dict[str, Any]:
    """A table's file.

    Raises:
        ValueError: it says something that a table does not have.
    """
    table = yaml.safe_load(path.read_text(encoding="utf-8"))
    table = {name: value for name, value in table.items() if not name.startswith("_")}  # anchors of its own
    _check(path, table, KEYS)
    for block in table.get("blocks", ()):
        _check(path, block, BLOCK)
        for part in (part for axis in block["axes"].values() if isinstance(axis, Mapping) for part in axis.values()):
            _check(path, part or {}, PART)
        for rule in block.get("rules", ()):
            _check(path, rule, PART | {"if"})
    return table


def cells_of(table: Mapping[str, Any], full: bool, seeds: Sequence[int]) -> list[Cell]:
    """All cells, seed by seed, so that a table that is stopped has whole seeds."""
    if "cells" in table:
        return named(table["cells"])(full, seeds)
    return [cell for seed in seeds for block in table["blocks"] for cell in _of_block(block, table, full, seed)]


def cells(name: str, full: bool, seeds: Sequence[int]) -> list[Cell]:
    """Those of a table in ``tools/tables``, by its name."""
    return cells_of(read_table(TABLES / f"{name}.yaml"), full, seeds)


def preset_of(path: Path, images: Path | None = None) -> Preset:
    """What the command line needs to know of a table."""
    table = read_table(path)

    def report(results: Results, cells: Sequence[Cell]) -> str:
        if images is not None and "images" in table:
            named(table["images"])(results, images)
        return with_paper(named(table["report"])(results, cells), path.stem)

    short = table.get("short", {})
    return Preset(
        path.stem,
        lambda full, seeds: cells_of(table, full, seeds),
        report,
        named(short) if isinstance(short, str) else short,
        table.get("seeds", 5),
        tuple(table.get("asked", ())),
        table.get("first_seed", 0),
        tuple(table.get("alone", ())),
        named(table.get("counted", "table_presets:counted")),
    )


def named(path: str) -> Any:
    """What ``"module:name"`` is."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _check(path: Path, said: Mapping[str, Any], known: set[str]) -> None:
    if strange := said.keys() - known:
        raise ValueError(f"{path}: {', '.join(sorted(strange))} is unknown: expected {', '.join(sorted(known))}.")


def _of_block(block: Mapping[str, Any], table: Mapping[str, Any], full: bool, seed: int) -> Iterator[Cell]:
    axes = {name: axis if isinstance(axis, Mapping) else dict.fromkeys(axis) for name, axis in block["axes"].items()}
    for chosen in product(*axes.values()):
        at: Choice = dict(zip(axes, chosen))
        parts = [block, *(axes[name][value] or {} for name, value in at.items())]
        parts += [rule for rule in block.get("rules", ()) if _matches(rule.get("if", {}), at)]
        parts = [part for part in parts if part.get("only") in (None, "full" if full else "small")]
        wanted = len(at) + 1  # a part that is not in this preset takes its cells with it
        of_choice = [block, *(axes[name][value] or {} for name, value in at.items())]
        if sum(part in parts for part in of_choice) < wanted or any(part.get("drop") for part in parts):
            continue
        yield _cell(block, table, parts, {**at, "seed": seed}, full)


def _cell(
    block: Mapping[str, Any],
    table: Mapping[str, Any],
    parts: Sequence[Mapping[str, Any]],
    at: Choice,
    full: bool,
) -> Cell:
    files: list[str] = []
    options: dict[str, Any] = {}
    measure = table.get("measure", Cell.measure)
    for part in parts:
        files += [*part.get("files", ()), *(part.get("full_files", ()) if full else ())]
        options |= {**part.get("set", {}), **part.get("full" if full else "small", {})}
        if "also" in part:
            options |= named(part["also"])(at, full)
        for name in part.get("unset", ()):
            options.pop(name, None)
        measure = part.get("measure", measure)
    row, column = filled(block.get("row", "{row}"), at), filled(block.get("column", "{column}"), at)
    return Cell(str(row), str(column), at["seed"], tuple(filled(files, at)), filled(options, at), measure)


def filled(value: Any, at: Choice) -> Any:
    """With the chosen names in the places of their axes; what is an axis alone becomes the name as it is.

    Example:
        >>> filled({"data.source": "{source}", "rounds": ["{n}", "n = {n}"]}, {"source": "mnist", "n": 3})
        {'data.source': 'mnist', 'rounds': [3, 'n = 3']}
    """
    if isinstance(value, Mapping):
        return {name: filled(inner, at) for name, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, at) for inner in value]
    if not isinstance(value, str):
        return value
    alone = re.fullmatch(r"\{(\w+)\}", value)
    if alone and alone[1] in at:
        return at[alone[1]]
    return re.sub(r"\{(\w+)\}", lambda found: str(at.get(found[1], found[0])), value)


def _matches(condition: Mapping[str, Any], at: Choice) -> bool:
    """Whether every axis has one of the names or patterns."""
    return all(
        any(fnmatchcase(str(at[axis]), str(pattern)) for pattern in (said if isinstance(said, list) else [said]))
        for axis, said in condition.items()
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("table", type=Path)
    own.add_argument("--images", type=Path, help="folder for the figures")
    if not given or given[0] in ("-h", "--help"):
        print(__doc__)
        return
    options, rest = own.parse_known_args(given)
    about = read_table(options.table).get("about", "")
    table_presets.main(preset_of(options.table, options.images), about, rest)


if __name__ == "__main__":
    main()
