"""What the benchmark says of every metric: the columns of its tables."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy import stats

from flsv.benchmark.conditions import AGGREGATORS
from flsv.benchmark.coverage import Coverage, coverage
from flsv.benchmark.federation import Federation
from flsv.benchmark.registry import Entry
from flsv.benchmark.run import Results, run
from flsv.benchmark.scores import auroc, pearson, share_error, spearman
from flsv.benchmark.true_values import Truth

Known = Mapping[str, tuple[Federation, Truth]]
NAN = float("nan")


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
class Summary:
    """Scores of a metric over federations and seeds; NaN where nothing was measured.

    Args:
        spearman: federation to mean rank correlation with the truth, over seeds.
        tuning: mean over the tuning federations of that.
        held_out: over the held-out ones.
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
    tuning: float
    held_out: float
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
        return _mean(self.spearman.values())


def summarise(results: Results, federations: Known, metric: str) -> Summary:
    """What is known of a metric.

    Args:
        results: values.
        federations: by name, each with its truth.
        metric: its name.
    """
    kinds = {kind for each, _ in federations.values() for kind in each.bad}
    scores = {name: _over_seeds(results, name, metric, truth, spearman) for name, (_, truth) in federations.items()}
    scores = {name: each for name, each in scores.items() if each}
    means = {name: _mean(each.values()) for name, each in scores.items()}

    def change(condition: str) -> float:
        changes = []
        for name, (_, truth) in federations.items():
            values = results.values.get((name, condition, 0, metric))
            if values is not None and 0 in scores.get(name, {}):
                changes.append(spearman(values, truth.mean) - scores[name][0])
        return _mean(changes)

    return Summary(
        spearman=means,
        tuning=_mean(value for name, value in means.items() if federations[name][0].set == "tuning"),
        held_out=_mean(value for name, value in means.items() if federations[name][0].set == "held_out"),
        interval=_interval(scores),
        pearson=_mean(_mean(_over_seeds(results, n, metric, t, pearson).values()) for n, (_, t) in federations.items()),
        error=_mean(
            _mean(_over_seeds(results, n, metric, t, share_error).values()) for n, (_, t) in federations.items()
        ),
        auroc={kind: _auroc(results, federations, metric, kind) for kind in sorted(kinds)},
        seeds=_mean(_between_seeds(results, name, metric) for name in federations),
        aggregators=_mean(_between_aggregators(results, name, metric) for name in federations),
        partial=change("partial"),
        dropout=change("dropout"),
        private=change("private"),
        refused={key[0]: why for key, why in results.refused.items() if key[3] == metric and key[1] == "base"},
        intervals=coverage(results, federations, metric),
    )


def costs(
    federation: Federation, entries: Mapping[str, Entry], path: Path | None = None, say: Callable[[str], None] = print
) -> dict[str, Cost]:
    """What every metric costs alone, in one federation; kept in a CSV file, and taken from there.

    A metric of the data is worked out once: its time is divided by the rounds. Of one with a clients' side it is what
    the fit takes longer.
    """
    known: dict[str, Cost] = {}
    if path is not None and path.is_file():
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["metric"] in entries and row.get("identity") != entries[row["metric"]].identity():
                    continue
                known[row["metric"]] = Cost(*(float(row[name]) for name in ("seconds", "evaluations", "training")))
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
            _append(path, name, known[name], each.identity())
    return known


def _append(path: Path, name: str, cost: Cost, identity: str) -> None:
    new = not path.is_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(["metric", "seconds", "evaluations", "training", "identity"])
        writer.writerow([name, f"{cost.seconds:.6g}", f"{cost.evaluations:.6g}", f"{cost.training:.6g}", identity])


def _runs(results: Results, federation: str, metric: str) -> dict[int, object]:
    return {
        key[2]: values
        for key, values in results.values.items()
        if key[0] == federation and key[1] == "base" and key[3] == metric
    }


def _over_seeds(
    results: Results, federation: str, metric: str, truth: Truth, score: Callable[..., float]
) -> dict[int, float]:
    return {seed: score(values, truth.mean) for seed, values in sorted(_runs(results, federation, metric).items())}


def _between_seeds(results: Results, federation: str, metric: str) -> float:
    runs = list(_runs(results, federation, metric).values())
    return _mean(spearman(a, b) for a, b in combinations(runs, 2))  # type: ignore[arg-type]


def _between_aggregators(results: Results, federation: str, metric: str) -> float:
    base = results.values.get((federation, "base", 0, metric))
    others = [results.values.get((federation, each, 0, metric)) for each in AGGREGATORS]
    return NAN if base is None else _mean(spearman(base, each) for each in others if each is not None)


def _auroc(results: Results, federations: Known, metric: str, kind: str) -> float:
    found = []
    for name, (federation, _) in federations.items():
        if kind in federation.bad:
            bad = federation.badness()[kind]
            found += [auroc(values, bad) for values in _runs(results, name, metric).values()]  # type: ignore[arg-type]
    return _mean(found)


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


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if value == value]
    return float(np.mean(known)) if known else NAN
