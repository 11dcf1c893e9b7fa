"""The report of pFedSV's tables and figures (``tables/pfedsv.yaml``)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import pfedsv_communication
import torch
from common import grid, spread
from matplotlib.figure import Figure
from pfedsv_cells import NOISES, ORDER, OURS, ROWS, WEIGHTS, K
from table_cells import Results
from table_runs import Cell, Measured
from table_statistics import Table, against, against_best, gather, means, over_columns
from torch import Tensor

from flsv.metrics.plot import plot_contributions
from flsv.privacy import gaussian_epsilon

DELTA = 1e-5


def accuracies(results: Results, models: str | None, prefix: str = "") -> Table:
    """Mean over the clients by column, row and seed, of one of their two models, or (None) of the one that the
    algorithm's authors deploy; noise apart."""
    rows = {}
    for (row, column, seed), result in results.items():
        if not column.startswith(prefix) or "received" not in result:
            continue
        for name, (run, deployed) in ROWS.items():
            if run == row:
                rows[name, column, seed] = {"accuracy": statistics.mean(result[models or deployed])}
    return gather(rows, lambda r: r["accuracy"])


# ---- tables I and II


def comparison(results: Results, partition: str) -> list[str]:
    deployed = accuracies(results, None, partition)
    if not deployed:
        return []
    names = [f"{name} ({ROWS[name][1]})" for name in ORDER]
    shown = {c: {f"{n} ({ROWS[n][1]})": rows[n] for n in ORDER if n in rows} for c, rows in deployed.items()}
    others = [name for name in ORDER if name not in OURS]
    ours = [name for name in OURS if any(name in rows for rows in deployed.values())]
    parts = ["Each method's own model, test accuracy, %, in brackets the paper's:", means(shown, names)]
    if ours:
        parts += ["Minus the best other method, 95 % paired interval:", against_best(deployed, ours, others)]
    for row in ours:
        parts.append(against(deployed, row, ["Separate", "FedAvg+FT"]))
    if ours and (overall := over_columns(deployed, "mean of the columns")):
        best = [against_best(overall, [row], others).splitlines() for row in ours]
        parts += ["\n".join([*best[0][:2], *(lines[2] for lines in best)])]
        parts += [against(overall, row, ["Separate", "FedAvg+FT"]) for row in ours]
    for models in ("received", "trained"):
        table = accuracies(results, models, partition)
        rows = [name for name in ORDER if name != "FedAvg+FT"]
        parts += [f"The models {models} in the last round:", means(table, rows)]
        if ours and models == "trained":
            parts += ["Minus the best other method:", against_best(table, ours, [n for n in rows if n not in OURS])]
    runs = {
        key: r for key, r in results.items() if key[1].startswith(partition) and "steps" in r and "sigma" not in key[0]
    }
    steps = gather(runs, lambda r: r["steps"])
    parts += [
        "Gradient steps of a client in a round:",
        means(steps, [n for n in ORDER if n != "FedAvg+FT"], 1, bold=False),
    ]
    cpu = gather(runs, lambda r: r["cpu"])
    parts += ["CPU seconds of a run:", means(cpu, [n for n in ORDER if n != "FedAvg+FT"], 1, bold=False)]
    return parts


# ---- equation 6


def self_weights(results: Results) -> list[str]:
    """What a client's own model is given for its distance to itself."""
    runs = {key: result for key, result in results.items() if key[1].startswith("self weight")}
    if not runs:
        return []
    rows = list(dict.fromkeys(row for row, _, _ in runs))
    by_models = {
        (row, models, seed): {"accuracy": statistics.mean(result[models])}
        for (row, _, seed), result in runs.items()
        for models in ("received", "trained")
    }
    table = gather(by_models, lambda r: r["accuracy"])
    parts = ["## Equation 6: the distance of a model to itself"]
    parts += ["What stands for the distance of a model to itself; in brackets the paper's:", means(table, rows)]
    parts.append("Minus training alone, and minus FedAvg, 95 % paired interval:")
    for row in rows:
        if row.startswith("pFedSV"):
            parts.append(against(table, row, ["Separate", "FedAvg"]))
    return parts


# ---- tables III and IV


def privacy(results: Results, rounds: int) -> list[str]:
    runs = {key: result for key, result in results.items() if "sigma" in key[0]}
    columns = {column for _, column, _ in runs}
    near = {k: r for k, r in results.items() if k[1] in columns and (k in runs or k[0] in ("FedAvg", "pFedSV"))}
    if not runs:
        return []
    rows = [
        ["", "epsilon", *(f"{column}, {models}" for column in sorted(columns) for models in ("received", "trained"))]
    ]
    tables = {m: gather(near, lambda r, m=m: statistics.mean(r[m])) for m in ("received", "trained")}
    names = [f"{name}{noise}" for name in ("FedAvg", "pFedSV") for noise in ("", *(f", sigma {s:g}" for s in NOISES))]
    for name in names:
        sigma = name.partition(", sigma ")[2]
        epsilon = f"{gaussian_epsilon(float(sigma), rounds, delta=DELTA):,.1f}" if sigma else "∞"
        found = [
            spread(tables[models].get(column, {}).get(name, {}).values(), 1)
            for column in sorted(columns)
            for models in ("received", "trained")
        ]
        if any(cell != "-" for cell in found):
            rows.append([name, epsilon, *found])
    return [f"## Tables III and IV: noise, {rounds} rounds, delta = {DELTA:g}, clipped at 1", grid(rows)]


# ---- figures


