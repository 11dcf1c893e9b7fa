"""What the benchmark says of every metric: the columns of its tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from flsv.benchmark.federation import SETS, Federation
from flsv.benchmark.registry import Entry
from flsv.benchmark.run import AGGREGATORS, run
from flsv.benchmark.scores import (
    NAN,
    Interval,
    Results,
    add_rows,
    auroc,
    mean,
    pearson,
    read_rows,
    share_error,
    shares,
    spearman,
)
from flsv.benchmark.truth import Truth
from flsv.csv_files import Cell, number_or_nan

Known = Mapping[str, tuple[Federation, Truth]]
#: Of costs.csv, and how they are read.
COST_COLUMNS: dict[str, Cell] = {
    "metric": str, "seconds": number_or_nan, "evaluations": number_or_nan, "training": number_or_nan, "identity": str
}  # fmt: skip
#: Of how many cases a 90 % interval ought to hold the truth.
GOAL = 0.85


@dataclass(frozen=True)
class Cost:
    """The cost of a metric that runs alone.

    Args:
        seconds: of the processor a round, what it asks for included.
        evaluations: models that it asks to have evaluated, a round.
        training: seconds of a round without it.
    """

    seconds: float
    evaluations: float
    training: float


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
        runs = results.runs(name, metric)
        for seed, values in runs.items():
            interval = results.intervals.get((name, "base", seed, metric))
            if interval is None:
                continue
            others = [other for at, other in runs.items() if at != seed]
            if others:
                seeds += _held(interval, torch.stack(others).mean(0))
            ends = as_shares(values, interval)
            if ends is not None:
                truth.setdefault(name, []).extend(_held(ends, shares(true.mean)))
                halves = (ends[1] - ends[0]) / 2
                widths += halves[halves == halves].tolist()
        single = mean(share_error(values, true.mean) for values in runs.values())
        if len(runs) > 1 and single > 0:
            ratios.append(share_error(torch.stack(list(runs.values())).mean(0), true.mean) / single)
    cases = [each for some in truth.values() for each in some]
    if not cases and not seeds:
        return None
    by_federation = {name: mean(some) for name, some in truth.items() if some}
    return Coverage(mean(cases), by_federation, mean(seeds), mean(widths), mean(ratios), len(cases))


def _held(interval: Interval, value: Tensor) -> list[bool]:
    """Of the clients that have an interval, whether it holds their value."""
    low, high = interval
    known = (low == low) & (high == high)
    # An end may be the value itself, where nothing has varied: rounding does not put it outside.
    slack = 1e-6 * value.abs()
    return ((low - slack <= value) & (value <= high + slack))[known].tolist()


@dataclass(frozen=True)
class Summary:
    """Scores of a metric over federations and seeds; NaN where nothing was measured.

    Args:
        spearman: federation to mean rank correlation with the truth, over seeds.
        sets: set of federations to the mean over them of that; NaN where nothing of a set was measured.
        interval: half the width of the 90 % interval of the mean over all federations, over the seeds of the runs.
        pearson: mean correlation.
        error: mean error of shares, see :func:`flsv.benchmark.scores.share_error`.
        auroc: kind of badness to the mean chance that a bad client is below another.
        seeds: mean rank correlation of the values of two seeds.
        aggregators: mean rank correlation of the values under FedAvg and under another aggregator.
        partial: what the rank correlation with the truth changes by where clients are absent.
        dropout: where the best client leaves.
        private: where updates get noise.
        refused: federation to why there is no value.
        intervals: what its own 90 % intervals hold; None where it has none.
    """

    spearman: dict[str, float]
    sets: dict[str, float]
    interval: float
    pearson: float
    error: float
    auroc: dict[str, float]
    seeds: float
    aggregators: float
    partial: float
    dropout: float
    private: float
    refused: dict[str, str]
    intervals: Coverage | None = None

    @property
    def worst(self) -> tuple[str, float]:
        """The federation of the least rank correlation, and it."""
        return min(self.spearman.items(), key=lambda item: item[1], default=("", NAN))

    @property
    def mean(self) -> float:
        """Mean rank correlation over all federations."""
        return mean(self.spearman.values())


def summarize(results: Results, federations: Known, metric: str) -> Summary:
    """What is known of a metric.

    Args:
        results: values.
        federations: by name, each with its truth.
        metric: its name.
    """
    kinds = {kind for each, _ in federations.values() for kind in each.bad}
    scores = {name: _over_seeds(results, name, metric, truth, spearman) for name, (_, truth) in federations.items()}
    scores = {name: each for name, each in scores.items() if each}
    means = {name: mean(each.values()) for name, each in scores.items()}

    def change(condition: str) -> float:
        changes = []
        for name, (_, truth) in federations.items():
            values = results.values.get((name, condition, 0, metric))
            if values is not None and 0 in scores.get(name, {}):
                changes.append(spearman(values, truth.mean) - scores[name][0])
        return mean(changes)

    return Summary(
        spearman=means,
        sets={each: mean(v for name, v in means.items() if federations[name][0].set == each) for each in SETS},
        interval=_interval(scores),
        pearson=mean(mean(_over_seeds(results, n, metric, t, pearson).values()) for n, (_, t) in federations.items()),
        error=mean(mean(_over_seeds(results, n, metric, t, share_error).values()) for n, (_, t) in federations.items()),
        auroc={kind: _auroc(results, federations, metric, kind) for kind in sorted(kinds)},
        seeds=mean(_between_seeds(results, name, metric) for name in federations),
        aggregators=mean(_between_aggregators(results, name, metric) for name in federations),
        partial=change("partial"),
        dropout=change("dropout"),
        private=change("private"),
        refused={key[0]: why for key, why in results.refused.items() if key[3] == metric and key[1] == "base"},
        intervals=coverage(results, federations, metric),
    )


def costs(
    federation: Federation, entries: Mapping[str, Entry], path: Path | None = None, say: Callable[[str], None] = print
) -> dict[str, Cost]:
    """What every metric costs alone, in one federation; kept in a CSV file, and taken from there for the same metric
    and federation.

    A metric of the data is worked out once: its time is divided by the rounds. Of one with a clients' side it is what
    the fit takes longer.
    """
    own = {name: f"{each.identity()} {federation.identity.key}" for name, each in entries.items()}
    known = {} if path is None else {row: cost for row, (cost, by) in kept_costs(path).items() if by == own.get(row)}
    for name, each in entries.items():
        if name in known:
            continue
        found = run(federation, {name: each}, seed=0)
        if name in found.refused or name in found.failed:
            continue
        seconds, rounds = found.seconds.get(name, NAN), federation.rounds
        if each.client_algorithm is not None:  # what clients do for it is in the training
            seconds = max(seconds, found.fit - run(federation, {}, seed=0).fit)
        training = max(found.fit - found.seconds.get(name, 0.0), 0.0) if found.fit else 0.0
        known[name] = Cost(seconds / rounds, found.evaluations.get(name, 0) / rounds, training / rounds)
        say(f"{name}: {1000 * known[name].seconds:.1f} ms a round")
        if path is not None:
            numbers = (f"{number:.6g}" for number in astuple(known[name]))
            add_rows(path, COST_COLUMNS, [[name, *numbers, own[name]]])
    return known


def kept_costs(path: Path) -> dict[str, tuple[Cost, str]]:
    """What a file says of each metric's cost, and the identity of that metric."""
    rows = read_rows(path, COST_COLUMNS)
    return {
        row.pop("metric"): (Cost(row["seconds"], row["evaluations"], row["training"]), row["identity"]) for row in rows
    }


