"""compare_runs: final scores, values and shares of several runs, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas
import torch
from pandas import DataFrame

from flsv.payment.html import Table, bar_cells, write_page
from flsv.results.basis import preferred_basis
from flsv.results.reading import Run, open_run
from flsv.results.text import MESSAGES, format_number, shares_in, titled, with_intervals
from flsv.utilities.csv_files import save_table
from flsv.values.over_seeds import mean_with_interval


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
    by_run = {str(path): _by_seed(open_run(path)) for path in paths}
    first_run, *_ = by_run
    numbers = pandas.concat(by_run, axis=1)
    names = numbers.index.unique("what")
    numbers = numbers.loc[names]  # what only a later run has is beside its like

    columns_by_run = {}
    for run in by_run:
        differences = numbers[run] - numbers[first_run]
        estimates = mean_with_interval(torch.tensor(differences.to_numpy().T))
        columns = DataFrame(estimates._asdict(), index=numbers.index)
        columns.insert(0, "mean", numbers[run].mean(axis=1))
        columns_by_run[run] = columns
    comparison = pandas.concat(columns_by_run, axis=1, names=["run"])
    return comparison.stack("run", future_stack=True).reset_index()


def _by_seed(run: Run) -> DataFrame:
    """Return a run's final scores, and its clients' values and shares, with a column for each seed."""
    if run.retrained is not None:
        return _by_seed(run.retrained)

    basis = preferred_basis(run)
    by_seed: dict[object, dict[tuple[str, str], float]] = {}
    for seed_run in run.runs:
        numbers: dict[tuple[str, str], float] = {}
        for name, number in seed_run.record.get("logged", {}).items():
            numbers[f"last {name}", ""] = number
        for performance in seed_run.performances.values():
            numbers[titled(performance["by"]), ""] = performance["end"]
        if basis is not None:
            source = f"{basis.key} {basis.by}"  # a metric may measure another score in another run
            values = seed_run.final(basis.key)
            for name, value, share in zip(run.client_names, values, shares_in(values)):
                numbers[f"value by {source}", name] = value
                numbers[f"share by {source}", name] = share
        by_seed[seed_run.record["settings"].get("federation_seed")] = numbers
    return DataFrame(by_seed, dtype=float).rename_axis(["what", "client"])


def cells(comparison: DataFrame) -> dict[str, list[str]]:
    """Format the columns of :func:`compare_runs`, each row with decimals of its own."""
    rows = [comparison.loc[[row]] for row in comparison.index]
    return {
        **comparison[["client", "run"]].to_dict("list"),
        "mean": list(map(format_number, comparison["mean"])),
        "minus the first run": [with_intervals(row, " to ")[0] for row in rows],
    }


def write_comparison(comparison: DataFrame, page: Path) -> None:
    """Write a comparison as a page, with a picture of the differences, and as a table in a CSV file beside it."""
    bars = []
    for _, group in comparison.groupby("what", sort=False):
        bars += bar_cells(group)  # on a scale of its own
    columns = cells(comparison)
    rows = list(zip(comparison["what"], *columns.values(), bars))
    write_page(
        page,
        title="Runs side by side",
        subtitle="",
        heading="Differences",
        front=[Table(["", *columns, ""], rows), MESSAGES["compare"]],
        verdict=None,
        appendix={},
    )
    differences = comparison.rename(columns={"value": "difference"})
    save_table(page.with_suffix(".csv"), differences)
