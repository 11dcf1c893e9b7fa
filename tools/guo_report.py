"""The checks, tables and figures of Guo et al.'s comparison (``guo_table.py``)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

import torch
from common import grid
from common import spread as mean_and_deviation
from guo_federation import ALGORITHMS, CLAIM_SOURCE, OURS, RETRAINING, SCENARIOS, Cell, Claim, Result, Setting
from matplotlib.figure import Figure

# ---- the checks


def spread(values: Sequence[float]) -> float:
    """The distance of the outermost values, as a share of the larger of their sizes."""
    return (max(values) - min(values)) / max(map(abs, values), default=0.0) if any(values) else 0.0


def check(scenario: str, values: Sequence[float]) -> tuple[bool, str]:
    """Whether the values show what they have to, and the figures behind it."""
    steps = [after - before for before, after in pairwise(values)]
    if scenario == "same":
        return spread(values) <= 0.1, f"{100 * spread(values):.0f} % apart"
    if scenario == "sizes":
        return min(steps) > 0, f"{sum(step > 0 for step in steps)} of 4 steps up"
    if scenario == "noisy":
        return max(steps) < 0, f"{sum(step < 0 for step in steps)} of 4 steps down"
    if scenario == "mixtures":
        return values[-1] > 0, f"{values[-1]:+.3f}"
    others = values[:-1]
    met = values[-1] > max(others) and min(others) > 0 and spread(others) <= 0.2
    first = "first" if values[-1] > max(others) else "not first"
    return met, f"{first}, others {100 * spread(others):.0f} % apart, {sum(v > 0 for v in others)} of 4 positive"


# ---- reports


def shares(values: Sequence[float]) -> list[float]:
    """The values divided by the sum of their sizes, so that algorithms compare."""
    total = sum(map(abs, values))
    return [value / total if total else 0.0 for value in values]


def verdict(scenario: str, runs: Sequence[Sequence[float]]) -> str:
    """On the mean over seeds of the shares, and how many seeds agree with the check on their own."""
    met, figures = check(scenario, [statistics.mean(column) for column in zip(*runs)])
    return f"{'met' if met else 'not met'}: {figures} ({sum(check(scenario, run)[0] for run in runs)}/{len(runs)})"


def report_scenario(scenario: str, results: Sequence[list[Result]]) -> str:
    """One table: a list of results for every seed."""
    clients = len(results[0][0].values)
    head = ["", *(f"client {i}" for i in range(clients)), "check (seeds that meet it)", "accuracy, %"]
    rows = [[*head, "training, s", "valuation, s", "models", "trainings"]]
    for algorithm in ALGORITHMS:
        mine = [result for each in results for result in each if result.algorithm == algorithm]
        if not mine:
            continue
        runs = [shares(result.values) for result in mine]
        rows.append(
            [
                algorithm,
                *(mean_and_deviation(column, 3) for column in zip(*runs)),
                verdict(scenario, runs),
                mean_and_deviation((100 * result.accuracy for result in mine), 1),
                mean_and_deviation((result.training for result in mine), 1),
                mean_and_deviation((result.valuation for result in mine), 1),
                f"{statistics.mean(result.coalitions for result in mine):.0f}",
                f"{statistics.mean(result.trainings for result in mine):.0f}",
            ]
        )
    return grid(rows)


def report_checks(results: dict[Cell, list[Result]]) -> str:
    """In how many of the federations, and on the mean over seeds in how many of the cases, every check is met."""
    scenarios = [name for name in SCENARIOS if any(cell[2] == name for cell in results)]
    rows = [["", *scenarios]]
    for algorithm in ALGORITHMS:
        cells = []
        for scenario in scenarios:
            cases: dict[tuple[str, str], list[list[float]]] = {}
            for (source, network, name, _), each in results.items():
                found = [shares(r.values) for r in each if r.algorithm == algorithm and name == scenario]
                cases.setdefault((source, network), []).extend(found)
            cases = {case: runs for case, runs in cases.items() if runs}
            met = sum(verdict(scenario, runs).startswith("met") for runs in cases.values())
            alone = [check(scenario, run)[0] for runs in cases.values() for run in runs]
            cells.append(f"{met} of {len(cases)} ({sum(alone)} of {len(alone)} runs)" if cases else "-")
        if any(cell != "-" for cell in cells):
            rows.append([algorithm, *cells])
    return grid(rows)


def report_claim(results: dict[Claim, float]) -> str:
    """Accuracies by network and scenario."""
    columns = sorted({claim[:2] for claim in results}, reverse=True)
    rows = [["batches", "server_lr", "aggregator", *(f"{network}, {scenario}" for network, scenario in columns)]]
    kinds = dict.fromkeys((c[4], c[3], c[2]) for c in results)
    for ordered, rate, aggregator in sorted(kinds, key=lambda kind: kind[:2]):
        cells = [
            mean_and_deviation(
                (100 * value for c, value in results.items() if c[:5] == (*column, aggregator, rate, ordered)), 1
            )
            for column in columns
        ]
        rows.append(["class-ordered" if ordered else "shuffled", f"{rate:g}", aggregator, *cells])
    return grid(rows)


def report(
    results: dict[Cell, list[Result]], claims: dict[Claim, float], settings: dict[str, Setting], retrain_seeds: int
) -> str:
    """The whole page, in Markdown."""
    seeds = len({cell[3] for cell in results})
    parts = [
        "## Checks\n\nCases (data set and network) whose mean over seeds meets the check; single runs in brackets.\n\n"
        + report_checks(results)
    ]
    for source, network in dict.fromkeys(cell[:2] for cell in results):
        parts.append(f"## {source}, {network}\n\n{settings[network]}")
        for scenario, claim in SCENARIOS.items():
            runs = [each for cell, each in results.items() if cell[:3] == (source, network, scenario)]
            if runs:
                parts.append(f"**{claim[0].upper()}{claim[1:]}.**\n\n{report_scenario(scenario, runs)}")
    if claims:
        title = f"## Where the paper's accuracy comes from\n\n{CLAIM_SOURCE}, test accuracy in %"
        parts.append(f"{title}\n\n{report_claim(claims)}")
    parts.append(
        "Values are shares: a client's value divided by the sum of the absolute values, mean ± standard deviation of "
        f"{seeds} seeds ({min(seeds, retrain_seeds)} for {', '.join(RETRAINING)}). Models: evaluated coalitions; "
        "trainings: whole federations besides the run itself."
    )
    return "\n\n".join(parts)


def draw(results: dict[Cell, list[Result]], source: str) -> Figure:
    """Rows: networks; columns: scenarios; lines: a client's value in each round, mean over seeds."""
    networks = list(dict.fromkeys(cell[1] for cell in results if cell[0] == source))
    scenarios = [name for name in SCENARIOS if any(cell[2] == name for cell in results)]
    size = (2.6 * len(scenarios), 0.5 + 2.1 * len(networks))
    figure = Figure(figsize=size, dpi=80, layout="constrained")
    for row, axes in zip(networks, figure.subplots(len(networks), len(scenarios), squeeze=False)):
        for name, ax in zip(scenarios, axes):
            runs = [
                torch.tensor(result.rows)
                for cell, each in results.items()
                for result in each
                if cell[:3] == (source, row, name) and result.algorithm == OURS
            ]
            if not runs:
                continue
            for client, line in enumerate(torch.stack(runs).mean(0).T):
                ax.plot(range(1, len(line) + 1), line.tolist(), label=f"client {client}", linewidth=1)
            ax.axhline(0, color="grey", linewidth=0.5)
            ax.set_title(f"{row}, {name}", fontsize="small")
            ax.tick_params(labelsize="x-small")
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=5, fontsize="small")
    return figure
