"""How often a metric's intervals cover the truth, and how often they cover the value of another run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flsv.benchmark.federation import Federation
from flsv.benchmark.run import Interval, Results
from flsv.benchmark.scores import share_error, shares
from flsv.benchmark.true_values import Truth

#: Of how many cases a 90 % interval ought to hold the truth.
GOAL = 0.85
NAN = float("nan")


@dataclass(frozen=True)
class Coverage:
    """How often a metric's 90 % intervals cover the truth and other runs. A case is a client in a run.

    Args:
        truth: share of the cases in which the interval holds the client's true share of the gain.
        by_federation: federation to that.
        seeds: share of the cases in which it holds the mean of the metric's values under the other seeds.
        width: mean half width, as a share.
        repeated: error of the shares of the seeds' mean, as a part of a single run's mean error.
        cases: how many the first number is of.
    """

    truth: float
    by_federation: dict[str, float]
    seeds: float
    width: float
    repeated: float
    cases: int


def as_shares(values: Tensor, interval: Interval) -> Interval | None:
    """Ends ``[n]`` of an interval of values as ends of shares: divided by the sum of the values above 0, as
    :func:`flsv.benchmark.scores.shares` does with the values; None where nobody has one.

    The sum's own error is not in it.

    Example:
        >>> as_shares(torch.tensor([3.0, 1.0, -1.0]), (torch.tensor([2.0, 0.0, -3.0]), torch.tensor([4.0, 2.0, 1.0])))
        (tensor([ 0.5000,  0.0000, -0.7500]), tensor([1.0000, 0.5000, 0.2500]))
    """
    total = values.nan_to_num(0, 0, 0).clamp(min=0).sum()
    return (interval[0] / total, interval[1] / total) if total > 0 else None


def coverage(results: Results, federations: Mapping[str, tuple[Federation, Truth]], metric: str) -> Coverage | None:
    """What a metric's intervals hold; None where it has none.

    Args:
        results: values and intervals.
        federations: by name, each with its truth.
        metric: its name.
    """
    truth: dict[str, list[bool]] = {}
    seeds: list[bool] = []
    widths: list[float] = []
    ratios: list[float] = []
    for name, (_, true) in federations.items():
        runs = {key[2]: values for key, values in results.values.items() if key[:2] + key[3:] == (name, "base", metric)}
        for seed, values in sorted(runs.items()):
            interval = results.intervals.get((name, "base", seed, metric))
            if interval is None:
                continue
            others = [other for at, other in runs.items() if at != seed]
            if others:
                seeds += _held(interval, torch.stack(others).mean(0))
            ends = as_shares(values, interval)
            if ends is not None:
                truth.setdefault(name, []).extend(_held(ends, shares(true.mean)))
                widths += [half for half in ((ends[1] - ends[0]) / 2).tolist() if half == half]
        if len(runs) > 1:
            single = _mean(share_error(values, true.mean) for values in runs.values())
            if single > 0:
                ratios.append(share_error(torch.stack(list(runs.values())).mean(0), true.mean) / single)
    cases = [each for some in truth.values() for each in some]
    if not cases and not seeds:
        return None
    by_federation = {name: _mean(some) for name, some in truth.items() if some}
    return Coverage(_mean(cases), by_federation, _mean(seeds), _mean(widths), _mean(ratios), len(cases))


def _held(interval: Interval, value: Tensor) -> list[bool]:
    """Of the clients that have an interval, whether it holds their value."""
    low, high = interval
    known = (low == low) & (high == high)
    # An end may be the value itself, where nothing has varied: rounding does not put it outside.
    slack = 1e-6 * value.abs()
    return ((low - slack <= value) & (value <= high + slack))[known].tolist()


def _mean(values: Iterable[float]) -> float:
    known = [float(value) for value in values if value == value]
    return sum(known) / len(known) if known else NAN
