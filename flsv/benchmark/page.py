"""The tables of ``flsv bench`` in Markdown, and the benchmark's picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from flsv.benchmark.federation import SETS
from flsv.benchmark.registry import Entry
from flsv.benchmark.scores import mean, spearman
from flsv.benchmark.summary import GOAL, Cost, Known, Summary
from flsv.charts import label_text
from flsv.report.text import markdown_table

#: Points are in a crowd that are nearer than by this factor of time; names in it this far apart.
CROWD, STEP = 1.35, 0.022
CEILING = "*the truth, one other seed*"


def markdown(
    summaries: Mapping[str, Summary], entries: Mapping[str, Entry], federations: Known, costs: Mapping[str, Cost]
) -> str:
    """All tables, best first.

    Args:
        summaries: by metric.
        entries: likewise.
        federations: by name, each with its truth.
        costs: by metric, where they are known.
    """
    order = best_first(summaries)
    parts = [
        "## Near the truth, and at what cost",
        _main(order, summaries, entries, federations, costs),
        "## Who is bad, and what disturbs",
        _disturbed(order, summaries),
        "## What a metric's own 90 % intervals hold",
        _intervals(order, summaries),
        "## Federation by federation",
        _by_federation(order, summaries, federations),
        "## What is measured on what",
        _federations(federations),
    ]
    refused = [
        f"- {name}, {federation}: {why}" for name in order for federation, why in summaries[name].refused.items()
    ]
    if refused:
        parts += ["## Left out", "\n".join(refused)]
    return "\n\n".join(parts) + "\n"


def _main(
    order: Sequence[str],
    summaries: Mapping[str, Summary],
    entries: Mapping[str, Entry],
    federations: Known,
    costs: Mapping[str, Cost],
) -> str:
    sets = {name: each.set for name, (each, _) in federations.items()}
    shown = [each for each in SETS if each in sets.values()]
    head = ["metric", *(each.replace("_", " ") for each in shown), "all", "worst", "Pearson", "share error", "seeds"]
    head += ["aggregators", "interval covers", "CPU ms a round", "evaluations a round", "federations", "needs"]
    ceilings = {name: truth.ceiling for name, (_, truth) in federations.items()}
    top = [mean([c for n, c in ceilings.items() if sets[n] == which]) for which in shown]
    least = min(ceilings, key=lambda name: ceilings[name], default="")
    everywhere = mean(list(ceilings.values()))
    rows = [[CEILING, *map(two, [*top, everywhere]), f"{two(ceilings.get(least))} {least}", *[""] * 9]]
    for name in order:
        each, cost = summaries[name], costs.get(name)
        where, worst = each.worst
        both = f"{two(each.mean)} ± {two(each.interval)}" if each.interval == each.interval else two(each.mean)
        row = [f"`{name}`", *(two(each.sets[which]) for which in shown), both, f"{two(worst)} {where}"]
        row += [two(each.pearson), two(each.error), two(each.seeds), two(each.aggregators)]
        row.append("" if each.intervals is None else two(each.intervals.truth))
        row += ["", ""] if cost is None else [f"{1000 * cost.seconds:.1f}", f"{cost.evaluations:.0f}"]
        needs = ", ".join(entries[name].needed) or "nothing"
        rows.append([*row, str(len(each.spearman)), needs])
    return markdown_table(head, rows)


def _disturbed(order: Sequence[str], summaries: Mapping[str, Summary]) -> str:
    kinds = sorted({kind for each in summaries.values() for kind in each.auroc})
    head = ["metric", *(f"AUROC {kind.replace('_', ' ')}" for kind in kinds), "partial", "dropout", "noise"]
    rows = []
    for name in order:
        each = summaries[name]
        changes = [
            f"{change:+.2f}" if change == change else "" for change in (each.partial, each.dropout, each.private)
        ]
        rows.append([f"`{name}`", *(two(each.auroc.get(kind)) for kind in kinds), *changes])
    return markdown_table(head, rows)


def _intervals(order: Sequence[str], summaries: Mapping[str, Summary]) -> str:
    head = ["metric", "truth's share", f"federations with {GOAL} or more", "least", "other seeds' mean"]
    head += ["half width, as a share", "error of the seeds' mean by a single run's", "cases"]
    rows = []
    for name in order:
        found = summaries[name].intervals
        if found is None:
            continue
        where, least = min(found.by_federation.items(), key=lambda item: item[1], default=("", float("nan")))
        enough = sum(each >= GOAL for each in found.by_federation.values())
        row = [f"`{name}`", two(found.truth), f"{enough} of {len(found.by_federation)}", f"{two(least)} {where}"]
        row += [two(found.seeds), f"{found.width:.3f}" if found.width == found.width else "", two(found.repeated)]
        rows.append([*row, str(found.cases)])
    return markdown_table(head, rows)


def _by_federation(order: Sequence[str], summaries: Mapping[str, Summary], federations: Known) -> str:
    head = ["federation", "set", "ceiling", "size", *(f"`{name}`" for name in order)]
    rows = []
    for name, (each, truth) in federations.items():
        size = spearman(each.num_samples.double(), truth.mean)
        row = [name, each.set.replace("_", " "), two(truth.ceiling), two(size)]
        rows.append([*row, *(two(summaries[metric].spearman.get(name)) for metric in order)])
    return markdown_table(head, rows)


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


def draw(summaries: Mapping[str, Summary], costs: Mapping[str, Cost], federations: Known) -> Figure:
    """Cost against rank correlation, and the ceiling."""
    figure = Figure(figsize=(10, 8), layout="constrained")
    axes = figure.add_subplot()
    points = {
        name: (max(1000 * costs[name].seconds, 0.01), each.mean)
        for name, each in summaries.items()
        if name in costs and each.mean == each.mean
    }
    written: list[tuple[float, float]] = []
    for name, (x, y) in sorted(points.items(), key=lambda item: -item[1][1]):
        axes.plot([x], [y], "o", color="tab:blue" if costs[name].evaluations else "tab:orange")
        # Where points lie near each other, names stand below one another to the right of all of them, each with a line.
        crowd = [other for other, _ in points.values() if max(other / x, x / other) < CROWD]
        column = x * 1.1 if len(crowd) < 4 else max(crowd) * 2.4
        # A name takes up a factor of three or so in this direction.
        others = [at for at in written if max(at[0] / column, column / at[0]) < 3]
        place = y
        while taken := [other for _, other in others if abs(other - place) < STEP]:
            place = min(taken) - 1.01 * STEP
        written.append((column, place))
        line = {"arrowstyle": "-", "color": "lightgrey", "linewidth": 0.8, "shrinkA": 0, "shrinkB": 4}
        axes.annotate(label_text(name), (x, y), xytext=(column, place), va="center", fontsize=8, arrowprops=line)
    axes.axhline(mean([t.ceiling for _, t in federations.values()]), color="grey", linestyle="--", linewidth=1)
    axes.set(
        xscale="log",
        xlabel="ms of the processor a round; blue: with coalitions evaluated",
        ylabel="mean rank correlation with the retrained values",
    )
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def best_first(summaries: Mapping[str, Summary]) -> list[str]:
    """Metrics by mean rank correlation; those without one last."""
    means = {name: each.mean for name, each in summaries.items()}
    return sorted(means, key=lambda name: 2.0 if means[name] != means[name] else -means[name])


def two(value: float | None) -> str:
    """With two digits; nothing for what is not known."""
    return "" if value is None or value != value else f"{value:.2f}"
