"""Summary of the benchmark: tables of the metrics' scores and costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path

import pandas
from pandas import DataFrame, Series
from scipy import stats

from flsv.benchmark.federation import SETS, Federation
from flsv.benchmark.registry import Entry
from flsv.benchmark.run import run_metrics
from flsv.benchmark.scores import NAN, BenchResults, auroc, share_error, spearman
from flsv.benchmark.truth import Truth
from flsv.utilities.csv_files import Cell, number_or_nan
from flsv.utilities.result_file import ResultFile

Known = Mapping[str, tuple[Federation, Truth]]
#: Columns of costs.csv, and the function that reads the cells of each.
COST_COLUMNS: dict[str, Cell] = {
    "metric": str, "seconds": number_or_nan, "evaluations": number_or_nan, "training": number_or_nan, "identity": str
}  # fmt: skip
#: Columns of benchmark.csv: ``interval`` and ``lead_interval`` are half the widths of 90 % intervals (over seeds, and
#: over federations), ``of_ceiling`` is the correlation over :attr:`flsv.benchmark.Truth.ceiling`, ``lead`` what it is
#: above the metric in the next row, ``misallocated`` the share of a payment that goes to the wrong clients.
BY_SET = [
    *(
        "set",
        "metric",
        "rank_correlation",
        "interval",
        "of_ceiling",
        "lead",
        "lead_interval",
        "worst",
        "where",
    ),
    *("misallocated", "federations", "ms_a_round"),
]


@dataclass(frozen=True)
class Cost:
    """Cost of a metric, measured in a training run with this metric alone."""

    #: Processor time of the metric per round in seconds, including evaluations.
    seconds: float
    #: Number of models evaluated per round.
    evaluations: float
    #: Processor time of the rest of the fit per round in seconds.
    training: float


def summarize(results: BenchResults, federations: Known, metrics: Iterable[str]) -> DataFrame:
    """Summarize the metrics' scores over sets and all federations, the best metric first."""
    scores = scores_of(results, federations)
    ranks = by_federation(scores)
    means = (
        scores.groupby(["metric", "federation"])[["spearman", "error"]]
        .mean()
        .groupby("metric")
        .mean()
    )
    sets = Series({name: each.set for name, (each, _) in federations.items()})
    table = ranks.T.groupby(sets).mean().T.reindex(columns=SETS)
    table = table.assign(all=means["spearman"], error=means["error"])
    table["worst"], table["where"] = ranks.min(axis=1), ranks.idxmin(axis=1)
    table["federations"] = ranks.notna().sum(axis=1)
    kinds = [name for name in scores if name.startswith("auroc ")]
    table[kinds] = scores.groupby("metric")[kinds].mean()
    for metric in table.index:
        table.loc[metric, "interval"] = _interval(scores[scores["metric"] == metric])
    table = table.reindex([*metrics]).fillna({"where": "", "federations": 0})
    return table.sort_values("all", ascending=False, kind="stable")


def by_set(
    results: BenchResults, federations: Known, metrics: Iterable[str], costs: Mapping[str, Cost]
) -> DataFrame:
    """Summarize the metrics' scores for each set of federations, the best metric first."""
    names, parts = [*metrics], []
    for which in SETS:
        some = {name: each for name, each in federations.items() if each[0].set == which}
        if not some:
            continue
        table, ranks = summarize(results, some, names), by_federation(scores_of(results, some))
        table = table.assign(
            set=which,
            of_ceiling=table["all"] / Series(truth.ceiling for _, truth in some.values()).mean(),
        )
        for metric, following in pairwise(table.index[table["federations"] > 0]):
            lead = (ranks.loc[metric] - ranks.loc[following]).dropna()
            table.loc[metric, "lead"] = lead.mean()
            table.loc[metric, "lead_interval"] = stats.t.ppf(0.95, len(lead) - 1) * lead.sem()
        parts.append(table)
    table = pandas.concat(parts).rename(
        columns={"all": "rank_correlation", "error": "misallocated"}
    )
    table["ms_a_round"] = [
        1000 * costs[name].seconds if name in costs else NAN for name in table.index
    ]
    kinds = [name for name in table if name.startswith("auroc ")]
    return table.rename_axis("metric").reset_index().reindex(columns=[*BY_SET, *kinds])


def two_digits(value: float) -> str:
    """Format a number with two decimals, NaN as empty."""
    return "" if value != value else f"{value:.2f}"


def scores_of(results: BenchResults, federations: Known) -> DataFrame:
    """Compare the values of each run with the truth. Return a table with a row per run and a column per score."""
    kinds = sorted({kind for each, _ in federations.values() for kind in each.bad})
    rows = []
    for (name, seed, metric), values in results.values.items():
        if name not in federations:
            continue
        federation, truth = federations[name]
        row = {"federation": name, "seed": seed, "metric": metric}
        row |= {"spearman": spearman(values, truth.mean), "error": share_error(values, truth.mean)}
        rows.append(
            row
            | {f"auroc {kind}": auroc(values, bad) for kind, bad in federation.badness().items()}
        )
    head = ["federation", "seed", "metric", "spearman", "error"]
    return DataFrame(rows, columns=[*head, *(f"auroc {kind}" for kind in kinds)])


def by_federation(scores: DataFrame) -> DataFrame:
    """Average the rank correlations over seeds, with a row per metric and a column per federation."""
    return scores.pivot_table("spearman", "metric", "federation")


def costs(
    federation: Federation,
    entries: Mapping[str, Entry],
    path: Path | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Cost]:
    """Measure each metric's cost per round in a training run of its own, or read it from ``path``."""
    own = {name: f"{each.identity()} {federation.identity.key}" for name, each in entries.items()}
    kept = None if path is None else ResultFile(path, COST_COLUMNS)
    rows = (
        []
        if kept is None
        else [row for row in kept.rows if row["identity"] == own.get(row["metric"])]
    )
    known = {
        row["metric"]: Cost(row["seconds"], row["evaluations"], row["training"]) for row in rows
    }
    for name, each in entries.items():
        if name in known:
            continue
        found = run_metrics(federation, {name: each}, seed=0)
        if name in found.refused or name in found.failed:
            continue
        seconds, rounds = found.seconds.get(name, NAN), federation.rounds
        if (
            each.client_algorithm is not None
        ):  # the metric's cost at the clients is part of the training
            seconds = max(seconds, found.fit - run_metrics(federation, {}, seed=0).fit)
        training = max(found.fit - found.seconds.get(name, 0.0), 0.0) if found.fit else 0.0
        known[name] = Cost(
            seconds / rounds, found.evaluations.get(name, 0) / rounds, training / rounds
        )
        say(f"{name}: {1000 * known[name].seconds:.1f} ms a round")
        if kept is not None:
            kept.add([[name, *(f"{number:.6g}" for number in astuple(known[name])), own[name]]])
    return known


def _interval(runs: DataFrame) -> float:
    """Compute half the 90 % t-interval's width of a metric's mean rank correlation."""
    scores = runs.groupby("federation")["spearman"]
    counts, spreads = scores.count(), scores.var()
    if spreads.isna().all():
        return NAN
    variances = spreads.fillna(spreads.mean()) / counts
    freedom = int((counts - 1).sum())
    return float(stats.t.ppf(0.95, freedom) * variances.sum() ** 0.5 / len(counts))
