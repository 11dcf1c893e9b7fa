"""The checks, tables and figures of Guo et al.'s comparison (``tables/guo.yaml``)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from common import grid, panels
from common import spread as mean_and_deviation
from guo_federation import (
    ALGORITHMS,
    CLAIMED,
    HELD_OUT,
    NETWORKS,
    OURS,
    OURS_FIXED,
    OURS_RAW,
    RETRAINING,
    SCENARIOS,
    SERVER_LRS,
    SOURCES,
    raw_sum,
)
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from table_runs import Cell, Measured
from table_statistics import Difference, Table, against_best, means, paired

Results = Mapping[tuple[str, str, int], Measured]
Found = dict[str, dict[int, dict[str, Any]]]  # algorithm and seed to what it says

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


def shares(values: Sequence[float]) -> list[float]:
    """The values divided by the sum of their sizes, so that algorithms compare."""
    total = sum(map(abs, values))
    return [value / total if total else 0.0 for value in values]


def verdict(scenario: str, runs: Sequence[Sequence[float]]) -> str:
    """On the mean over seeds of the shares, and how many seeds agree with the check on their own."""
    met, figures = check(scenario, [statistics.mean(column) for column in zip(*runs)])
    return f"{'met' if met else 'not met'}: {figures} ({sum(check(scenario, run)[0] for run in runs)}/{len(runs)})"


def agreement(scenario: str, values: Sequence[float]) -> float:
    """One number for how well shares show what they have to: the larger, the better.

    Same: minus how far apart they are, in %. Sizes and noise: Spearman's correlation with the size, with minus the
    noise. Mixtures: the last client's share. Biased: the last client's share minus the largest other one.
    """
    if scenario == "same":
        return -100 * spread(values)
    if scenario == "mixtures":
        return values[-1]
    if scenario == "biased":
        return values[-1] - max(values[:-1])
    order = range(len(values)) if scenario == "sizes" else range(len(values), 0, -1)
    return float(spearmanr(list(order), values).statistic) if len(set(values)) > 1 else 0.0


# ---- reports


def found(results: Results, column: str) -> Found:
    """What all algorithms say in a column, with the accuracy and the training time of their run."""
    runs: Found = {}
    for (row, name, seed), result in sorted(results.items(), key=lambda item: item[0][2]):
        if name != column:
            continue
        accuracy = result["accuracy"]
        if row == "retrained" and ("rebuilt", column, seed) in results:
            accuracy = results["rebuilt", column, seed]["accuracy"]  # the grand coalition is that run
        for algorithm, said in result["algorithms"].items():
            more = {"accuracy": accuracy, "training": result["training"], "shares": shares(said["values"])}
            runs.setdefault(algorithm, {})[seed] = {**said, **more}
    return {name: runs[name] for name in ALGORITHMS if name in runs}


def report_scenario(scenario: str, runs: Found) -> str:
    """One table, a line per algorithm."""
    clients = len(next(iter(runs[OURS].values()))["values"])
    head = ["", *(f"client {i}" for i in range(clients)), "check (seeds that meet it)", "accuracy, %"]
    rows = [[*head, "training, s", "valuation, s", "models", "trainings"]]
    for algorithm, seeds in runs.items():
        said, each = list(seeds.values()), [run["shares"] for run in seeds.values()]
        rows.append(
            [
                algorithm,
                *(mean_and_deviation(column, 3) for column in zip(*each)),
                verdict(scenario, each),
                *(
                    mean_and_deviation((run[name] for run in said if run[name] is not None), 1)
                    for name in ("accuracy", "training", "valuation")
                ),
                *(f"{statistics.mean(run[name] for run in said):.0f}" for name in ("coalitions", "trainings")),
            ]
        )
    return grid(rows)


def report_checks(results: Results) -> str:
    """In how many of the cases the mean over seeds meets every check, and in how many federations."""
    rows = [["", *SCENARIOS]]
    for algorithm in ALGORITHMS:
        cells = []
        for scenario in SCENARIOS:
            cases = [found(results, f"{source}, {network}, {scenario}") for source, network in cases_of()]
            runs = [[run["shares"] for run in case[algorithm].values()] for case in cases if algorithm in case]
            met = sum(verdict(scenario, each).startswith("met") for each in runs)
            single = [check(scenario, run)[0] for each in runs for run in each]
            cells.append(f"{met} of {len(runs)} ({sum(single)} of {len(single)} runs)" if runs else "-")
        if any(cell != "-" for cell in cells):
            rows.append([algorithm, *cells])
    return grid(rows)


def cases_of() -> list[tuple[str, str]]:
    """Data set and network, softmax regression first."""
    return [(source, network) for network, source in product(NETWORKS, SOURCES)]


def report_agreement(results: Results, network: str) -> list[str]:
    """Each scenario's one number by algorithm, and ours against the best other one."""
    table: Table = {}
    for scenario, source in product(SCENARIOS, SOURCES):
        runs = found(results, f"{source}, {network}, {scenario}")
        if runs:
            table[f"{scenario}, {source}"] = {  # type: ignore[index]
                algorithm: {seed: agreement(scenario, run["shares"]) for seed, run in seeds.items()}
                for algorithm, seeds in runs.items()
            }
    if not table:
        return []
    own = (OURS, OURS_FIXED, OURS_RAW)
    return [
        f"**{network}**\n\n{means(table, ALGORITHMS, 2)}",
        f"Ours against the best other algorithm:\n\n{against_best(table, own)}",
    ]


