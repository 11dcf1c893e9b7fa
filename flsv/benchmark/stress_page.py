"""What cheating brings, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flsv.benchmark.cheating import CHEATS
from flsv.benchmark.page import table
from flsv.benchmark.stress import Gain, Trial, gain

Trials = Mapping[tuple[str, str], Sequence[Trial]]
"""Cheat and safeguard to trials."""


def markdown(trials: Trials, metrics: Sequence[str]) -> str:
    """The gains by metric, the most gamed first, without and with each safeguard; what cheating costs, and who notices.

    Args:
        trials: of :func:`flsv.benchmark.stress.stress`.
        metrics: names.
    """
    cheats = list(dict.fromkeys(cheat for cheat, _ in trials))
    guards = list(dict.fromkeys(guard for _, guard in trials))
    order = by_gain(trials, metrics, guards[0])
    parts = []
    for guard in guards:
        named = "Gains without a safeguard" if guard == "none" else f"Gains under the safeguard {guard}"
        rows = [
            [f"`{metric}`", _one(gain(trials[cheats[0], guard], metric).before)]
            + [_gain(gain(trials[cheat, guard], metric)) for cheat in cheats]
            for metric in order
        ]
        parts += [f"## {named}", table(["metric", "honest share, %", *map(_words, cheats)], rows)]
    if "none" in guards and len(guards) > 1:
        others = [guard for guard in guards if guard != "none"]
        head = ["metric", "best cheat", "gain", *(f"the same under {guard}" for guard in others)]
        head += [f"the best under {guard}" for guard in others]
        rows = []
        for metric in order:
            cheat, found = most(trials, metric, "none")
            after = [_gain(gain(trials[cheat, guard], metric)) for guard in others]
            best = [(_words(name), _gain(each)) for name, each in (most(trials, metric, guard) for guard in others)]
            rows.append([f"`{metric}`", _words(cheat), _gain(found), *after, *(" ".join(each) for each in best)])
        parts += ["## The best cheat, and what a safeguard leaves of it", table(head, rows)]
        parts += ["## What a safeguard costs where nobody cheats", _costs(trials, order, guards)]
    rows = []
    for (cheat, guard), each in trials.items():
        noticed = f"{sum(trial.noticed > 0 for trial in each)} of {len(each)}"
        alarms = f"{np.mean([trial.alarms for trial in each]):.1f}" if each else ""
        cost = f"{np.mean([trial.cost for trial in each]):+.3f}" if each else ""
        rows.append([_words(cheat), CHEATS[cheat].title, guard, cost, noticed, alarms])
    head = ["cheat", "what the client does", "safeguard", "the model's loss of utility", "noticed", "others warned of"]
    parts += ["## What it costs, and whether the run notices", table(head, rows)]
    return "\n\n".join(parts) + "\n"


def _costs(trials: Trials, metrics: Sequence[str], guards: Sequence[str]) -> str:
    """A row a safeguard: the model's utility, rank correlations with the truth, and how many were warned of."""
    head = ["safeguard", "utility of the model", *(f"`{metric}`" for metric in metrics), "warned of"]
    rows = []
    for guard in guards:
        honest = {(t.federation, t.seed): t for (_, g), each in trials.items() if g == guard for t in each}.values()
        ranks = [[t.rank[metric] for t in honest if metric in t.rank] for metric in metrics]
        cells = [f"{np.mean(each):.2f}" if each else "" for each in ranks]
        utility = f"{np.mean([t.utility for t in honest]):.3f}" if honest else ""
        rows.append([guard, utility, *cells, str(sum(t.warned for t in honest))])
    return table(head, rows)


def most(trials: Trials, metric: str, guard: str) -> tuple[str, Gain]:
    """The cheat of the largest gain under a metric, and the gain; an unknown one counts as none.

    Raises:
        ValueError: there is no trial under this safeguard.
    """
    found = {cheat: gain(each, metric) for (cheat, g), each in trials.items() if g == guard}
    cheat = max(found, key=lambda name: -1e9 if np.isnan(found[name].points) else found[name].points)
    return cheat, found[cheat]


def by_gain(trials: Trials, metrics: Sequence[str], guard: str) -> list[str]:
    """Metrics, the most gamed first; those without a value last."""
    points = {metric: most(trials, metric, guard)[1].points for metric in metrics}
    return sorted(metrics, key=lambda metric: (np.isnan(points[metric]), -points[metric]))


def _gain(each: Gain) -> str:
    if np.isnan(each.points):
        return ""
    half = "" if np.isnan(each.interval) else f" ± {each.interval:.1f}"
    return f"{each.points:+.1f}{half}"


def _one(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.1f}"


def _words(name: str) -> str:
    return name.replace("_", " ")
