# ruff: noqa: E501 (lines of the page are as long as the page has them)
"""What values are worth in federations that no choice has seen: docs/results/fresh.md, and what docs/benchmark.md takes from it.

    flsv bench --federations fresh --metric one_round --metric cgsv ... --seeds 2 --conditions partial --out runs/fresh
    python tools/fresh_page.py --runs runs/fresh [--docs docs]

In docs/benchmark.md it writes the section on rank and money and the row on shadow models; all else there stays as it is.
Every number is of the values that ``flsv bench`` has kept and of the truth's tables, or, of shadow models, of the table in
docs/results/shadow.md. Half a minute.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench_page_text import MONEY, SHADOW, kept_cells, so
from common import grid
from retrain_choices import DESIGNS, Scores, hints_of, of_sizes, scores, visits
from table_statistics import paired

from flsv.benchmark import ExactTruth, federation, names, truth_table
from flsv.benchmark.registry import METRICS
from flsv.benchmark.scores import Results, mean, share_error, spearman
from flsv.benchmark.summary import Cost, Known, Summary, kept_costs, summarise

#: What a design is in the project, and the goal for its cost, as a part of the ceiling.
CALLED = {
    "each alone": ("`--trainings singles`, n + 2", 0.95),
    "each alone, all but one": ("`--trainings both`, 2 n + 2, the default", 0.99),
    "each alone, pairs": ("`--trainings pairs`", 0.99),
}
HINT, GOAL = 0.1, 0.90
#: What the benchmark recommends where there are no shadow models.
GAME = "gradient_agreement_game"


@dataclass(frozen=True)
class Line:
    """A way to value: federation to rank correlation and share error, and what it costs."""

    of: Mapping[str, tuple[float, float]]
    cost: str

    @property
    def rank(self) -> float:
        return mean(rank for rank, _ in self.of.values())

    @property
    def error(self) -> float:
        return mean(error for _, error in self.of.values())

    @property
    def least(self) -> tuple[float, str]:
        return min((rank, name) for name, (rank, _) in self.of.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/fresh"), help="the folder of flsv bench's --out")
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument("--root", default=None, help="folder of the data. Default: $FLSV_DATA_ROOT")
    options = parser.parse_args()
    results = Results(options.runs)
    known: Known = {
        each.name: (each, truth_table(each)) for each in (federation(name, options.root) for name in names("fresh"))
    }
    found = {name for *_, name in results.values}
    summaries = {name: summarise(results, known, name) for name in METRICS if name in found}
    costs = {name: cost for name, (cost, _) in kept_costs(options.runs / "costs.csv").items()}
    retrained = {name: of_retraining(results, name, known) for name in known}
    of_runs = (options.docs / "results" / "shadow.md").read_text(encoding="utf-8")
    shadow = {column: of_shadow(of_runs, list(known), column) for column in ("pairs", "all")}
    (options.docs / "results" / "fresh.md").write_text(
        page(results, known, summaries, costs, retrained, shadow), encoding="utf-8"
    )
    path = options.docs / "benchmark.md"
    text = into(path.read_text(encoding="utf-8"), summaries, known, retrained, results, shadow["pairs"])
    path.write_text(text, encoding="utf-8")


def of_shadow(page: str, names: list[str], column: str) -> Line:
    """``ShadowShapley`` in runs of its own, by the table of tools/bench_shadow.py."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    place = next(row.index(column) for row in rows if row[:2] == ["", "to"])
    found = {(row[0], row[1]): float(row[place]) for row in rows if row[1] in ("rank, truth", "share, truth")}
    return Line(
        {name: (found[name, "rank, truth"], found[name, "share, truth"]) for name in names}, "n more models each"
    )


def of_retraining(results: Results, name: str, known: Known) -> Scores:
    """What designs of a few trainings come to, with a run's ``OneRoundShapley`` as the hint."""
    truth = known[name][1]
    assert isinstance(truth, ExactTruth)
    runs = results.runs(name, "one_round").items()
    said = {str(seed): dict(enumerate(values.tolist())) for seed, values in runs}
    return scores(truth, hints_of({name: said}, name, truth.num_clients))


