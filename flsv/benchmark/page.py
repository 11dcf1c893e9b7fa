"""The tables of ``flsv bench`` in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan

from pandas import DataFrame, Series

from flsv.benchmark.federation import SETS
from flsv.benchmark.registry import Entry
from flsv.benchmark.scores import NAN, Results, spearman
from flsv.benchmark.summary import Cost, Known, by_federation, coverage, scores_of
from flsv.report.text import markdown_table

CEILING = "*the truth, one other seed*"


def markdown(
    summary: DataFrame, results: Results, entries: Mapping[str, Entry], federations: Known, costs: Mapping[str, Cost]
) -> str:
    """All tables, best first.

    Args:
        summary: see :func:`flsv.benchmark.summary.summarize`.
        results: values.
        entries: by metric.
        federations: by name, each with its truth.
        costs: by metric, where they are known.
    """
    ranks = by_federation(scores_of(results, federations)).reindex(summary.index)
    parts = {
        "Near the truth, and at what cost": _main(summary, results, entries, federations, costs),
        "Who is bad": _bad(summary),
        "What a metric's own 90 % intervals hold": _intervals(summary, results, federations),
        "Federation by federation": _by_federation(ranks, federations),
        "What is measured on what": _federations(federations),
    }
    refused = [
        f"- {name}, {key[0]}: {why}"
        for name in summary.index
        for key, why in results.refused.items()
        if key[2] == name and key[0] in federations
    ]
    if refused:
        parts["Left out"] = "\n".join(dict.fromkeys(refused))
    return "\n\n".join(f"## {title}\n\n{part}" for title, part in parts.items()) + "\n"


def _main(
    summary: DataFrame,
    results: Results,
    entries: Mapping[str, Entry],
    federations: Known,
    costs: Mapping[str, Cost],
) -> str:
    ceilings = Series({name: truth.ceiling for name, (_, truth) in federations.items()})
    sets = Series({name: each.set for name, (each, _) in federations.items()})
    shown = [each for each in SETS if each in set(sets)]
    top = [two(ceilings[sets == which].mean()) for which in shown]
    least = ceilings.fillna(1.0).idxmin()
    rows = [[CEILING, *top, two(ceilings.mean()), f"{two(ceilings[least])} {least}", *[""] * 8]]
    for name, row in summary.iterrows():
        near = f"{two(row['all'])} ± {two(row['interval'])}" if row["interval"] == row["interval"] else two(row["all"])
        held, cost = coverage(results, federations, str(name)), costs.get(str(name))
        cells = [*(two(row[which]) for which in shown), near, f"{two(row['worst'])} {row['where']}"]
        cells += [two(row[column]) for column in ("pearson", "error", "seeds")]
        cells.append("" if held is None else two(held.truth))
        cells += ["", ""] if cost is None else [f"{1000 * cost.seconds:.1f}", f"{cost.evaluations:.0f}"]
        cells += [f"{row['federations']:.0f}", ", ".join(entries[str(name)].needed) or "nothing"]
        rows.append([f"`{name}`", *cells])
    head = [*(each.replace("_", " ") for each in shown), "all", "worst", "Pearson", "share error", "seeds"]
    head += ["interval covers", "CPU ms a round", "evaluations a round", "federations", "needs"]
    return markdown_table(["metric", *head], rows)


def _bad(summary: DataFrame) -> str:
    kinds = [name for name in summary if name.startswith("auroc ")]
    head = ["metric", *(kind.replace("auroc", "AUROC").replace("_", " ") for kind in kinds)]
    rows = summary[kinds].map(two).itertuples(name=None)
    return markdown_table(head, [[f"`{name}`", *row] for name, *row in rows])


def _intervals(summary: DataFrame, results: Results, federations: Known) -> str:
    head = ["metric", "truth's share", "other seeds' mean", "half width, as a share", "cases"]
    rows = []
    for name in summary.index:
        held = coverage(results, federations, name)
        if held is not None:
            width = "" if isnan(held.width) else f"{held.width:.3f}"
            rows.append([f"`{name}`", two(held.truth), two(held.seeds), width, str(held.cases)])
    return markdown_table(head, rows)


def _by_federation(ranks: DataFrame, federations: Known) -> str:
    rows = []
    for name, (each, truth) in federations.items():
        size = spearman(each.num_samples.double(), truth.mean)
        known = ranks[name] if name in ranks else Series(NAN, ranks.index)
        rows.append([name, each.set.replace("_", " "), two(truth.ceiling), two(size), *known.map(two)])
    return markdown_table(["federation", "set", "ceiling", "size", *(f"`{name}`" for name in ranks.index)], rows)


def _federations(federations: Known) -> str:
    head = ["federation", "what it is", "clients", "rounds", "trained for the truth", "true shares of the gain, %"]
    rows = []
    for name, (each, truth) in federations.items():
        shares = 100 * truth.mean / truth.mean.sum()
        half = 100 * truth.interval() / truth.mean.sum().abs()
        said = ", ".join(f"{share:.0f} ± {width:.0f}" for share, width in zip(shares.tolist(), half.tolist()))
        trained = f"{len(truth.seeds)} x {truth.trained}"
        if truth.trained < 2**truth.num_clients:
            trained += f" of {2**truth.num_clients:,}"
        rows.append([name, each.title, str(truth.num_clients), str(each.rounds), trained, said])
    return markdown_table(head, rows)


def two(value: float) -> str:
    """With two digits; nothing for what is not known."""
    return "" if isnan(value) else f"{value:.2f}"
