"""Summary of the benchmark: tables of the metrics' scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import pandas
from pandas import DataFrame, Series
from scipy import stats

from flsv.benchmark.federation import SETS, Federation
from flsv.benchmark.scores import NAN, BenchResults, share_error, spearman
from flsv.benchmark.truth import Truth

#: Probability below the upper bound of a 90 % interval.
UPPER_PROBABILITY = 0.95
#: Federations by name, each with its truth.
FederationTruths = Mapping[str, tuple[Federation, Truth]]
#: Columns of benchmark.csv: ``interval`` is half the width of a 90 % interval over seeds, ``of_ceiling`` the
#: correlation over :attr:`flsv.benchmark.Truth.ceiling`, ``misallocated`` the share of a payment that goes to the wrong
#: clients.
TABLE_COLUMNS = [
    "set",
    "metric",
    "rank_correlation",
    "interval",
    "of_ceiling",
    "worst",
    "where",
    "misallocated",
    "federations",
]


def summarize(scores: DataFrame, metrics: Iterable[str]) -> DataFrame:
    """Summarize the metrics' :func:`scores_of` runs over sets and all federations, the best metric first."""
    correlations = correlations_by_federation(scores)  # [metrics, federations], means over seeds
    set_names = scores.groupby("federation")["set"].first()

    # A column per set of federations, then one for all, and the error.
    correlations_of_sets = correlations.T.groupby(set_names).mean()  # [sets, metrics]
    summary = correlations_of_sets.T.reindex(columns=SETS)
    summary["all"] = correlations.mean(axis=1)
    errors = scores.pivot_table("error", "metric", "federation")
    summary["error"] = errors.mean(axis=1)
    summary["worst"] = correlations.min(axis=1)
    summary["where"] = correlations.idxmin(axis=1)
    summary["federations"] = correlations.notna().sum(axis=1)

    for metric, scores_of_metric in scores.groupby("metric"):
        summary.loc[metric, "interval"] = _half_interval(scores_of_metric)

    summary = summary.reindex(list(metrics))
    summary = summary.fillna({"where": "", "federations": 0})
    return summary.sort_values("all", ascending=False, kind="stable")


def table_by_set(
    scores: DataFrame,
    federations: FederationTruths,
    metrics: Iterable[str],
) -> DataFrame:
    """Summarize the metrics' scores for each set of federations, the best metric first."""
    metrics = list(metrics)
    ceiling_by_federation = {name: truth.ceiling for name, (_, truth) in federations.items()}
    ceilings = Series(ceiling_by_federation)
    summaries = []
    for set_name in SETS:
        scores_of_set = scores[scores["set"] == set_name]
        if scores_of_set.empty:
            continue
        summary = summarize(scores_of_set, metrics)
        members = scores_of_set["federation"].unique()
        summary["set"] = set_name
        summary["of_ceiling"] = summary["all"] / ceilings[members].mean()
        summaries.append(summary)

    table = pandas.concat(summaries)
    table = table.rename(columns={"all": "rank_correlation", "error": "misallocated"})
    return table.rename_axis("metric").reset_index().reindex(columns=TABLE_COLUMNS)


def two_digits(value: float) -> str:
    """Format a number with two decimals, NaN as empty."""
    return "" if math.isnan(value) else f"{value:.2f}"


def scores_of(results: BenchResults, federations: FederationTruths) -> DataFrame:
    """Compare the values of each run with the truth. Return a table with a row per run and a column per score."""
    rows = []
    for (name, seed, metric), values in results.values.items():
        federation, truth = federations[name]
        row = {
            "federation": name,
            "set": federation.set,
            "seed": seed,
            "metric": metric,
            "spearman": spearman(values, truth.mean),
            "error": share_error(values, truth.mean),
        }
        rows.append(row)

    columns = ["federation", "set", "seed", "metric", "spearman", "error"]
    return DataFrame(rows, columns=columns)


def correlations_by_federation(scores: DataFrame) -> DataFrame:
    """Average the rank correlations over seeds, with a row per metric and a column per federation."""
    return scores.pivot_table("spearman", "metric", "federation")


def _half_interval(runs: DataFrame) -> float:
    """Compute half the 90 % t-interval's width of a metric's mean rank correlation."""
    scores = runs.groupby("federation")["spearman"]
    counts = scores.count()
    variances = scores.var()
    if variances.isna().all():
        return NAN
    # Half the width of a 90 % interval of the mean over federations, from the variance of each over seeds.
    variances_of_means = variances.fillna(variances.mean()) / counts
    degrees_of_freedom = int((counts - 1).sum())
    quantile = stats.t.ppf(UPPER_PROBABILITY, degrees_of_freedom)
    stderr_of_mean = variances_of_means.sum() ** 0.5 / len(counts)
    return float(quantile * stderr_of_mean)
