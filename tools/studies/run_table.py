"""Runs a table: its cells, what they measure and the tables that come of it stand in a YAML file of ``tables``.

    python tools/studies/run_table.py shapfed [--csv docs/results/shapfed.csv]     Markdown to the terminal
    python tools/studies/run_table.py shapfed --list           every cell as a command of flsv fit
    python tools/studies/run_table.py shapfed --full --short   the paper's setting, one round of each cell on the CPU

The file holds:

    about:    what the table shows, for --help
    asked:    columns, or beginnings of their names, that run only where they are asked for
    short:    what --short overrides, by rules: ``if`` (row and column to patterns) and ``set``
    measure:  "module:function" of a cell and the folder of the data; blocks and parts may name another
    blocks:   what the cells are made of
    tables:   what is printed, see ``table_report.py``

A block has ``axes``, each a mapping from names to parts (or a list of names), and a cell for every choice of one name
from each. A part says what its choice changes: ``files`` (below ``configs/``), ``set`` (options of flsv fit), ``small``
and ``full`` (the same in one preset only), ``full_files``, ``measure``, and ``only: full`` or ``only: small`` where it
is in one preset. The block itself is the first part, its ``rules`` are the last ones: a rule counts for the cells that
its ``if`` matches (axis to a name or a pattern), and may ``drop`` them or take options away (``unset``). ``row`` and
``column`` are what the table calls a cell. In them and in files and options ``{axis}`` stands for the chosen name, and
``{seed}`` for the seed.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import table_report
import yaml
from cells import Cell, finish, measure
from table_report import matches

Choice = dict[str, Any]  # axis to the chosen name
TABLES = Path(__file__).with_name("tables")
KEYS = {"about", "asked", "short", "measure", "blocks", "tables"}
PART = {"files", "full_files", "set", "small", "full", "unset", "measure", "only", "drop"}
BLOCK = PART | {"axes", "rules", "row", "column"}
ONE_ROUND = {"trainer.max_epochs": 1, "trainer.accelerator": "cpu", "trainer.precision": "32-true"}


def read_table(path: Path) -> dict[str, Any]:
    """A table's file.

    Raises:
        ValueError: a key that a table does not have.
    """
    table = yaml.safe_load(path.read_text(encoding="utf-8"))
    # Without anchors of its own.
    table = {name: value for name, value in table.items() if not name.startswith("_")}
    blocks = table["blocks"]
    axes = [axis for block in blocks for axis in block["axes"].values()]
    parts = [part or {} for axis in axes if isinstance(axis, Mapping) for part in axis.values()]
    rules = [rule for block in blocks for rule in block.get("rules", ())]
    known_keys = [
        (KEYS, [table]),
        (table_report.KEYS, table["tables"]),
        (BLOCK, blocks),
        (PART, parts),
        (PART | {"if"}, rules),
    ]
    for known, mappings in known_keys:
        if strange := set().union(*mappings) - known:
            raise ValueError(f"{path}: {sorted(strange)} is unknown: expected {sorted(known)}.")
    return table


def cells_of(table: Mapping[str, Any], full: bool, seeds: Sequence[int]) -> list[Cell]:
    """All cells, seed by seed, so that a table that is stopped has whole seeds."""
    return [
        cell
        for seed in seeds
        for block in table["blocks"]
        for cell in _of_block(block, table, full, seed)
    ]


def shortened(table: Mapping[str, Any], cell: Cell) -> Cell:
    """One round on few images, on the CPU."""
    options = {**cell.overrides, **ONE_ROUND}
    for rule in table.get("short", ()):
        if _matches(rule.get("if", {}), {"row": cell.row, "column": cell.column}):
            options |= rule["set"]
    return replace(cell, overrides=options)


def _of_block(
    block: Mapping[str, Any], table: Mapping[str, Any], full: bool, seed: int
) -> Iterator[Cell]:
    axes = {
        name: axis if isinstance(axis, Mapping) else dict.fromkeys(axis)
        for name, axis in block["axes"].items()
    }
    preset = "full" if full else "small"
    for chosen in product(*axes.values()):
        at: Choice = dict(zip(axes, chosen))
        parts = [block, *(axes[name][value] or {} for name, value in at.items())]
        if any(part.get("only", preset) != preset for part in parts):
            continue
        rules = [rule for rule in block.get("rules", ()) if _matches(rule.get("if", {}), at)]
        parts += [rule for rule in rules if rule.get("only", preset) == preset]
        if not any(part.get("drop") for part in parts):
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
    measurement = table.get("measure", Cell.measure)
    for part in parts:
        files += [*part.get("files", ()), *(part.get("full_files", ()) if full else ())]
        options |= {**part.get("set", {}), **part.get("full" if full else "small", {})}
        for name in part.get("unset", ()):
            options.pop(name, None)
        measurement = part.get("measure", measurement)
    row, column = filled(block.get("row", "{row}"), at), filled(block.get("column", "{column}"), at)
    return Cell(
        str(row),
        str(column),
        at["seed"],
        tuple(filled(files, at)),
        filled(options, at),
        measurement,
    )


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
        matches(str(at[axis]), patterns if isinstance(patterns, list) else [patterns])
        for axis, patterns in condition.items()
    )


def chosen(table: Mapping[str, Any], options: argparse.Namespace) -> list[Cell]:
    """The cells that the command line asks for."""
    cells = cells_of(table, options.full, range(1 if options.short else options.seeds))
    cells = [cell for cell in cells if not options.rows or cell.row in options.rows]
    if options.columns:
        there = {cell.column for cell in cells}
        prefixes = tuple(name for name in options.columns if name not in there)
        return [
            cell
            for cell in cells
            if cell.column in options.columns or cell.column.startswith(prefixes)
        ]
    if options.all or options.full or options.list:
        return cells
    return [cell for cell in cells if not cell.column.startswith(tuple(table.get("asked", ())))]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "table",
        help=f"{', '.join(sorted(path.stem for path in TABLES.glob('*.yaml')))}; or a file",
    )
    parser.add_argument(
        "--root",
        default=os.environ.get("FLSV_DATA_ROOT", "data"),
        help="folder of the data sets",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="the paper's setting, for a GPU",
    )
    parser.add_argument(
        "--short",
        action="store_true",
        help="one round, one seed, few images, nothing kept",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="print every cell's command and end",
    )
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--columns",
        nargs="+",
        help="columns of these names, or where there is none, that begin so",
    )
    parser.add_argument("--rows", nargs="+", help="only these rows")
    parser.add_argument(
        "--all",
        action="store_true",
        help="those columns, too, that run only where asked for",
    )
    parser.add_argument(
        "--kept",
        type=Path,
        help="folder of finished cells; default: runs/tables/NAME",
    )
    parser.add_argument("--csv", type=Path, help="write the tables there, too")
    options = parser.parse_args(arguments)
    path = (
        Path(options.table) if options.table.endswith(".yaml") else TABLES / f"{options.table}.yaml"
    )
    if not path.is_file():
        parser.error(f"there is no {path}: expected a name of tools/studies/tables, or a file")
    table = read_table(path)
    cells = chosen(table, options)
    if not cells:
        parser.error(
            f"no cell has these rows and columns; asked for by --columns or --all: {table.get('asked', [])}"
        )
    if options.list:
        print("\n".join(f"# {cell.column}, {cell.row}\n{cell.command}" for cell in cells))
        return
    if options.short:
        results = {cell.key: measure(shortened(table, cell), options.root) for cell in cells}
    else:
        folder = options.kept or Path("runs/tables", path.stem)
        results = finish(cells, folder, options.root, options.workers)
    tables = table_report.report(table["tables"], results)
    print(f"\n{table_report.markdown(tables)}")
    if options.csv is not None:
        table_report.write_csv(options.csv, tables)


if __name__ == "__main__":
    main()
