"""Summary of the benchmark: tables of the metrics' scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from pandas import DataFrame

from benchmark.federation import SETS, Federation
from benchmark.scores import BenchResults, share_error, spearman
from benchmark.truth import Truth

#: Federations by name, each with its truth.
FederationTruths = Mapping[str, tuple[Federation, Truth]]
#: Columns of scores.csv, which has a row per run and metric.
SCORE_COLUMNS = ["federation", "set", "seed", "metric", "spearman", "misallocated"]


def summarize(scores: DataFrame, metrics: Iterable[str]) -> DataFrame:
    """Summarize the metrics' :func:`scores_of` runs over sets and all federations, the best metric first."""
    # Means over seeds, [metrics, federations].
    correlations = scores.pivot_table("spearman", "metric", "federation")
    misallocated = scores.pivot_table("misallocated", "metric", "federation")

    # A column per set of federations, then one for all.
    first_rows = scores.groupby("federation").first()
    by_set = correlations.T.groupby(first_rows["set"])
    correlations_of_sets = by_set.mean()  # [sets, metrics]
    summary = correlations_of_sets.T.reindex(columns=SETS)
    overall = {
        "all": correlations.mean(axis=1),
        "worst": correlations.min(axis=1),
        "where": correlations.idxmin(axis=1),
        "misallocated": misallocated.mean(axis=1),
    }
    summary = summary.assign(**overall)

    summary = summary.reindex(list(metrics))
    summary = summary.fillna({"where": ""})
    return summary.sort_values("all", ascending=False, kind="stable")


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
            "misallocated": share_error(values, truth.mean),
        }
        rows.append(row)

    return DataFrame(rows, columns=SCORE_COLUMNS)
