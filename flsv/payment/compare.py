"""compare_runs: final scores, values and shares of several runs, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas
import torch
from pandas import DataFrame

from flsv.payment.html import bar_cells, table_of_clients, write_page
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
    tables = [_by_seed(open_run(path)) for path in paths]
    rows = []
    for table in tables:
        rows += [row for row in table.index if row not in rows]

    first_table = tables[0].reindex(rows)
    parts = []
    for path, table in zip(paths, tables):
        part = _comparison_of_run(
            table.reindex(rows),
            first_table,
            run_name=str(path),
        )
        parts.append(part)
    comparison = pandas.concat(parts)
    comparison = comparison.sort_index(kind="stable")
    groups = [group for _, group in _by_what(comparison)]
    return pandas.concat(groups, ignore_index=True)


def _by_what(comparison: DataFrame) -> Any:
    return comparison.groupby("what", sort=False)


def _comparison_of_run(
    by_seed: DataFrame,
    first_run_by_seed: DataFrame,
    run_name: str,
) -> DataFrame:
    differences = by_seed - first_run_by_seed
    seeds_and_rows = torch.tensor(differences.to_numpy().T)
    estimates = mean_with_interval(seeds_and_rows)

    rows = by_seed.index.tolist()
    part = DataFrame(rows, columns=["what", "client"])
    part["run"] = run_name
    part["mean"] = by_seed.mean(axis=1).tolist()
    for name, numbers in estimates._asdict().items():
        part[name] = numbers.tolist()
    return part


def _by_seed(run: Run) -> DataFrame:
    """Return a run's final scores, and its clients' values and shares, with a column for each seed."""
    if run.retrained is not None:
        return _by_seed(run.retrained)

    basis = preferred_basis(run)
    columns = {}
    for seed_run in run.runs:
        numbers = _scores_of(seed_run)
        if basis is not None:
            numbers |= _values_of(seed_run, basis)
        settings = seed_run.record["settings"]
        seed = settings.get("federation_seed")
        columns[seed] = numbers
    return DataFrame(columns, dtype=float)


def _scores_of(run: Run) -> dict[Row, float]:
    scores = {}
    logged = run.record.get("logged", {})
    for name, number in logged.items():
        scores[f"last {name}", ""] = number
    for performance in run.performances.values():
        title = titled(performance["by"])
        scores[title, ""] = performance["end"]
    return scores


def _values_of(run: Run, basis: Basis) -> dict[Row, float]:
    numbers = {}
    source = f"{basis.key} {basis.by}"  # a metric may measure another score in another run
    values = run.final(basis.key)
    shares = shares_in(values)
    for client, name in enumerate(run.client_names):
        numbers[f"value by {source}", name] = values[client]
        numbers[f"share by {source}", name] = shares[client]
    return numbers


def cells(comparison: DataFrame) -> dict[str, list[str]]:
    """Format the columns of :func:`compare_runs`, each row with decimals of its own."""
    rows = [comparison.loc[[row]] for row in comparison.index]
    differences = [with_intervals(row, " to ")[0] for row in rows]
    return {
        "client": comparison["client"].tolist(),
        "run": comparison["run"].tolist(),
        "mean": list(map(format_number, comparison["mean"])),
        "minus the first run": differences,
    }


def write_comparison(comparison: DataFrame, page: Path) -> None:
    """Write a comparison as a page, with a picture of the differences, and as a table in a CSV file beside it."""
    columns: dict[str, Any] = dict(cells(comparison))
    columns[""] = []
    for _, group in _by_what(comparison):
        columns[""] += bar_cells(group)  # on a scale of its own
    table = table_of_clients(comparison["what"], columns)
    write_page(
        page,
        title="Runs side by side",
        subtitle="",
        heading="Differences",
        front=[table, MESSAGES["compare"]],
        verdict=None,
        appendix={},
    )
    differences = comparison.rename(columns={"value": "difference"})
    save_table(page.with_suffix(".csv"), differences)