def figure_2(results: Results) -> list[str]:
    runs = {key: {"a": r["received"][0]} for key, r in results.items() if key[1].startswith("figure 2")}
    if not runs:
        return []
    table, rows = gather(runs, lambda r: r["a"]), ["A to E", "A to C", "A"]
    parts = ["## Figure 2: A's test accuracy, %, of the average of whose models", means(table, rows)]
    return [*parts, against(table, "A to C", ["A to E", "A"])]


def figure_4(results: Results) -> list[str]:
    runs = {key: result for key, result in results.items() if key[1].startswith("figure 4")}
    if not runs:
        return []
    rows, parts = ["alone", *WEIGHTS], ["## Figure 4: those who are relevant are known; who weighs them how"]
    for models in ("received", "trained"):
        table = gather(runs, lambda r, m=models: statistics.mean(r[m]))
        parts += [
            f"The models {models} in the last round:",
            means(table, rows),
            against(table, "together", rows[:1] + rows[2:]),
        ]
    return parts


def relevance(results: Results) -> list[str]:
    """Figures 3 and 7."""
    own = {
        key: result
        for key, result in results.items()
        if not key[1].startswith(("figure", "self")) and "sigma" not in key[0]
    }
    judged = {key: result for key, result in own.items() if "auroc" in result}
    apart = {key: r for key, r in own.items() if key[0] == "FedAvg" and "distance_auroc" in r}
    parts = []
    if apart:
        parts += ["## Figures 3 and 7: relevance", "AUROC of the distances of the trained models (FedAvg, last round):"]
        parts.append(means(gather(apart, lambda r: r["distance_auroc"]), ["FedAvg"], 2, bold=False))
    head = ["", "AUROC after 10 rounds", "at the end", "relevant pairs with a score above 0, %", "others, %"]
    rows = [[*head, "clients that found all", "within the bound"]]
    for row, column in dict.fromkeys((row, column) for row, column, _ in judged):
        runs = [result for (r, c, _), result in judged.items() if (r, c) == (row, column)]
        found = [pair for each in runs for pair in zip(each["found"], each["bound"])]
        within = sum(first is not None and first <= bound for first, bound in found)
        cells = [spread((each[name] for each in runs), 2) for name in ("auroc_10", "auroc")]
        cells += [spread((each["above"][place] for each in runs), 0) for place in (0, 1)]
        everybody = sum(first is not None for first, _ in found)
        rows.append([f"{column}, {row}", *cells, f"{everybody} of {len(found)}", f"{within} of {len(found)}"])
    return [*parts, grid(rows)] if judged else parts


def communication(results: Results) -> list[str]:
    """Figures 8 to 10, with the downloads of the pathological runs of pFedSV."""
    runs = [
        torch.tensor(result["downloads"])
        for (row, column, _), result in results.items()
        if row == "pFedSV" and column.startswith("pathological") and "clients" not in column
    ]
    if not runs:
        return []
    title = "## Figures 8 to 10: millions of parameters that a client sends and receives"
    return [title, pfedsv_communication.report(torch.stack(runs, dim=1).round(), K)]


def figure_7(results: Results) -> Figure:
    """The truth and the scores of the first federation of each method that has some."""
    shown: dict[str, Measured] = {}
    for (row, column, _), result in results.items():
        if "relevance" in result and column.startswith("pathological") and "sigma" not in row:
            shown.setdefault(row, result)
    if not shown:
        raise ValueError("no kept cell of a pathological column has scores.")
    first = next(iter(shown.values()))
    panels: list[tuple[str, Tensor]] = [("shared label distribution", torch.tensor(first["overlap"]))]
    panels += [(row, torch.tensor(result["relevance"])) for row, result in shown.items()]
    figure = Figure(figsize=(5.2 * len(panels), 4.2), dpi=80, layout="constrained")
    for ax, (name, matrix) in zip(figure.subplots(1, len(panels)), panels):
        plot_contributions(matrix.float().fill_diagonal_(float("nan")), ax=ax, name=name, columns="client")
    return figure


def draw(results: Results, folder: Path) -> None:
    """Figure 7, where its cells are there."""
    if any("relevance" in result for result in results.values()):
        folder.mkdir(parents=True, exist_ok=True)
        figure_7(results).savefig(folder / "pfedsv_relevance.png")


# ---- all of it


def report(results: Results, cells: Sequence[Cell]) -> str:
    """Everything, in Markdown."""
    parts = []
    for number, partition in (("I", "pathological"), ("II", "Dirichlet")):
        if found := comparison(results, partition):
            parts += [f"## Table {number}: {partition}", *found]
    parts += (
        self_weights(results)
        + privacy(results, rounds=20)
        + figure_2(results)
        + figure_4(results)
        + relevance(results)
        + communication(results)
    )
    return "\n\n".join(parts)


def short(cell: Cell) -> dict[str, object]:
    """As few images as the partition can be made of, for any seed."""
    hundred = "100 clients" in cell.column
    few: dict[str, object] = {"federation.local_epochs": 1, "data.splits.max_samples": 3000 if hundred else 1000}
    if cell.column.startswith("pathological, CIFAR-100"):  # a class has 2 or 20 holders, each of which needs one of it
        few["data.splits.max_samples"] = 6000 if hundred else 3000
    if cell.column.startswith("Dirichlet"):
        few["data.partitioner.init_args.min_samples"] = 5 if hundred else 20
        if hundred:  # as few as 1000 draws of a partition can do with
            few["data.splits.max_samples"] = 12000
    return few
