"""The runs of ``flsv repeat``: the same federation with other seeds, and each client's mean over them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pandas import DataFrame

from flsv.csv_files import NAN, Cell, read_csv
from flsv.errors import ConfigurationError
from flsv.functional.over_rounds import half_width
from flsv.metrics.intervals import LEVEL
from flsv.report.reading import Run, open_run
from flsv.report.text import WORDS, mean, shares_in

HEADER = ("metric", "client", "client_name", "runs", "mean", "std", "low", "high", "share")
#: In the folder of the runs: the means, and which runs are done, see :class:`flsv.kept.Kept`.
SUMMARY, RUNS = "repeat.csv", "runs.csv"
#: Of the latter: what a run is called, and its folder.
COLUMNS: Mapping[str, Cell] = {"run": str, "folder": str}


@dataclass(frozen=True)
class RepeatedRun(Run):
    """One of several runs with other seeds: values, intervals and performances are the means over all; the values of
    its rounds are its own."""

    runs: Sequence[Run] = ()  # type: ignore[assignment]

    def final(self, metric: str, column: str = "") -> list[float]:
        return [mean(values) for values in zip(*(run.final(metric, column) for run in self.runs))]

    def ends(self, metric: str) -> tuple[list[float], list[float]]:
        rows = summary(self.runs, [metric])
        return rows["low"].tolist(), rows["high"].tolist()

    def kind(self, metric: str) -> str:
        return WORDS["seeds_interval"].format(len(self.runs))


def over_seeds(run: Run) -> Run:
    """A run with the means over all runs of ``flsv repeat`` among which it is; itself where it is alone.

    Raises:
        ConfigurationError: see :func:`repeated_runs`.
    """
    runs = [] if isinstance(run, RepeatedRun) else repeated_runs(run)
    if not runs:
        return run
    games = dict(run.record.get("paid_in", {}))
    for name, game in games.items():
        each = [one.record.get("paid_in", {}).get(name, {}) for one in runs]
        games[name] = game | {what: _mean_of_all([one.get(what) for one in each]) for what in ("start", "end", "sum")}
    logs = [one.record.get("logged", {}) for one in runs]
    logged = {name: _mean_of_all([log.get(name) for log in logs]) for name in logs[0]}
    return RepeatedRun(run.folder, {**run.record, "paid_in": games, "logged": logged}, run.table, runs)


def _mean_of_all(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def summary(runs: Sequence[Run], metrics: Iterable[str] | None = None) -> DataFrame:
    """A row per metric and client, by the names in :data:`HEADER`; what is not known is NaN."""
    rows = []
    for metric in runs[0].metrics if metrics is None else metrics:
        known = [[value for value in values if value == value] for values in zip(*(run.final(metric) for run in runs))]
        means = [mean(values) for values in known]
        for client, (values, middle, share) in enumerate(zip(known, means, shares_in(means))):
            spread = statistics.stdev(values) if len(values) > 1 else NAN
            half = mean_half_width(spread, len(values))
            name = runs[0].client_names[client]
            rows.append([metric, client, name, len(values), middle, spread, middle - half, middle + half, share])
    return DataFrame(rows, columns=[*HEADER])


def mean_half_width(spread: float, count: int, level: float = LEVEL) -> float:
    """Half the interval of a mean of ``count`` values with this standard deviation, by Student's t; NaN of one.

    Example:
        >>> round(mean_half_width(1.0, 4), 3)
        1.177
    """
    if count < 2:
        return NAN
    return float(half_width(torch.tensor(spread**2 / count, dtype=torch.float64), torch.tensor(count - 1.0), level))


def repeated_runs(run: Run) -> list[Run]:
    """The runs of ``flsv repeat`` among which a run is, those that are done; none where it is alone.

    Raises:
        ConfigurationError: they do not deal out the same data.
    """
    place = next((parent for parent in run.folder.resolve().parents if (parent / RUNS).is_file()), None)
    rows = [] if place is None else read_csv(place / RUNS, COLUMNS, skip=1)
    found = [open_run(Path(str(place), row["folder"])) for _, row in rows]
    for each in found:
        if each.record["hashes"] != run.record["hashes"]:
            raise ConfigurationError(
                f"{each.folder} does not deal out the data of {run.folder}, so there is no mean over seeds. Move the "
                "run out of its folder."
            )
    return found if len(found) > 1 else []