def report_undivided(results: Results) -> str:
    """The version without the division by the round's sum minus the paper's two, in every case and scenario."""
    columns = {f"{source}, {network}": f"{source}, {network}" for source, network in cases_of()}
    columns[f"{HELD_OUT}, softmax"] = f"held out: {HELD_OUT}, softmax"
    rows = [["", "minus", *SCENARIOS]]
    for case, column in columns.items():
        for other in (OURS, OURS_FIXED):
            cells = []
            for scenario in SCENARIOS:
                runs = found(results, f"{column}, {scenario}")
                told = [
                    {seed: agreement(scenario, run["shares"]) for seed, run in runs.get(name, {}).items()}
                    for name in (OURS_RAW, other)
                ]
                cells.append(str(paired(*told)) if told[0] else "-")
            if any(cell != "-" for cell in cells):
                rows.append([case, other, *cells])
    return grid(rows)


def gain(results: Results, column: str, row: str, other: str) -> Difference:
    """Of accuracy, in points, by pairs."""
    values = {
        name: {seed: run["accuracy"] for (who, where, seed), run in results.items() if (who, where) == (name, column)}
        for name in (row, other)
    }
    return paired(values[row], values[other])


def report_gains(results: Results) -> str:
    """Accuracy of DivergenceWeighted minus FedAvg, in every case and scenario."""
    rows = [["", *SCENARIOS]]
    for source, network in cases_of():
        columns = [f"{source}, {network}, {scenario}" for scenario in SCENARIOS]
        cells = [gain(results, column, "ours", "rebuilt") for column in columns]
        if any(cell.pairs for cell in cells):
            rows.append([f"{source}, {network}", *(f"{cell}{p_of(cell)}" if cell.pairs else "-" for cell in cells)])
    return grid(rows)


def p_of(difference: Difference) -> str:
    return "" if difference.p != difference.p else f", p = {difference.p:.2g}"


def report_claim(results: Results) -> str:
    """Accuracies by network and scenario, and the gains in each kind of batches and step."""
    columns = [f"claim: {network}, {scenario}" for network, scenario in product(NETWORKS, CLAIMED)]
    known = [column for column in columns if any(where == column for _, where, _ in results)]
    rows = [["batches, step", "", *(column.removeprefix("claim: ") for column in known)]]
    for kind, rate in product(("shuffled", "class-ordered"), SERVER_LRS):
        name = f"{kind}, server_lr {rate:g}"
        for row in ("FedAvg", "DivergenceWeighted"):
            rows.append(
                [
                    name,
                    row,
                    *(
                        mean_and_deviation(
                            (
                                r["accuracy"]
                                for (who, where, _), r in results.items()
                                if (who, where) == (f"{name}, {row}", column)
                            ),
                            1,
                        )
                        for column in known
                    ),
                ]
            )
        gains = [gain(results, column, f"{name}, DivergenceWeighted", f"{name}, FedAvg") for column in known]
        rows.append([name, "difference", *(f"{each}{p_of(each)}" for each in gains)])
    return grid(rows)


def report_sweep(results: Results, source: str) -> str:
    """Table 2 or 3: the gain over FedAvg by a and b, with weights that sum to 1 and with the formula's own."""
    column = f"sweep: {source}"
    rows = {row for row, where, _ in results if where == column and row != "FedAvg"}
    numbers = sorted({tuple(float(part) for part in row.split(", ")[:2]) for row in rows})
    every_a, every_b = sorted({a for a, _ in numbers}), sorted({b for _, b in numbers})
    parts = []
    for kind in ("normalized", "as they are"):
        gains = {(a, b): gain(results, column, f"{a:g}, {b:g}, {kind}", "FedAvg") for a, b in numbers}
        gains = {place: each for place, each in gains.items() if each.pairs}  # fewer where not all cells are finished
        if not gains:
            continue
        table = [["a \\ b", *(f"{b:g}" for b in every_b)]]
        table += [[f"{a:g}", *(str(gains.get((a, b), "-")) for b in every_b)] for a in every_a]
        best = max(gains, key=lambda place: gains[place].mean)
        step = "" if kind == "normalized" else f", where the weights sum to {raw_sum(*best):.2g}"
        parts.append(
            f"Weights {'that sum to 1' if kind == 'normalized' else 'as the formula gives them'}; the largest gain at "
            f"a = {best[0]:g}, b = {best[1]:g}{step}:\n\n{grid(table)}"
        )
    return "\n\n".join(parts)


