"""What the benchmark says of every metric: the columns of its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from itertools import combinations, pairwise
from pathlib import Path

import pandas
from pandas import DataFrame, Series
from scipy import stats
from torch import Tensor

from flsv.benchmark.federation import SETS, Federation
from flsv.benchmark.registry import Entry
from flsv.benchmark.run import run
from flsv.benchmark.scores import (
    NAN,
    Interval,
    Results,
    auroc,
    mean,
    pearson,
    share_error,
    shares,
    spearman,
)
from flsv.benchmark.truth import Truth
from flsv.utilities.csv_files import Cell, number_or_nan
from flsv.utilities.result_file import ResultFile

Known = Mapping[str, tuple[Federation, Truth]]
#: Of costs.csv, and how they are read.
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
    """The cost of a metric that runs alone.

    Args:
        seconds: of the processor a round, what it asks for included.
        evaluations: models that it asks to have evaluated, a round.
        training: seconds of a round without it.
    """

    seconds: float
    evaluations: float
    training: float


def as_shares(values: Tensor, interval: Interval) -> Interval | None:
    """Ends ``[n]`` of an interval of values as ends of shares: divided by the sum of the values above 0, as
    :func:`flsv.benchmark.scores.shares` does with the values; None where nobody has one.

    The sum's own error is not in it.

    Example:
        >>> import torch
        >>> as_shares(torch.tensor([3.0, 1.0, -1.0]), (torch.tensor([2.0, 0.0, -3.0]), torch.tensor([4.0, 2.0, 1.0])))
        (tensor([ 0.5000,  0.0000, -0.7500]), tensor([1.0000, 0.5000, 0.2500]))
    """
    total = values.nan_to_num(0, 0, 0).clamp(min=0).sum()
    return (interval[0] / total, interval[1] / total) if total > 0 else None


def covered(results: Results, federations: Known, metric: str) -> float:
    """In which part of the cases (clients in runs) a metric's 90 % intervals hold a client's true share; NaN without
    any."""
    held: list[bool] = []
    for name, (_, truth) in federations.items():
        for seed, values in results.runs(name, metric).items():
            interval = results.intervals.get((name, seed, metric))
            ends = None if interval is None else as_shares(values, interval)
            if ends is not None:
                held += _held(ends, shares(truth.mean))
    return mean(held)


def _held(interval: Interval, value: Tensor) -> list[bool]:
    """Whether the interval of each client that has one holds its value."""
    low, high = interval
    known = (low == low) & (high == high)
    # An end may be the value itself, where nothing has varied: rounding does not put it outside.
    slack = 1e-6 * value.abs()
    return ((low - slack <= value) & (value <= high + slack))[known].tolist()


def summarize(results: Results, federations: Known, metrics: Iterable[str]) -> DataFrame:
    """What is known of the metrics: a row each, the best first; NaN where nothing was measured.

    Columns: a set's name and ``all``, the mean rank correlation with the truth over the federations of the set and over
    all; ``interval``, half the width of the 90 % interval of the latter, over the seeds of the runs; ``worst`` and
    ``where``, the least of a federation; ``pearson``; ``error`` of shares, see :func:`flsv.benchmark.share_error`;
    ``auroc <kind>``, the chance that a client that is bad in this way is below another; ``seeds``, mean rank
    correlation of the values of two seeds; ``federations`` with a value.

    Args:
        results: values.
        federations: by name, each with its truth.
        metrics: their names.
    """
    scores = scores_of(results, federations)
    ranks = by_federation(scores)
    means = scores.groupby(["metric", "federation"])[["spearman", "pearson", "error"]].mean().groupby("metric").mean()
    sets = Series({name: each.set for name, (each, _) in federations.items()})
    table = ranks.T.groupby(sets).mean().T.reindex(columns=SETS)
    table = table.assign(all=means["spearman"], pearson=means["pearson"], error=means["error"])
    table["worst"], table["where"] = ranks.min(axis=1), ranks.idxmin(axis=1)
    table["federations"] = ranks.notna().sum(axis=1)
    kinds = [name for name in scores if name.startswith("auroc ")]
    table[kinds] = scores.groupby("metric")[kinds].mean()
    for metric in table.index:
        table.loc[metric, "interval"] = _interval(scores[scores["metric"] == metric])
        table.loc[metric, "seeds"] = mean(_between_seeds(results, name, metric) for name in federations)
    table = table.reindex([*metrics]).fillna({"where": "", "federations": 0})
    return table.sort_values("all", ascending=False, kind="stable")


def by_set(results: Results, federations: Known, metrics: Iterable[str], costs: Mapping[str, Cost]) -> DataFrame:
    """A row for each set and metric, the best first.

    Columns: ``rank_correlation`` with the truth, half its 90 % ``interval`` over the runs' seeds, and what part it is
    ``of_ceiling``; its ``lead`` over the metric of the next row, mean over the federations that both have a value in,
    and half the lead's 90 % interval over these (``lead_interval``); the ``worst`` federation's and ``where`` that is;
    the part of a payment that is ``misallocated``; in which part of the cases the metric's own 90 % ``interval_covers``
    the truth; the number of ``federations``; ``ms_a_round`` of the processor; and ``auroc <kind>``, see
    :func:`summarize`. Arguments as of :func:`summarize`, and :func:`costs`.
    """
    names, parts = [*metrics], []
    for which in SETS:
        some = {name: each for name, each in federations.items() if each[0].set == which}
        if not some:
            continue
        table, ranks = summarize(results, some, names), by_federation(scores_of(results, some))
        table["interval_covers"] = [covered(results, some, metric) for metric in table.index]
        table = table.assign(set=which, of_ceiling=table["all"] / mean(truth.ceiling for _, truth in some.values()))
        for metric, following in pairwise(table.index[table["federations"] > 0]):
            lead = (ranks.loc[metric] - ranks.loc[following]).dropna()
            table.loc[metric, "lead"] = lead.mean()
            table.loc[metric, "lead_interval"] = stats.t.ppf(0.95, len(lead) - 1) * lead.sem()
        parts.append(table)
    table = pandas.concat(parts).rename(columns={"all": "rank_correlation", "error": "misallocated"})
    table["ms_a_round"] = [1000 * costs[name].seconds if name in costs else NAN for name in table.index]
    kinds = [name for name in table if name.startswith("auroc ")]
    return table.rename_axis("metric").reset_index().reindex(columns=[*BY_SET, *kinds])


def two(value: float) -> str:
    """With two digits; nothing for what is not known."""
    return "" if value != value else f"{value:.2f}"


def scores_of(results: Results, federations: Known) -> DataFrame:
    """A row for each run of a metric: how near its values are to the truth, and ``auroc <kind>`` of who is bad."""
    kinds = sorted({kind for each, _ in federations.values() for kind in each.bad})
    rows = []
    for (name, seed, metric), values in results.values.items():
        if name not in federations:
            continue
        federation, truth = federations[name]
        row = {"federation": name, "seed": seed, "metric": metric}
        row |= {score.__name__: score(values, truth.mean) for score in (spearman, pearson)}
        row["error"] = share_error(values, truth.mean)
        rows.append(row | {f"auroc {kind}": auroc(values, bad) for kind, bad in federation.badness().items()})
    head = ["federation", "seed", "metric", "spearman", "pearson", "error"]
    return DataFrame(rows, columns=[*head, *(f"auroc {kind}" for kind in kinds)])


def by_federation(scores: DataFrame) -> DataFrame:
    """Mean rank correlation with the truth over the seeds: a row for each metric, a column for each federation."""
    return scores.pivot_table("spearman", "metric", "federation")


def costs(
    federation: Federation, entries: Mapping[str, Entry], path: Path | None = None, say: Callable[[str], None] = print
) -> dict[str, Cost]:
    """What every metric costs alone, in one federation; kept in a CSV file, and taken from there for the same metric
    and federation.

    A metric of the data is worked out once: its time is divided by the rounds. Of one with a clients' side it is what
    the fit takes longer.
    """
    own = {name: f"{each.identity()} {federation.identity.key}" for name, each in entries.items()}
    kept = None if path is None else ResultFile(path, COST_COLUMNS)
    rows = [] if kept is None else [row for row in kept.rows if row["identity"] == own.get(row["metric"])]
    known = {row["metric"]: Cost(row["seconds"], row["evaluations"], row["training"]) for row in rows}
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
        if kept is not None:
            kept.add([[name, *(f"{number:.6g}" for number in astuple(known[name])), own[name]]])
    return known


def _between_seeds(results: Results, federation: str, metric: str) -> float:
    return mean(spearman(a, b) for a, b in combinations(results.runs(federation, metric).values(), 2))


def _interval(runs: DataFrame, level: float = 0.9) -> float:
    """Of the mean over federations, from the spread over seeds within each: half the width by Student's t. One of a
    single seed is taken to spread as the others do; NaN where all are."""
    scores = runs.groupby("federation")["spearman"]
    counts, spreads = scores.count(), scores.var()
    if spreads.isna().all():
        return NAN
    variances = spreads.fillna(spreads.mean()) / counts
    freedom = int((counts - 1).sum())
    return float(stats.t.ppf((1 + level) / 2, freedom) * variances.sum() ** 0.5 / len(counts))