def _over_seeds(
    results: Results, federation: str, metric: str, truth: Truth, score: Callable[..., float]
) -> dict[int, float]:
    return {seed: score(values, truth.mean) for seed, values in results.runs(federation, metric).items()}


def _between_seeds(results: Results, federation: str, metric: str) -> float:
    return mean(spearman(a, b) for a, b in combinations(results.runs(federation, metric).values(), 2))


def _between_aggregators(results: Results, federation: str, metric: str) -> float:
    base = results.values.get((federation, "base", 0, metric))
    others = [results.values.get((federation, each, 0, metric)) for each in AGGREGATORS]
    return NAN if base is None else mean(spearman(base, each) for each in others if each is not None)


def _auroc(results: Results, federations: Known, metric: str, kind: str) -> float:
    found = []
    for name, (federation, _) in federations.items():
        if kind in federation.bad:
            bad = federation.badness()[kind]
            found += [auroc(values, bad) for values in results.runs(name, metric).values()]
    return mean(found)


def _interval(scores: Mapping[str, Mapping[int, float]], level: float = 0.9) -> float:
    """Of the mean over federations, from the spread over seeds within each: half the width by Student's t. One of a
    single seed is taken to spread as the others do; NaN where all are."""
    runs = [list(each.values()) for each in scores.values()]
    spreads = [float(np.var(each, ddof=1)) for each in runs if len(each) > 1]
    if not spreads:
        return NAN
    usual, freedom = float(np.mean(spreads)), sum(len(each) - 1 for each in runs)
    variances = [(float(np.var(each, ddof=1)) if len(each) > 1 else usual) / len(each) for each in runs]
    return float(stats.t.ppf((1 + level) / 2, freedom) * sum(variances) ** 0.5 / len(runs))
