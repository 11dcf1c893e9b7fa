"""Clients' values: kept as a file, and how near they are to the truth."""

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


def mean(values: Iterable[float]) -> float:
    """Of those that are known (not NaN); NaN of none.

    Example:
        >>> mean([1.0, NAN, 2.0])
        1.5
    """
    known = [value for value in values if value == value]
    return float(np.mean(known)) if known else NAN


def spearman(values: Tensor, truth: Tensor) -> float:
    """Rank correlation, ties at their mean rank; 0 where all values are equal, since they say nothing.

    Args:
        values: ``[n]``, what is judged. Clients without a value (NaN) are ranked last, together.
        truth: ``[n]``.

    Example:
        >>> round(spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.1, 0.2, 9.0])), 6)
        1.0
    """
    return pearson(_ranks(values), _ranks(truth))


def pearson(values: Tensor, truth: Tensor) -> float:
    """Correlation; 0 where all values are equal. Clients without a value count as the least of the others.

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
    """Half the sum of the differences of shares: how much of what is paid out goes to others than it ought to, 0 to 1.

    Shares are the values above 0, made to sum to 1; equal where nobody has one.

    Example:
        >>> share_error(torch.tensor([1.0, 1.0, -3.0]), torch.tensor([3.0, 1.0, 0.0]))
        0.25
    """
    return float((shares(values) - shares(truth)).abs().sum() / 2)


def shares(values: Tensor) -> Tensor:
    """Float64 ``[n]``: the values above 0, made to sum to 1; equal where nobody has one. NaN counts as 0.

    Example:
        >>> shares(torch.tensor([3.0, 1.0, -1.0]))
        tensor([0.7500, 0.2500, 0.0000], dtype=torch.float64)
    """
    positive = values.double().nan_to_num(0, 0, 0).clamp(min=0)
    total = positive.sum()
    return positive / total if total > 0 else torch.full_like(positive, 1 / len(positive))


def auroc(values: Tensor, bad: Tensor) -> float:
    """The chance that a bad client (bool ``[n]``) has a lower value than another; NaN without one of either.

    Example:
        >>> auroc(torch.tensor([0.5, 0.4, 0.1]), torch.tensor([False, False, True]))
        1.0
    """
    if bad.all() or not bad.any():
        return float("nan")
    # Ranks in [0, 1], which torchmetrics takes for probabilities: any other numbers it would pass through a sigmoid.
    score = 1 - _ranks(values) / len(values)
    return float(binary_auroc(score, bad.int()))


def _ranks(values: Tensor) -> Tensor:
    return torch.from_numpy(stats.rankdata(_filled(values).numpy()))


def _filled(values: Tensor) -> Tensor:
    """Float64, NaN as the least of the others."""
    values = values.detach().cpu().double()
    known = values[values.isfinite()]
    return values.where(values.isfinite(), known.min() if len(known) else torch.zeros((), dtype=torch.float64))


#: Of values.csv, and how they are read.
COLUMNS: dict[str, Cell] = {
    **{"federation": str, "seed": parse_int, "metric": str, "client": parse_int, "value": number_or_nan},
    **{"low": number_or_nan, "high": number_or_nan, "identity": str},
}
Interval = tuple[Tensor, Tensor]
Key = tuple[str, int, str]
"""Federation, seed, metric."""


@dataclass(eq=False)
class Values:
    """The result of a run.

    Args:
        values: metric to values ``[n]``.
        refused: metric to why it has none here.
        seconds: of the processor, for each metric's own updates, what it asked for included; only where it rode alone.
        evaluations: coalitions that each metric asked for.
        fit: the same for the whole fit.
        intervals: metric to the ends ``[n]`` of its own 90 % intervals, where it has any.
        failed: metric to the traceback of its error, which no configuration is to blame for.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    evaluations: dict[str, int] = field(default_factory=dict)
    fit: float = 0.0
    intervals: dict[str, Interval] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def blame(self, metric: str, error: Exception) -> None:
        """A metric has no value because of an error."""
        told = self.refused if isinstance(error, ConfigurationError) else self.failed
        told[metric] = why(error)

    def add(self, other: Values) -> None:
        """What another fit came to."""
        for name, found in vars(other).items():
            if name != "fit":
                getattr(self, name).update(found)
        self.fit += other.fit


def why(error: Exception) -> str:
    """What a user is told of an error: its text, where the configuration is to blame, else where it happened, too."""
    return str(error) if isinstance(error, ConfigurationError) else "".join(traceback.format_exception(error))


class Results:
    """Values of clients by federation, seed and metric, kept in ``values.csv`` of a folder.

    What is there already is not run again. Errors and refusals are not kept.

    Args:
        folder: of the file; None: nothing is kept.
        identity: of a federation's and a metric's name: what their values are of, see
            :func:`flsv.benchmark.registry.identity_of`. Others are left where they lie.

    Attributes:
        failed: the errors of this call.
        refused: why metrics have no value.
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
        """Seed to values, the seeds ascending."""
        found = {seed: each for (name, seed, of), each in self.values.items() if (name, of) == (federation, metric)}
        return dict(sorted(found.items()))

    def add(self, federation: str, seed: int, run: Values) -> None:
        """What one fit came to."""
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