def report_figure_2(results: Results) -> str:
    """Divergence and accuracy of models trained alone."""
    rows, lines = [], []
    for source in SOURCES:
        runs = {seed: run for (_, where, seed), run in results.items() if where == f"figure 2: {source}"}
        if not runs:
            continue
        values = list(zip(*(run["divergence"] for run in runs.values())))
        rows = rows or [["", *(f"F = {statistics.mean(each):.2f}" for each in values)]]
        rows.append(
            [source, *(mean_and_deviation(each, 1) for each in zip(*(run["accuracy"] for run in runs.values())))]
        )
        steps = [
            paired({s: r["accuracy"][i + 1] for s, r in runs.items()}, {s: r["accuracy"][i] for s, r in runs.items()})
            for i in range(4)
        ]
        lines.append(f"{source}, from one to the next: {'; '.join(map(str, steps))}.")
    return "\n\n".join([grid(rows), *lines])


def report(results: Results, cells: Sequence[Cell]) -> str:
    """The whole page."""
    columns = {column for _, column, _ in results}
    parts = []
    if any(column.startswith(SOURCES) for column in columns):
        checks = "Cases (data set and network) whose mean over seeds meets the check; single runs in brackets."
        parts.append(f"## Checks\n\n{checks}\n\n{report_checks(results)}")
        about = " ".join((agreement.__doc__ or "").split("\n\n", 1)[1].split())
        parts += [
            f"## How well the values show it\n\n{about}",
            *report_agreement(results, "softmax"),
            *report_agreement(results, "lenet5"),
        ]
        parts.append(
            "## Without the division by the round's sum\n\nThe same numbers of "
            f'"{OURS_RAW}" minus those of the paper\'s two, by pairs; above 0: better.\n\n{report_undivided(results)}'
        )
        parts.append(
            "## Accuracy\n\nOf DivergenceWeighted minus FedAvg, in points, by pairs; bold: the interval excludes 0. In "
            "brackets the paper's: its accuracy less that of the best other row of its tables 4 to 11, which have no "
            "FedAvg.\n\n" + report_gains(results)
        )
    if any(column.startswith("claim") for column in columns):
        parts.append(
            f"## Where the paper's accuracy comes from\n\nmnist, test accuracy in %\n\n{report_claim(results)}"
        )
    for number, source in enumerate(SOURCES, 2):
        if f"sweep: {source}" in columns:
            parts.append(f"## Table {number}: a and b, {source}\n\n{report_sweep(results, source)}")
    if any(column.startswith("figure 2") for column in columns):
        parts.append(f"## Figure 2\n\nTest accuracy of models trained alone, in %.\n\n{report_figure_2(results)}")
    for source, network in cases_of():
        for scenario, claim in SCENARIOS.items():
            runs = found(results, f"{source}, {network}, {scenario}")
            if OURS in runs:
                title = f"## {source}, {network}: {scenario}\n\n{claim[0].upper()}{claim[1:]}."
                parts.append(f"{title}\n\n{report_scenario(scenario, runs)}")
    seeds = len({cell.seed for cell in cells})
    parts.append(
        "Values are shares: a client's value divided by the sum of the absolute values, mean ± standard deviation of "
        f"{seeds} seeds, which are paired. {', '.join(RETRAINING)} retrain coalitions. Models: evaluated coalitions; "
        "trainings: whole federations besides the run itself."
    )
    return "\n\n".join(parts)


# ---- images


def draw_all(results: Results, folder: Path) -> None:
    """A figure per data set."""
    for source in SOURCES:
        if any(column.startswith(f"{source}, ") for _, column, _ in results):
            folder.mkdir(parents=True, exist_ok=True)
            draw(results, source).savefig(folder / f"guo_{source}.png")


def draw(results: Results, source: str) -> Figure:
    """Rows: networks; columns: scenarios; lines: a client's value in each round, mean over seeds."""
    cases = [found(results, f"{source}, {network}, {scenario}") for network, scenario in product(NETWORKS, SCENARIOS)]
    networks = [
        network for place, network in enumerate(NETWORKS) if any(cases[place * len(SCENARIOS) :][: len(SCENARIOS)])
    ]
    figure = Figure(figsize=(2.6 * len(SCENARIOS), 0.5 + 2.1 * len(networks)), dpi=80, layout="constrained")
    shown = product(networks, SCENARIOS)
    for (network, scenario), ax in zip(shown, panels(figure, len(networks), len(SCENARIOS))):
        runs = found(results, f"{source}, {network}, {scenario}")
        if OURS in runs:
            lines = torch.tensor([run["rows"] for run in runs[OURS].values()]).mean(0).T
            for client, line in enumerate(lines):
                ax.plot(range(1, len(line) + 1), line.tolist(), label=f"client {client}", linewidth=1)
        ax.axhline(0, color="grey", linewidth=0.5)
        ax.set_title(f"{network}, {scenario}", fontsize="small")
        ax.tick_params(labelsize="x-small")
    handles = next(handles for ax in figure.axes if (handles := ax.get_legend_handles_labels())[0])
    figure.legend(*handles, loc="outside lower center", ncols=5, fontsize="small")
    return figure