def of_metric(results: Results, known: Known, metric: str, costs: Mapping[str, Cost]) -> Line:
    """A metric of a run, mean over its seeds."""
    found = {}
    for name, (_, truth) in known.items():
        runs = results.runs(name, metric).values()
        if runs:
            ranks, errors = ([of(v, truth.mean) for v in runs] for of in (spearman, share_error))
            found[name] = mean(ranks), mean(errors)
    return Line(found, f"{1000 * costs[metric].seconds:.1f} ms a round")


def of_design(known: Known, retrained: Mapping[str, Scores], design: str, weight: float = 0.0) -> Line:
    key = (design, "exact" if design == "all 2^n" else "the fit", weight)
    sizes = DESIGNS.get(design)
    fits = [
        visits(
            of_sizes(truth.num_clients, tuple(range(truth.num_clients)) if sizes is None else sizes), each.num_samples
        )
        for each, truth in known.values()
    ]
    return Line({name: each[key] for name, each in retrained.items() if key in each}, f"{mean(fits):.1f} fits")


def lines(
    results: Results,
    known: Known,
    summaries: Mapping[str, Summary],
    costs: Mapping[str, Cost],
    retrained: Mapping[str, Scores],
) -> dict[str, Line]:
    """By title: retraining by what it costs, then the metrics of a run, best first."""
    designs = {
        "all coalitions, one seed: the ceiling": of_design(known, retrained, "all 2^n"),
        "each alone, pairs, all but one": of_design(known, retrained, "each alone, pairs, all but one"),
        **{f"{design} ({called})": of_design(known, retrained, design) for design, (called, _) in CALLED.items()},
        "each alone, with `OneRoundShapley` as the hint": of_design(known, retrained, "each alone", HINT),
        "all but one": of_design(known, retrained, "all but one"),
    }
    metrics = {f"`{name}`": of_metric(results, known, name, costs) for name in summaries}
    return dict(sorted(designs.items(), key=lambda item: -item[1].rank)) | dict(
        sorted(metrics.items(), key=lambda item: -item[1].rank)
    )


