"""The runs of ``flsv repeat``: the same federation with other seeds, and each client's mean over them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flsv.errors import ConfigurationError
from flsv.functional.over_rounds import half_width
from flsv.metrics.intervals import LEVEL
from flsv.report.folder import CONTRIBUTIONS
from flsv.report.reading import NAN, Run, open_run

HEADER = ("metric", "client", "client_name", "runs", "mean", "std", "low", "high", "share")
#: In the folder of the runs: the means, and the identity of what was run.
SUMMARY, ASKED = "repeat.csv", "repeat.json"


def summary(runs: Sequence[Run], level: float = LEVEL) -> list[dict[str, Any]]:
    """A row per metric and client, by the names in :data:`HEADER`; what is not known is NaN. Who is held in one run
    is in all: the clients are the same, with the same data."""
    rows: list[dict[str, Any]] = []
    for metric in runs[0].metrics:
        known = [[value for value in values if value == value] for values in zip(*finals(runs, metric))]
        means = [statistics.fmean(values) if values else NAN for values in known]
        total = sum(max(mean, 0.0) for mean in means if mean == mean)
        for client, (values, mean) in enumerate(zip(known, means)):
            count = len(values)
            spread = statistics.stdev(values) if count > 1 else NAN
            half = mean_half_width(spread, count, level)
            share = max(mean, 0.0) / total if total > 0 else NAN
            cells = (metric, client, runs[0].client_names[client], count)
            rows.append(dict(zip(HEADER, (*cells, mean, spread, mean - half, mean + half, share))))
    return rows


def finals(runs: Sequence[Run], metric: str) -> list[list[float]]:
    """``[runs][n]``: each client's last value in each run; NaN for whoever is held in one of them."""
    held = {client for run in runs for client in run.held}
    return [[NAN if i in held else value for i, value in enumerate(run.final(metric))] for run in runs]


def mean_half_width(spread: float, count: int, level: float = LEVEL) -> float:
    """Half the interval of a mean of ``count`` values with this standard deviation, by Student's t; NaN of one.

    Example:
        >>> round(mean_half_width(1.0, 4), 3)
        1.177
    """
    if count < 2:
        return NAN
    return float(half_width(torch.tensor(spread**2 / count, dtype=torch.float64), torch.tensor(count - 1.0), level))


def done_run(folder: Path) -> Run | None:
    """The run below a folder that has come to its end."""
    for path in sorted(folder.rglob(CONTRIBUTIONS)) if folder.is_dir() else []:
        run = open_run(path)
        if run.ended:
            return run
    return None


def repeated_runs(run: Run, folder: Path | None = None) -> list[Run]:
    """The runs of ``flsv repeat`` that are of the same federation and data as a run.

    Args:
        run: whose.
        folder: of ``flsv repeat``; None: the one that the run itself is in, if it is in one.

    Returns:
        Those that have come to their end; none where there is no folder.

    Raises:
        ConfigurationError: nothing of ``flsv repeat`` in the folder, or runs of other clients, data or settings.
    """
    place = folder or next((parent for parent in run.folder.resolve().parents if (parent / ASKED).is_file()), None)
    if place is None:
        return []
    found = [each for path in sorted(place.glob("seed_*")) if (each := done_run(path)) is not None]
    if len(found) < 2:
        raise ConfigurationError(f"{place} holds {len(found)} runs of flsv repeat: expected 2 or more.")
    for each in found:
        other = [name for name in ("clients", "hashes") if each.record.get(name) != run.record.get(name)]
        here, there = _settings(run), _settings(each)
        other += sorted(name for name in {**here, **there} if here.get(name) != there.get(name))
        if other:
            raise ConfigurationError(
                f"{each.folder} is not of the federation of {run.folder}: it has other {', '.join(other)}. Name the "
                "folder of flsv repeat with the same configuration and data."
            )
    return found


def _settings(run: Run) -> dict[str, Any]:
    """What makes it the run that it is, but for the aggregators, which may take turns."""
    return {name: text for name, text in run.record.get("fingerprint", {}).items() if name != "federation.aggregator"}


def means(runs: Sequence[Run], metric: str) -> tuple[list[float], list[float], list[float]]:
    """A metric's means over runs ``[n]``, and the low and high ends of their intervals."""
    rows = [row for row in summary(runs) if row["metric"] == metric]
    return tuple([row[name] for row in rows] for name in ("mean", "low", "high"))  # type: ignore[return-value]


def apart(runs: Sequence[Run], metric: str, first: int, second: int, level: float = LEVEL) -> bool:
    """Whether one client's value is above another's in runs with the same seed: the interval of the mean difference
    is above 0."""
    differences = [values[first] - values[second] for values in finals(runs, metric)]
    known = [value for value in differences if math.isfinite(value)]
    if len(known) < 2:
        return False
    return statistics.fmean(known) > mean_half_width(statistics.stdev(known), len(known), level)
