"""Scores that compare clients' values with the ground truth, and the storage of values."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from benchmark.result_file import ResultFile
from flsv.utilities.csv_files import Cell, number_or_nan, parse_int
from flsv.utilities.errors import ConfigurationError

NAN = float("nan")


def spearman(values: Tensor, truth: Tensor) -> float:
    """Compute Spearman's rank correlation of two vectors ``[n]``, where NaN counts as the smallest.

    Example:
        >>> round(spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.1, 0.2, 9.0])), 6)
        1.0
    """
    values = _filled(values)
    truth = _filled(truth)
    for vector in (values, truth):
        if len(vector.unique()) < 2:
            return 0.0  # it is not defined if all numbers are equal
    return float(stats.spearmanr(values, truth).statistic)


def share_error(values: Tensor, truth: Tensor) -> float:
    """Compute the fraction of a payment that goes to the wrong clients.

    It is half the sum of the absolute differences between the shares by the metric and by the truth. A client's share
    is its value divided by the sum of the values above 0. Negative values count as 0, and all shares are equal if no
    value is above 0.

    Args:
        values: ``[n]``, the metric's values.
        truth: ``[n]``, the true values.

    Example:
        >>> share_error(torch.tensor([1.0, 1.0, -3.0]), torch.tensor([3.0, 1.0, 0.0]))
        0.25
    """
    differences = shares(values) - shares(truth)
    return float(differences.abs().sum() / 2)


def shares(values: Tensor) -> Tensor:
    """Convert values to shares of a payment, ``[n]``, where NaN and negative ones count as 0.

    Example:
        >>> shares(torch.tensor([3.0, 1.0, -1.0]))
        tensor([0.7500, 0.2500, 0.0000], dtype=torch.float64)
    """
    values = values.double()
    values = values.where(values.isfinite(), 0.0)
    positive = values.clamp(min=0)
    total = positive.sum()
    if total > 0:
        return positive / total
    return torch.full_like(positive, 1 / len(positive))


def _filled(values: Tensor) -> Tensor:
    """Convert values to float64, and replace NaN and infinity by the smallest finite value."""
    values = values.detach().cpu().double()
    is_finite = values.isfinite()
    if not is_finite.any():
        return torch.zeros_like(values)
    return values.where(is_finite, values[is_finite].min())


def parse_values(cell: str) -> list[float]:
    """Parse the numbers of a cell, of which some may be NaN."""
    return [number_or_nan(number) for number in cell.split()]


#: Columns of values.csv, and the function that reads the cells of each.
VALUE_COLUMNS: dict[str, Cell] = {
    "federation": str,
    "seed": parse_int,
    "metric": str,
    "values": parse_values,  # the clients' values, with a space between them
    "identity": str,
}
Key = tuple[str, int, str]
"""Key of a run's values: name of the federation, seed, name of the metric."""


@dataclass(eq=False)
class RunResults:
    """Results of metrics in one run of a federation."""

    #: `{metric: values}`, the clients' values `[n]`.
    values: dict[str, Tensor] = field(default_factory=dict)
    #: `{metric: reason}` for the metrics that cannot be used in this federation.
    refused: dict[str, str] = field(default_factory=dict)
    #: Processor time of the whole fit in seconds.
    fit_seconds: float = 0.0
    #: `{metric: traceback}` of errors other than a `ConfigurationError`.
    failed: dict[str, str] = field(default_factory=dict)

    def record_error(self, metric: str, error: Exception) -> None:
        """Record the error that prevented a metric from computing values."""
        if isinstance(error, ConfigurationError):
            self.refused[metric] = str(error)
        else:
            self.failed[metric] = "".join(traceback.format_exception(error))

    def add(self, results: RunResults) -> None:
        """Add the results of another fit."""
        self.values |= results.values
        self.refused |= results.refused
        self.failed |= results.failed
        self.fit_seconds += results.fit_seconds


class BenchResults:
    """Metrics' values by federation, seed and metric, stored in ``values.csv`` with a fingerprint of all settings."""

    def __init__(
        self,
        folder: Path,
        fingerprint_of: Callable[[str, str], str] = lambda federation, metric: "",
    ) -> None:
        self._fingerprint_of = fingerprint_of
        self.failed: dict[Key, str] = {}
        self.values: dict[Key, Tensor] = {}
        self.refused: dict[Key, str] = {}
        self._file = ResultFile(folder / "values.csv", VALUE_COLUMNS)
        for row in self._file.rows:
            federation = row["federation"]
            metric = row["metric"]
            if row["identity"] == fingerprint_of(federation, metric):
                values = torch.tensor(row["values"], dtype=torch.float64)
                self.values[federation, row["seed"], metric] = values

    def add(
        self,
        federation: str,
        seed: int,
        run: RunResults,
    ) -> None:
        """Add and store the results ``run`` of metrics in one run of a federation."""
        rows: list[list[Any]] = []
        for metric, reason in run.failed.items():
            self.failed[federation, seed, metric] = reason
        for metric, reason in run.refused.items():
            self.refused[federation, seed, metric] = reason
        for metric, values in run.values.items():
            key = (federation, seed, metric)
            self.values[key] = values.double()
            cell = " ".join(f"{value:.8g}" for value in values.tolist())
            rows.append([*key, cell, self._fingerprint_of(federation, metric)])
        self._file.add(rows)
