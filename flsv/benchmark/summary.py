"""Summary of the benchmark: tables of the metrics' scores and costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pandas
from pandas import DataFrame, Series
from scipy import stats
from torch import Tensor

from flsv.benchmark.federation import SETS, Federation
from flsv.benchmark.registry import Entry
from flsv.benchmark.run import run_metrics
from flsv.benchmark.scores import (
    NAN,
    BenchResults,
    Interval,
    auroc,
    share_error,
    shares,
    spearman,
)
from flsv.benchmark.truth import Truth
from flsv.utilities.csv_files import Cell, number_or_nan
from flsv.utilities.result_file import ResultFile

Known = Mapping[str, tuple[Federation, Truth]]
#: Columns of costs.csv, and the function that reads the cells of each.
COST_COLUMNS: dict[str, Cell] = {
    "metric": str, "seconds": number_or_nan, "evaluations": number_or_nan, "training": number_or_nan, "identity": str
}  # fmt: skip
#: Columns of benchmark.csv, see :func:`by_set`.
BY_SET = [
    *("set", "metric", "rank_correlation", "interval", "of_ceiling", "lead", "lead_interval", "worst", "where"),
    *("misallocated", "interval_covers", "federations", "ms_a_round"),
]


@dataclass(frozen=True)
class Cost:
    """Cost of a metric, measured in a fit with this metric alone.

    Args:
        seconds: processor time of the metric per round in seconds, including evaluations.
        evaluations: number of models evaluated per round.
        training: processor time of the rest of the fit per round in seconds.
    """

    seconds: float
    evaluations: float
    training: float


def as_shares(values: Tensor, interval: Interval) -> Interval | None:
    """Convert intervals of clients' values to intervals of their shares; return None if no value is above 0.

    The ends are divided by the sum of the values above 0, as in :func:`flsv.benchmark.scores.shares`; the error of this
    sum is not included.

    Args:
        values: the clients' values, ``[n]``.
        interval: the lower and the upper ends of the values' intervals, ``[n]`` each.

    Example:
        >>> import torch
        >>> as_shares(torch.tensor([3.0, 1.0, -1.0]), (torch.tensor([2.0, 0.0, -3.0]), torch.tensor([4.0, 2.0, 1.0])))
        (tensor([ 0.5000,  0.0000, -0.7500]), tensor([1.0000, 0.5000, 0.2500]))
    """
    total = values.nan_to_num(0, 0, 0).clamp(min=0).sum()
    return (interval[0] / total, interval[1] / total) if total > 0 else None


def covered(results: BenchResults, federations: Known, metric: str) -> float:
    """Compute the fraction of clients, over all runs, whose true share is in the metric's 90 % interval of their share.

    It is NaN for a metric without intervals.

    Args:
        results: values and intervals of all runs.
        federations: ``{name: (federation, its ground truth)}``.
        metric: name of the metric.
    """
    held: list[bool] = []
    for name, (_, truth) in federations.items():
        for seed, values in results.runs(name, metric).items():
            interval = results.intervals.get((name, seed, metric))
            ends = None if interval is None else as_shares(values, interval)
            if ends is not None:
                held += _held(ends, shares(truth.mean))
    return float(np.mean(held)) if held else NAN


def _held(interval: Interval, value: Tensor) -> list[bool]:
    """Return a list of bools, one for each client that has an interval: whether its interval (low and high ends
    ``[n]``) contains its ``value [n]``."""
    low, high = interval
    known = (low == low) & (high == high)
    # An end equals the value if nothing has varied: rounding must not exclude the value.
    slack = 1e-6 * value.abs()
    return ((low - slack <= value) & (value <= high + slack))[known].tolist()


def summarize(results: BenchResults, federations: Known, metrics: Iterable[str]) -> DataFrame:
    """Summarize the metrics' scores: a table with one row per metric, the best first; NaN for missing scores.

    The columns are: one per set of federations, named after it, with the mean rank correlation with the truth over the
    federations of the set; ``all``, the mean over all federations; ``interval``, half the width of the 90 % interval of
    ``all``, over the seeds of the runs; ``worst``, the lowest rank correlation in a federation, and ``where``, the name
    of this federation; ``error``, see
    :func:`flsv.benchmark.share_error`; ``auroc <kind>``, the probability that a client with this kind of badness has a
    lower value than a good client; ``seeds``, the mean rank correlation between the values of two seeds; and
    ``federations``, the number of federations in which the metric has values.

    Args:
        results: values of all runs.
        federations: ``{name: (federation, its ground truth)}``.
        metrics: names of the metrics.
    """
    scores = scores_of(results, federations)
    ranks = by_federation(scores)
    means = scores.groupby(["metric", "federation"])[["spearman", "error"]].mean().groupby("metric").mean()
    sets = Series({name: each.set for name, (each, _) in federations.items()})
    table = ranks.T.groupby(sets).mean().T.reindex(columns=SETS)
    table = table.assign(all=means["spearman"], error=means["error"])
    table["worst"], table["where"] = ranks.min(axis=1), ranks.idxmin(axis=1)
    table["federations"] = ranks.notna().sum(axis=1)
    kinds = [name for name in scores if name.startswith("auroc ")]
    table[kinds] = scores.groupby("metric")[kinds].mean()
    for metric in table.index:
        table.loc[metric, "interval"] = _interval(scores[scores["metric"] == metric])
        table.loc[metric, "seeds"] = Series(_between_seeds(results, name, metric) for name in federations).mean()
    table = table.reindex([*metrics]).fillna({"where": "", "federations": 0})
    return table.sort_values("all", ascending=False, kind="stable")


def by_set(results: BenchResults, federations: Known, metrics: Iterable[str], costs: Mapping[str, Cost]) -> DataFrame:
    """Summarize the metrics' scores by set of federations: a table with one row per set and metric, the best first.

    The columns are: ``rank_correlation`` with the truth; ``interval``, half the width of its 90 % interval over the
    runs' seeds; ``of_ceiling``, the rank correlation divided by the mean of :attr:`flsv.benchmark.Truth.ceiling`;
    ``lead``, the mean difference to the rank correlation of the metric in the next row, over the federations in which
    both have values; ``lead_interval``, half the width of the lead's 90 % interval over these federations; ``worst``
    and ``where``, see :func:`summarize`; ``misallocated``, the share of a payment that goes to the wrong clients;
    ``interval_covers``, see :func:`covered`; ``federations``, the number of federations with values; ``ms_a_round``,
    the metric's processor time per round in milliseconds; and ``auroc <kind>``, see :func:`summarize`.

    Args:
        results: values of all runs.
        federations: ``{name: (federation, its ground truth)}``.
        metrics: names of the metrics.
        costs: ``{metric: cost}``, the result of :func:`costs`.
    """
    names, parts = [*metrics], []
    for which in SETS:
        some = {name: each for name, each in federations.items() if each[0].set == which}
        if not some:
            continue
        table, ranks = summarize(results, some, names), by_federation(scores_of(results, some))
        table["interval_covers"] = [covered(results, some, metric) for metric in table.index]
        table = table.assign(
            set=which, of_ceiling=table["all"] / Series(truth.ceiling for _, truth in some.values()).mean()
        )
        for metric, following in pairwise(table.index[table["federations"] > 0]):
            lead = (ranks.loc[metric] - ranks.loc[following]).dropna()
            table.loc[metric, "lead"] = lead.mean()
            table.loc[metric, "lead_interval"] = stats.t.ppf(0.95, len(lead) - 1) * lead.sem()
        parts.append(table)
    table = pandas.concat(parts).rename(columns={"all": "rank_correlation", "error": "misallocated"})
    table["ms_a_round"] = [1000 * costs[name].seconds if name in costs else NAN for name in table.index]
    kinds = [name for name in table if name.startswith("auroc ")]
    return table.rename_axis("metric").reset_index().reindex(columns=[*BY_SET, *kinds])


def two_digits(value: float) -> str:
    """Format a number with two decimals; empty for NaN."""
    return "" if value != value else f"{value:.2f}"


def scores_of(results: BenchResults, federations: Known) -> DataFrame:
    """Compare each run of a metric with the truth: a table with one row per run and one column per score.

    Args:
        results: values of all runs.
        federations: ``{name: (federation, its ground truth)}``.

    Returns:
        A table with the columns ``federation``, ``seed``, ``metric``, ``spearman``, ``error`` and, for
        each kind of bad clients, ``auroc <kind>``.
    """
    kinds = sorted({kind for each, _ in federations.values() for kind in each.bad})
    rows = []
    for (name, seed, metric), values in results.values.items():
        if name not in federations:
            continue
        federation, truth = federations[name]
        row = {"federation": name, "seed": seed, "metric": metric}
        row |= {"spearman": spearman(values, truth.mean), "error": share_error(values, truth.mean)}
        rows.append(row | {f"auroc {kind}": auroc(values, bad) for kind, bad in federation.badness().items()})
    head = ["federation", "seed", "metric", "spearman", "error"]
    return DataFrame(rows, columns=[*head, *(f"auroc {kind}" for kind in kinds)])


def by_federation(scores: DataFrame) -> DataFrame:
    """Average the rank correlations in ``scores``, the table of :func:`scores_of`, over the seeds. Return a table with
    one row per metric and one column per federation."""
    return scores.pivot_table("spearman", "metric", "federation")


def costs(
    federation: Federation, entries: Mapping[str, Entry], path: Path | None = None, say: Callable[[str], None] = print
) -> dict[str, Cost]:
    """Measure the cost of every metric per round, in a fit with this metric alone.

    The cost is the time that the metric itself takes. For a metric that is computed once from the data, this time is
    divided by the number of rounds. For a metric with a client algorithm, the cost is the time by which a round takes
    longer than a round of a fit without metrics.

    Args:
        federation: the federation in which costs are measured.
        entries: ``{name: entry}`` of the metrics.
        path: CSV file in which costs are stored, so that they are not measured again; None to store nothing.
        say: function that is called with a message for each metric.

    Returns:
        ``{metric: cost}``; metrics that fail are left out.
    """
    own = {name: f"{each.identity()} {federation.identity.key}" for name, each in entries.items()}
    kept = None if path is None else ResultFile(path, COST_COLUMNS)
    rows = [] if kept is None else [row for row in kept.rows if row["identity"] == own.get(row["metric"])]
    known = {row["metric"]: Cost(row["seconds"], row["evaluations"], row["training"]) for row in rows}
    for name, each in entries.items():
        if name in known:
            continue
        found = run_metrics(federation, {name: each}, seed=0)
        if name in found.refused or name in found.failed:
            continue
        seconds, rounds = found.seconds.get(name, NAN), federation.rounds
        if each.client_algorithm is not None:  # the metric's cost at the clients is part of the training
            seconds = max(seconds, found.fit - run_metrics(federation, {}, seed=0).fit)
        training = max(found.fit - found.seconds.get(name, 0.0), 0.0) if found.fit else 0.0
        known[name] = Cost(seconds / rounds, found.evaluations.get(name, 0) / rounds, training / rounds)
        say(f"{name}: {1000 * known[name].seconds:.1f} ms a round")
        if kept is not None:
            kept.add([[name, *(f"{number:.6g}" for number in astuple(known[name])), own[name]]])
    return known


def _between_seeds(results: BenchResults, federation: str, metric: str) -> float:
    return Series([spearman(*pair) for pair in combinations(results.runs(federation, metric).values(), 2)]).mean()


def _interval(runs: DataFrame, level: float = 0.9) -> float:
    """Compute half the width of the t-interval of a metric's mean rank correlation over federations.

    It follows from the variance over seeds within each federation. A federation with a single seed gets the mean
    variance of the others; the result is NaN if all federations have one seed.

    Args:
        runs: the metric's rows of :func:`scores_of`.
        level: coverage of the interval.
    """
    scores = runs.groupby("federation")["spearman"]
    counts, spreads = scores.count(), scores.var()
    if spreads.isna().all():
        return NAN
    variances = spreads.fillna(spreads.mean()) / counts
    freedom = int((counts - 1).sum())
    return float(stats.t.ppf((1 + level) / 2, freedom) * variances.sum() ** 0.5 / len(counts))
