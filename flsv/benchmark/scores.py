"""Scores of clients' values against the truth, and storage of values in a file."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from flsv.utilities.csv_files import Cell, number_or_nan, parse_int
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.result_file import ResultFile

NAN = float("nan")


def nanmean(values: Iterable[float]) -> float:
    """Compute the mean of the values that are not NaN; NaN if there are none.

    Example:
        >>> nanmean([1.0, NAN, 2.0])
        1.5
    """
    known = [value for value in values if value == value]
    return float(np.mean(known)) if known else NAN


def spearman(values: Tensor, truth: Tensor) -> float:
    """Compute the rank correlation, ties at their mean rank; 0 where all values are equal, since they rank nobody.

    Args:
        values: ``[n]``, a metric's values. Clients without a value (NaN) share the last rank.
        truth: ``[n]``, the true values.

    Example:
        >>> round(spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.1, 0.2, 9.0])), 6)
        1.0
    """
    return pearson(_ranks(values), _ranks(truth))


def pearson(values: Tensor, truth: Tensor) -> float:
    """Compute the correlation; 0 where all values are equal. Clients without a value get the least of the others.

    Example:
        >>> round(pearson(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 4.0])), 3)
        0.982
    """
    centered = []
    for each in (_filled(values), _filled(truth)):
        deviation = each - each.mean()
        if deviation.norm() <= 1e-12 * each.norm():  # all equal, to rounding
            return 0.0
        centered.append(deviation / deviation.norm())
    return float((centered[0] @ centered[1]).clamp(-1, 1))


def share_error(values: Tensor, truth: Tensor) -> float:
    """Compute the part of a payment that goes to the wrong clients, 0 to 1: half the sum of the differences of shares.

    Shares are the values above 0, scaled to sum to 1; equal shares if no value is above 0.

    Example:
        >>> share_error(torch.tensor([1.0, 1.0, -3.0]), torch.tensor([3.0, 1.0, 0.0]))
        0.25
    """
    return float((shares(values) - shares(truth)).abs().sum() / 2)


def shares(values: Tensor) -> Tensor:
    """Compute shares, float64 ``[n]``: the values above 0, scaled to sum to 1; equal if none is. NaN counts as 0.

    Example:
        >>> shares(torch.tensor([3.0, 1.0, -1.0]))
        tensor([0.7500, 0.2500, 0.0000], dtype=torch.float64)
    """
    positive = values.double().nan_to_num(0, 0, 0).clamp(min=0)
    total = positive.sum()
    return positive / total if total > 0 else torch.full_like(positive, 1 / len(positive))


def auroc(values: Tensor, bad: Tensor) -> float:
    """Compute the probability that a bad client (bool ``[n]``) has a lower value than a good one; NaN without either.

    Example:
        >>> auroc(torch.tensor([0.5, 0.4, 0.1]), torch.tensor([False, False, True]))
        1.0
    """
    if bad.all() or not bad.any():
        return float("nan")
    # Ranks in [0, 1], which torchmetrics takes for probabilities; it passes other numbers through a sigmoid.
    score = 1 - _ranks(values) / len(values)
    return float(binary_auroc(score, bad.int()))


def _ranks(values: Tensor) -> Tensor:
    return torch.from_numpy(stats.rankdata(_filled(values).numpy()))


def _filled(values: Tensor) -> Tensor:
    """Convert to float64 and replace NaN by the least of the other values."""
    values = values.detach().cpu().double()
    known = values[values.isfinite()]
    return values.where(values.isfinite(), known.min() if len(known) else torch.zeros((), dtype=torch.float64))


#: Columns of values.csv, and how their cells are read.
COLUMNS: dict[str, Cell] = {
    **{"federation": str, "seed": parse_int, "metric": str, "client": parse_int, "value": number_or_nan},
    **{"low": number_or_nan, "high": number_or_nan, "identity": str},
}
Interval = tuple[Tensor, Tensor]
Key = tuple[str, int, str]
"""Name of the federation, seed, name of the metric."""


@dataclass(eq=False)
class Values:
    """Result of a run.

    Args:
        values: metric to values ``[n]``.
        refused: metric to the reason why it has no values in this federation.
        seconds: metric to processor seconds of its updates, evaluations included; only where it had a fit of its own.
        evaluations: metric to the number of coalitions that it evaluated.
        fit: processor seconds of the whole fit.
        intervals: metric to the ends ``[n]`` of its own 90 % intervals, where it has any.
        failed: metric to the traceback of an error that is not the configuration's.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    evaluations: dict[str, int] = field(default_factory=dict)
    fit: float = 0.0
    intervals: dict[str, Interval] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def record_error(self, metric: str, error: Exception) -> None:
        """Record that a metric has no value because of an error."""
        errors = self.refused if isinstance(error, ConfigurationError) else self.failed
        errors[metric] = error_text(error)

    def add(self, other: Values) -> None:
        """Add the result of another fit."""
        for name, found in vars(other).items():
            if name != "fit":
                getattr(self, name).update(found)
        self.fit += other.fit