def page(
    results: Results,
    known: Known,
    summaries: Mapping[str, Summary],
    costs: Mapping[str, Cost],
    retrained: Mapping[str, Scores],
    shadow: Mapping[str, Line],
) -> str:
    """All of docs/results/fresh.md."""
    told = {
        **lines(results, known, summaries, costs, retrained),
        "while the run trains (`ShadowShapley()`)": shadow["pairs"],
    }
    told = dict(sorted(told.items(), key=lambda item: -item[1].rank))
    ceiling = of_design(known, retrained, "all 2^n").rank
    share = {title: each.rank / ceiling for title, each in told.items()}
    singles, both, pairs = (of_design(known, retrained, design) for design in CALLED)
    hinted = of_design(known, retrained, "each alone", HINT)
    metrics = {title.strip("`"): each for title, each in told.items() if title.startswith("`")}
    best = max((name for name in metrics if len(metrics[name].of) == len(known)), key=lambda name: metrics[name].rank)
    cheap, game = metrics[best], metrics[GAME]
    absent = {name: results_of(results, known, name) for name in metrics}
    rows = [
        [
            "values by",
            "cost",
            "rank correlation",
            "of the ceiling",
            "least",
            "share error",
            "with absence",
            "federations",
        ]
    ]
    for title, each in told.items():
        least, where = each.least
        gone = absent.get(title.strip("`"), float("nan"))
        rows.append(
            [
                title, each.cost, f"{each.rank:.2f}", f"{100 * share[title]:.0f} %", f"{least:.2f} {where}", f"{each.error:.2f}",
                f"{gone:.2f}" if gone == gone else "-", str(len(each.of)),
            ]
        )  # fmt: skip
    order = [title for title in told if not title.startswith("all coalitions")]
    single = [["federation", "what it is", "clients", "ceiling", *(short(title) for title in order)]]
    for name, (each, truth) in known.items():
        cells = [f"{told[title].of[name][0]:.2f}" if name in told[title].of else "-" for title in order]
        single.append([name, each.title, str(truth.num_clients), f"{truth.ceiling:.2f}", *cells])

    def reached(line: Line, goal: float) -> str:
        part = line.rank / ceiling
        verdict = "reached" if part >= goal else "not reached"
        return f"That is {100 * part:.0f} % of the ceiling; the goal of {100 * goal:.0f} % is {verdict}."

    return f"""# Federations that no choice has seen

What do values come to where nothing was chosen by looking? {len(known)} federations of three to five clients, made after the
last choice, of the kinds in which metrics fail: labels that nobody else has, strong skew under Adam, regressions, few clients,
momentum, tables, text. Every coalition of each was trained with three seeds. Mean rank correlation with these values; the
*ceiling*, one seed's exact values against the others', is {ceiling:.2f}.

- **While the run trains: `ShadowShapley()`**, each client alone and every two: {shadow["pairs"].rank:.2f}, least {shadow["pairs"].least[0]:.2f}, {100 * shadow["pairs"].error:.0f} % of the payment to
  the wrong people. {reached(shadow["pairs"], GOAL)}
- **Afterwards: `flsv retrain`** with 2 n + 2 trainings: {both.rank:.2f}, least {both.least[0]:.2f}, {100 * both.error:.0f} %. {reached(both, 0.99)}
  As many sample visits spent on pairs: {pairs.rank:.2f}. {reached(pairs, 0.99)}
- **By a third of that**, each client alone, n + 2 trainings: {singles.rank:.2f}, least {singles.least[0]:.2f}, {100 * singles.error:.0f} %; with `OneRoundShapley` as the hint
  {hinted.rank:.2f}. {reached(singles, 0.95)}
- **Cheap metrics of a run are not to be paid by here**: the best, `{best}`, has {cheap.rank:.2f}, least {cheap.least[0]:.2f}, {100 * cheap.error:.0f} % to the wrong people.
  {reached(cheap, GOAL)} `{GAME}`, the best of [the benchmark](../benchmark.md)'s older federations, has {game.rank:.2f}.

{"Two runs of every metric" if min(seeds(results, known)) >= 2 else "One run of every metric"}; MLPs, linear models and fastText of toy size. Of `ShadowShapley` three runs, with
seeds of their own ([all figures](shadow.md)): with all coalitions it has {shadow["all"].rank:.2f} there. That is less than the ceiling, though its rows
are retrainings to rounding; that the federations were let in by how far seeds of the truth's tables agree may be why.

## All of them

{grid(rows)}

Retraining is judged against the other seeds' mean, so that no training judges itself; metrics against the mean of all seeds.
*Fits*: samples visited, in fits of everybody, mean over the federations; a batched row costs less
([what it costs](retrain.md#what-it-costs)). *With absence*: two clients of a round's are absent, the truth is of full
participation. *Share error*: the part of the payment that goes to others than by the truth. A metric that the federation
refuses (no classes, Adam) has no value there.

## Federation by federation

{grid(single)}

## How it is measured

```bash
flsv bench --truth --federations fresh --truth-seeds 3 --out truths     # the tables of the package
flsv bench --federations fresh {" ".join(f"--metric {name}" for name in summaries)} --seeds 2 --conditions partial --out runs/fresh
python tools/fresh_page.py --runs runs/fresh
```

In this order: what there was to choose (the fit, designs, the hint's weight) was chosen on the tuning set; the
federations were written; all coalitions were trained with two seeds; one federation, whose ceiling was 0.2, gave way to another
and one, of 0.6, got more data and rounds; a third seed was trained; then designs and metrics were run, once. Nothing has been
changed since. 2026-11-22, two shared cores of a virtual machine; costs on digits_dirichlet.
"""


def short(title: str) -> str:
    return re.sub(r" \(.*", "", title)


