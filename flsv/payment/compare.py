"""compare_runs: final scores, values and shares of several runs, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from numpy.typing import NDArray
from pandas import DataFrame

from flsv.metrics.coalitions.design import arguments_of_design
from flsv.payment.html import Table, bar_cells, write_page
from flsv.results.basis import Basis, preferred_basis
from flsv.results.folder import CONFIG
from flsv.results.reading import Run, open_run
from flsv.results.text import (
    MESSAGES,
    design_in_words,
    design_of,
    format_number,
    shares_in,
    titled,
    with_intervals,
)
from flsv.utilities.csv_files import NAN, save_table
from flsv.utilities.display import display_path
from flsv.values.over_seeds import mean_with_interval

#: What is compared, and the client whose value or share it is.
Row = tuple[str, str]


def compare_runs(paths: Sequence[str | Path]) -> DataFrame:
    """Compare the final scores, values and shares of runs.

    Args:
        paths: the folders of runs or of ``flsv repeat``. Of a run that was retrained, the retraining is compared.

    Returns:
        A table with a row for each score, value or share (the columns ``what`` and ``client``) and each run. ``design``
        names the coalitions that were trained for a value or share. ``mean`` is over the run's seeds. ``value`` is the
        mean difference from the first run over the seeds that both have, and ``low`` and ``high`` are the ends of its
        90 % interval. A difference is NaN without a common seed, or if the designs differ, and an interval with fewer
        than two common seeds.

    Raises:
        ConfigurationError: a folder has no run.
    """
    by_run = {}
    designs = {}
    for path in paths:
        run = _compared(open_run(path))
        by_run[str(path)] = _by_seed(run)
        designs[str(path)] = design_of(_evidence(run))
    numbers = pandas.concat(by_run, axis=1)
    # What only a later run has is beside its like.
    numbers = numbers.loc[numbers.index.unique("what")]

    first_path = str(paths[0])
    is_of_client = numbers.index.get_level_values("client") != ""  # values and shares
    tables = []
    for path, design in designs.items():
        differences = numbers[path] - numbers[first_path]  # a column for each seed
        if design != designs[first_path]:
            differences[is_of_client] = NAN
        columns = _columns_of_run(numbers[path], differences, is_of_client, design).reset_index()
        columns.insert(len(numbers.index.names), "run", path)
        tables.append(columns)
    # The runs' rows for the same number follow each other.
    return pandas.concat(tables).sort_index(kind="stable").reset_index(drop=True)


def _columns_of_run(
    numbers: DataFrame,
    differences: DataFrame,
    is_of_client: NDArray[Any],
    design: str,
) -> DataFrame:
    seeds_and_rows = torch.tensor(differences.to_numpy().T)
    estimates = mean_with_interval(seeds_and_rows)
    means = numbers.mean(axis=1)
    has_value = is_of_client & means.notna()
    columns = {
        "design": np.where(has_value, design, ""),
        "mean": means,
        **estimates.columns(),
    }
    return DataFrame(columns, index=numbers.index)


def _compared(run: Run) -> Run:
    """Return the retraining of a run that was retrained, and else the run."""
    return run if run.retrained is None else run.retrained


def _evidence(run: Run) -> Mapping[str, Any]:
    """Return what the record of a run has about the values that are compared."""
    basis = preferred_basis(run)
    return {} if basis is None else run.performances.get(basis.key, {})


def _by_seed(run: Run) -> DataFrame:
    """Return a run's final scores, and its clients' values and shares, with a column for each seed."""
    basis = preferred_basis(run)
    by_seed = {}
    for seed_run in run.runs:
        numbers = _scores_of(seed_run)
        if basis is not None:
            numbers |= _values_of(seed_run, basis)
        settings = seed_run.record["settings"]
        by_seed[settings.get("federation_seed")] = numbers
    table = DataFrame(by_seed, dtype=float)
    return table.rename_axis(["what", "client"])


def _scores_of(run: Run) -> dict[Row, float]:
    scores = {}
    logged = run.record.get("logged", {})
    for name, number in logged.items():
        scores[f"last {name}", ""] = number
    for performance in run.performances.values():
        scores[titled(performance["by"]), ""] = performance["end"]
    return scores


def _values_of(run: Run, basis: Basis) -> dict[Row, float]:
    numbers = {}
    source = f"{basis.key} {basis.by}"  # a metric may measure another score in another run
    values = run.final(basis.key)
    shares = shares_in(values)
    for client_name, value, share in zip(run.client_names, values, shares):
        numbers[f"value by {source}", client_name] = value
        numbers[f"share by {source}", client_name] = share
    return numbers


def cells(comparison: DataFrame) -> dict[str, list[str]]:
    """Format the columns of :func:`compare_runs`, each row with decimals of its own."""
    rows = [comparison.loc[[row]] for row in comparison.index]
    return {
        "client": list(comparison["client"]),
        "run": list(comparison["run"]),
        "design": list(comparison["design"]),
        "mean": list(map(format_number, comparison["mean"])),
        "minus the first run": [with_intervals(row, " to ")[0] for row in rows],
    }


def note_on_designs(comparison: DataFrame) -> str:
    """Return a sentence that names the runs' designs if their values are not subtracted because of them, and commands
    that give all runs values by one design. "" if the designs do not differ.
    """
    is_value = (comparison["client"] != "") & comparison["mean"].notna()
    values = comparison[is_value]
    differs = values.groupby("what")["design"].nunique().max() > 1  # False for NaN, without values
    if not differs:
        return ""
    design_by_run = values.groupby("run", sort=False)["design"].first()
    descriptions = []
    for path, design in design_by_run.items():
        descriptions.append(f"{path} trained {design_in_words(design) or 'no coalitions'}")
    return MESSAGES["compare"]["other designs"].format(
        designs=", ".join(descriptions),
        commands=", ".join(_commands_for_one_design(list(design_by_run.index))),
    )


def _commands_for_one_design(paths: Sequence[str]) -> list[str]:
    """Return commands that retrain each run with the cheapest of their designs that has a name, and compare them."""
    runs = [open_run(path) for path in paths]
    arguments_of_runs = [arguments_of_design(_evidence(_compared(run))) for run in runs]
    named = [arguments for arguments in arguments_of_runs if arguments]
    from_cheapest_on = list(MESSAGES["trainings"])
    arguments = min(
        named or [{"coalitions": "both", "halvings": None}],
        key=lambda design: from_cheapest_on.index(design["coalitions"]),
    )
    design = arguments["coalitions"]
    halvings = arguments["halvings"]
    options = f"--trainings {design}"
    metric = f'ShadowShapley(coalitions="{design}")'
    if halvings:
        options += f" --halvings {halvings}"
        metric = f'ShadowShapley(coalitions="{design}", halvings={halvings})'
    num_seeds = max(_compared(run).seeds for run in runs)

    commands = []
    folders = []
    for run in runs:
        folder = display_path(run.runs[0].folder)  # of a repeat, the first run
        folders.append(folder)
        if (run.runs[0].folder / CONFIG).is_file():
            commands.append(f"flsv retrain {folder} {options} --seeds {num_seeds}")
        else:
            commands.append(f"{metric} in the program of {folder}")
    return [*commands, f"and flsv report {' '.join(folders)}"]


def write_comparison(comparison: DataFrame, page: Path) -> None:
    """Write a comparison as a page, with a picture of the differences, and as a table in a CSV file beside it."""
    bars = []
    for _title, rows_on_one_scale in comparison.groupby("what", sort=False):
        bars += bar_cells(rows_on_one_scale)
    columns = cells(comparison)
    rows = zip(comparison["what"], *columns.values(), bars)
    table = Table(["", *columns, ""], list(rows))
    write_page(
        page,
        title="Runs side by side",
        heading="Differences",
        front=[table, note_on_designs(comparison), MESSAGES["compare"]["differences"]],
        verdict=None,
    )
    differences = comparison.rename(columns={"value": "difference"})
    save_table(page.with_suffix(".csv"), differences)
