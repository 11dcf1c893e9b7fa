"""compare_runs: final scores, values and shares of several runs, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas
import torch
from pandas import DataFrame

from flsv.payment.html import Table, bar_cells, write_page
from flsv.results.basis import Basis, preferred_basis
from flsv.results.reading import Run, open_run
from flsv.results.text import MESSAGES, format_number, shares_in, titled, with_intervals
from flsv.utilities.csv_files import save_table
from flsv.values.over_seeds import mean_with_interval

#: What is compared, and the client whose value or share it is.
Row = tuple[str, str]


def compare_runs(paths: Sequence[str | Path]) -> DataFrame:
    """Compare the final scores, values and shares of runs.

    Args:
        paths: the folders of runs or of ``flsv repeat``. Of a run that was retrained, the retraining is compared.

    Returns:
        A table with a row for each score, value or share (the columns ``what`` and ``client``) and each run. ``mean``
        is over the run's seeds. ``value`` is the mean difference from the first run over the seeds that both have,
        and ``low`` and ``high`` are the ends of its 90 % interval. A difference is NaN without a common seed, and an
        interval with fewer than two.

    Raises:
        ConfigurationError: a folder has no run.
    """
    by_run = {}
    for path in paths:
        by_run[str(path)] = _by_seed(open_run(path))
    numbers = pandas.concat(by_run, axis=1)
    # What only a later run has is beside its like.
    numbers = numbers.loc[numbers.index.unique("what")]

    first_run = numbers[str(paths[0])]
    tables = []
    for run in by_run:
        columns = _columns_of_run(numbers[run], first_run).reset_index()
        columns.insert(len(numbers.index.names), "run", run)
        tables.append(columns)
    # The runs' rows for the same number follow each other.
    return pandas.concat(tables).sort_index(kind="stable").reset_index(drop=True)


def _columns_of_run(
    numbers: DataFrame,
    numbers_of_first_run: DataFrame,
) -> DataFrame:
    differences = numbers - numbers_of_first_run  # a column for each seed
    seeds_and_rows = torch.tensor(differences.to_numpy().T)
    estimates = mean_with_interval(seeds_and_rows)
    columns = {
        "mean": numbers.mean(axis=1),
        **estimates.columns(),
    }
    return DataFrame(columns, index=numbers.index)


def _by_seed(run: Run) -> DataFrame:
    """Return a run's final scores, and its clients' values and shares, with a column for each seed."""
    if run.retrained is not None:
        return _by_seed(run.retrained)

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
        "mean": list(map(format_number, comparison["mean"])),
        "minus the first run": [with_intervals(row, " to ")[0] for row in rows],
    }


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
        front=[table, MESSAGES["compare"]],
        verdict=None,
    )
    differences = comparison.rename(columns={"value": "difference"})
    save_table(page.with_suffix(".csv"), differences)