def seeds(results: Results, known: Known) -> list[int]:
    return [len({key[2] for key in results.values if key[:2] == (name, "base")}) for name in known]


def results_of(results: Results, known: Known, metric: str) -> float:
    """Mean rank correlation where clients are absent."""
    found = ((results.values.get((name, "partial", 0, metric)), truth) for name, (_, truth) in known.items())
    return mean(spearman(values, truth.mean) for values, truth in found if values is not None)


def into(
    old: str,
    summaries: Mapping[str, Summary],
    known: Known,
    retrained: Mapping[str, Scores],
    results: Results,
    shadow: Line,
) -> str:
    """docs/benchmark.md with its section on rank and money and its row on shadow models written anew."""
    here = kept_cells(old)
    metrics = {name: of_metric(results, known, name, dict.fromkeys(summaries, Cost(0, 0, 0))) for name in summaries}
    ceiling = of_design(known, retrained, "all 2^n")
    rows = [
        [
            "metric",
            "rank correlation, held out",
            "fresh",
            "least of the fresh",
            "share error, all federations here",
            "fresh",
        ]
    ]
    rows.append(["`ShadowShapley()`", "-", f"{shadow.rank:.2f}", f"{shadow.least[0]:.2f}", "-", f"{shadow.error:.2f}"])
    for name, each in sorted(metrics.items(), key=lambda item: -item[1].rank):
        some = "" if len(each.of) == len(known) else f" ({len(each.of)} of them)"
        held, error = here[name]
        rows.append([f"`{name}`", held, f"{each.rank:.2f}{some}", f"{each.least[0]:.2f}", error, f"{each.error:.2f}"])
    game, one = metrics[GAME], metrics["one_round"]
    apart = paired(*({place: each.of[name][0] for place, name in enumerate(known)} for each in (one, game)))
    so(apart.verdict == "not told apart", "one_round and the game are not told apart")
    told = f"{apart.mean:+.2f} [{apart.low:+.2f}, {apart.high:+.2f}]"
    section = f"""## {MONEY}

A rank says who is worth more, not how much. The **share error** is the part of the payment that goes to the wrong people: half
the sum of the absolute differences between the shares that a metric pays and those of the truth, where values below 0 are paid
nothing (`flsv.benchmark.share_error`; 0: all is paid rightly, 1: nothing is).

{grid(rows)}

*Held out* was not looked at when metrics were chosen, but its federations are of the kinds that they were chosen on: images,
one hidden layer, SGD, six clients. *Fresh* are [{len(known)} that were made after every choice](results/fresh.md), of the kinds in
which metrics fail (ceiling {ceiling.rank:.2f}): `{GAME}` has {100 * game.rank / ceiling.rank:.0f} % of it there and `one_round` {100 * one.rank / ceiling.rank:.0f} %. Fourteen of an independent
check, whose federations are not kept, said 0.72 and 0.69 (ceiling 0.91). On the fresh ones the two are not told apart (`one_round` minus
`{GAME}` {told}). **Where your federation is of such a kind, believe the lower figure, and pay by
`ShadowShapley` or by `flsv retrain`.** The twelve tuning federations of these kinds that joined later are in no table of this page.
"""
    text = re.sub(rf"## {MONEY}\n.*?(?=\n## )", lambda _: section, old, flags=re.DOTALL)
    least, _ = shadow.least
    because = (
        f"{shadow.rank:.2f} in [federations that no choice has seen](results/fresh.md), where another seed of the truth has "
        f"{ceiling.rank:.2f} (least {least:.2f}), and {100 * shadow.error:.0f} % of the payment to the wrong people; "
        + so(shadow.rank > max(each.rank for each in metrics.values()), "no other metric of a run comes near")
        + ". Each client trains n more models, under FedAvg ([what else it needs](explanation/metrics.md))"
    )
    row = f"| {SHADOW} | `ShadowShapley()` | {because} |"
    return re.sub(rf"^\| {SHADOW} \|.*$", lambda _: row, text, flags=re.MULTILINE)


if __name__ == "__main__":
    main()