def error_text(error: Exception) -> str:
    """Format an error for the user: the text of a ``ConfigurationError``, the traceback of any other."""
    return str(error) if isinstance(error, ConfigurationError) else "".join(traceback.format_exception(error))


class BenchResults:
    """Values of clients by federation, seed and metric, stored in ``values.csv`` of a folder.

    Stored values are not run again. Errors and refusals are not stored.

    Args:
        folder: folder of the file; None: nothing is stored.
        identity: maps the names of a federation and a metric to the identity of their values, see
            :func:`flsv.benchmark.registry.identity_of`. Rows of other identities are ignored.

    Attributes:
        failed: the tracebacks of this call's errors.
        refused: the reasons why metrics have no value.
    """

    def __init__(
        self, folder: Path | None, identity: Callable[[str, str], str] = lambda federation, metric: ""
    ) -> None:
        self._identity = identity
        self.failed: dict[Key, str] = {}
        self.values: dict[Key, Tensor] = {}
        self.intervals: dict[Key, Interval] = {}
        self.refused: dict[Key, str] = {}
        self._kept = None if folder is None else ResultFile(folder / "values.csv", COLUMNS, key=3)
        rows: dict[Key, list[tuple[float, ...]]] = {}
        for row in self._kept.rows if self._kept is not None else ():
            key = (row["federation"], row["seed"], row["metric"])
            if row["identity"] == identity(row["federation"], row["metric"]):
                rows.setdefault(key, []).append((row["value"], row["low"], row["high"]))
        for key, found in rows.items():
            self.values[key], low, high = torch.tensor(found, dtype=torch.float64).T.contiguous()
            if (low == low).any():
                self.intervals[key] = low, high

    def runs(self, federation: str, metric: str) -> dict[int, Tensor]:
        """Return a metric's values in a federation by seed, the seeds ascending."""
        found = {seed: each for (name, seed, of), each in self.values.items() if (name, of) == (federation, metric)}
        return dict(sorted(found.items()))

    def add(self, federation: str, seed: int, run: Values) -> None:
        """Add and store the result of one run."""
        rows: list[list[Any]] = []
        self.failed |= {(federation, seed, name): why for name, why in run.failed.items()}
        self.refused |= {(federation, seed, name): why for name, why in run.refused.items()}
        for name, values in run.values.items():
            key = (federation, seed, name)
            self.values[key] = values.double()
            none = torch.full_like(values, NAN)
            low, high = run.intervals.get(name, (none, none))
            if name in run.intervals:
                self.intervals[key] = low.double(), high.double()
            for client, cells in enumerate(torch.stack([values, low, high], 1).tolist()):
                texts = ["" if cell != cell else f"{cell:.8g}" for cell in cells]
                rows.append([*key, client, *texts, self._identity(federation, name)])
        if self._kept is not None:
            self._kept.add(rows)
