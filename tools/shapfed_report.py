"""The figures and tables of ShapFed's page (``tables/shapfed.yaml``), in Markdown and as images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import grid, panels, spread
from matplotlib.figure import Figure
from shapfed_federation import OTHERS, OURS, ROWS, TABLES, VALUES
from table_runs import Cell, Measured
from table_statistics import Table, against_best, means, paired
from torch import Tensor

from flsv.charts import PALETTE
from flsv.functional import collaborative_fairness

Results = Mapping[tuple[str, str, int], Measured]
Seeds = dict[int, Measured]  # the runs of one row and column
MODELS = {"trained": "Models after the last local training", "received": "Models received after it"}


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's."""
    return float(torch.corrcoef(torch.stack([x.flatten().double(), y.flatten().double()]))[0, 1])


def chosen(results: Results, column: str) -> dict[str, Seeds]:
    """The runs of a column, by row and seed, rows in their order."""
    order = ["values", *ROWS]
    found: dict[str, Seeds] = {}
    for row, name, seed in sorted(results, key=lambda key: (order.index(key[0]), key[2])):
        if name == column:
            found.setdefault(row, {})[seed] = results[row, name, seed]
    return found


# ---- the figures of values


def gap(cssv: Tensor) -> float:
    """Of figure 3's ``[4, 4]``: the least diagonal block's mean minus the largest off-diagonal one's."""
    (a, b), (c, d) = cssv.unflatten(0, (2, 2)).unflatten(2, (2, 2)).mean((1, 3)).tolist()
    return min(a, d) - max(b, c)


def matrix(name: str, values: Sequence[Tensor], first: int = 0, letter: str = "client ") -> str:
    """The mean of values ``[n, M]`` as a table."""
    mean = torch.stack(list(values)).mean(0)
    head = [name, *(f"class {j + first}" for j in range(mean.shape[1]))]
    return grid([head, *([f"{letter}{i + first}", *(f"{v:.2f}" for v in row)] for i, row in enumerate(mean.tolist()))])


def figure_3(seeds: Seeds) -> str:
    cssv, true = ([torch.tensor(run[name]) for run in seeds.values()] for name in ("cssv", "true"))
    gaps, agreements = [gap(each) for each in cssv], [correlation(x, y) for x, y in zip(cssv, true)]
    return "\n\n".join(
        [
            matrix("CSSV", cssv),
            matrix("true", true),
            f"Least diagonal block's mean minus largest off-diagonal one's: {spread(gaps, 2)} "
            f"({', '.join(f'{each:.2f}' for each in gaps)}). Pearson's correlation over the 16 cells: "
            f"{spread(agreements, 3)} ({', '.join(f'{each:.3f}' for each in agreements)}).",
        ]
    )


def figure_5(seeds: Seeds) -> str:
    rows = [["", *(f"P{i + 1}" for i in range(5)), "r with true", "P3 first", "P1, P5 last"]]
    agreement: dict[str, dict[int, float]] = {}
    for name in VALUES:
        values = {seed: torch.tensor(run[name]) for seed, run in seeds.items()}
        orders = [value.argsort(descending=True).tolist() for value in values.values()]
        cells = [spread([float(value[i]) for value in values.values()], 3 if name != "true" else 4) for i in range(5)]
        agreement[name] = {
            seed: correlation(value, torch.tensor(seeds[seed]["true"])) for seed, value in values.items()
        }
        first, last = (
            sum(rule(order) for order in orders) for rule in (lambda o: o[0] == 2, lambda o: set(o[3:]) == {0, 4})
        )
        kind = spread(agreement[name].values(), 2)
        rows.append([name.replace("_", " "), *cells, kind, f"{first}/{len(orders)}", f"{last}/{len(orders)}"])
    differences = [
        f"{one.replace('_', ' ')} minus {other.replace('_', ' ')} {paired(agreement[one], agreement[other])}"
        for one, other in (("cssv_of_weights", "cssv"), ("cssv_of_weights", "cgsv"), ("cssv", "cgsv"))
    ]
    return f"{grid(rows)}\n\nr with true, paired differences: {'; '.join(differences)}."


def figure_6(runs: Mapping[str, Seeds]) -> str:
    """CSSV of the runs of ShapFed-WA, and whether the three clients without class 1 have their least there."""
    values = {seed: torch.tensor(run["cssv"]) for seed, run in runs["ShapFed-WA"].items()}
    mine = {seed: float(cssv[0, 0]) for seed, cssv in values.items()}
    theirs = {seed: float(cssv[1:, 0].mean()) for seed, cssv in values.items()}
    elsewhere = {seed: float(cssv[1:, 1:].mean()) for seed, cssv in values.items()}
    least = sum(int((cssv[1:].argmin(1) == 0).sum()) for cssv in values.values())
    return "\n\n".join(
        [
            matrix("CSSV", list(values.values()), 1, "P"),
            f"The least class of P2, P3 and P4 is class 1 in {least} of {3 * len(values)} cases. Class 1, P1 minus the "
            f"mean of the others: {paired(mine, theirs)}; the others, class 1 minus their other classes: "
            f"{paired(theirs, elsewhere)}.",
        ]
    )


# ---- the tables


def fairness(run: Measured, alone: Measured, models: str) -> float:
    """Collaborative fairness: Pearson's correlation over the clients with what they have alone; NaN if undefined."""
    return float(collaborative_fairness(torch.tensor(alone[models]), torch.tensor(run[models])))


def clients(runs: Mapping[str, Seeds], models: str) -> str:
    """A row per algorithm, a column per client; a negative mean gain over training alone in bold (the paper's red)."""
    alone = runs["Individual"]
    number = len(next(iter(alone.values()))[models])
    rows = [["", *(f"P{i + 1}" for i in range(number)), "mean", "Corr.", "global"]]
    for name, seeds in runs.items():
        own = torch.tensor([run[models] for run in seeds.values()])
        gains = (own - torch.tensor([alone[seed][models] for seed in seeds])).mean(0)
        cells = [spread(own[:, i].tolist(), 1) for i in range(number)]
        cells = [f"**{cell}**" if gain < 0 else cell for cell, gain in zip(cells, gains.tolist())]
        fair, overall = "-", "-"
        if name != "Individual":
            fair = spread([fairness(run, alone[seed], models) for seed, run in seeds.items()], 2)
            overall = spread([run["global"][0] for run in seeds.values()], 1)
        rows.append([name, *cells, spread(own.mean(1).tolist(), 1), fair, overall])
    return grid(rows)


def numbers(results: Results, value: Callable[[Measured, Measured], float]) -> Table:
    """A number of every run, given the run in which everybody is alone, by column, row and seed."""
    table: dict[str, dict[str, dict[int, float]]] = {}
    for column in TABLES:
        runs = chosen(results, column)
        for row, seeds in runs.items():
            if row != "Individual" and "Individual" in runs:
                table.setdefault(column, {})[row] = {
                    seed: value(run, runs["Individual"][seed])
                    for seed, run in seeds.items()
                    if seed in runs["Individual"]
                }
    return table


def comparisons(results: Results) -> list[str]:
    """The paired differences on which the page's sentences rest."""
    whole = numbers(results, lambda run, _: run["global"][0])
    mean = numbers(results, lambda run, _: float(torch.tensor(run["received"]).mean()))
    trained = numbers(results, lambda run, _: float(torch.tensor(run["trained"]).mean()))
    fair = numbers(results, lambda run, alone: fairness(run, alone, "trained"))
    alone = numbers(results, lambda _, alone: float(torch.tensor(alone["trained"]).mean()))
    everybody = {
        column: {"Individual": next(iter(alone[column].values())), **by_row}
        for column, by_row in trained.items()
        if by_row
    }
    rows = [row for row in ROWS if row != "Individual"]
    if not whole:
        return []
    return [
        "## The global model\n\n" + means(whole, rows),
        "Against the best other row:\n\n" + against_best(whole, OURS, OTHERS),
        "Against FedAvg with equal weights, the paper's:\n\n" + against_best(whole, OURS, ["FedAvg"]),
        "## The clients' models\n\nMean of the models that the clients receive, against the best other row:\n\n"
        + against_best(mean, OURS, OTHERS),
        "Mean over the clients of the models that they trained last, %, in brackets the paper's tables 1 and 2:\n\n"
        + means(everybody, ["Individual", *rows]),
        "Against the best other row:\n\n" + against_best(trained, OURS, OTHERS),
        "Collaborative fairness of the models that they trained last, in brackets the paper's:\n\n"
        + means(fair, rows, 2),
        "Against the best other row:\n\n" + against_best(fair, OURS, OTHERS),
    ]


def figure_7(results: Results) -> str:
    """ShapFed-WA minus FedAvg, CIFAR-10 imbalanced: the global model and each client's."""
    runs = chosen(results, "CIFAR-10, imbalanced")
    table: dict[str, dict[str, dict[int, float]]] = {}
    for row in ("ShapFed-WA", "FedAvg", "FedAvg, by samples"):
        for seed, run in runs[row].items():
            table.setdefault("global", {}).setdefault(row, {})[seed] = run["global"][0]
            for client, value in enumerate(run["trained"], 1):
                table.setdefault(f"P{client}", {}).setdefault(row, {})[seed] = value
    return f"{means(table, list(ROWS))}\n\n{against_best(table, ['ShapFed-WA'], ['FedAvg'])}"


def report(results: Results, cells: Sequence[Cell]) -> str:
    """The whole page."""
    parts = comparisons(results)
    names = dict.fromkeys(["figure 3", "figure 5", *TABLES])
    for name in names:
        runs = chosen(results, name)
        if name == "figure 3" and runs:
            parts.append(f"## Figure 3\n\n{figure_3(runs['values'])}")
        elif name == "figure 5" and runs:
            parts.append(f"## Figure 5\n\n{figure_5(runs['values'])}")
        elif runs.keys() >= set(ROWS):
            if name == "CIFAR-10, heterogeneous":
                parts.append(f"## Figure 6\n\n{figure_6(runs)}")
            if name == "CIFAR-10, imbalanced":
                parts.append(f"## Figure 7\n\n{figure_7(results)}")
            parts += [f"## {name}", *(f"{title}:\n\n{clients(runs, models)}" for models, title in MODELS.items())]
    seeds = len({cell.seed for cell in cells})
    settings = "\n".join(
        f"- {name}: {described(cells, name)}" for name in names if any(c.column == name for c in cells)
    )
    parts.append(
        f"## Settings\n\n{settings}\n\n{seeds} seeds, paired: the same data, clients and initial weights in all rows."
    )
    return "\n\n".join(parts)


def described(cells: Sequence[Cell], column: str) -> str:
    """The files and overrides that all rows of a column share."""
    mine = [cell for cell in cells if cell.column == column]
    shared: dict[str, Any] = {
        name: value for name, value in mine[0].overrides.items() if all(c.overrides.get(name) == value for c in mine)
    }
    short = ", ".join(
        f"{name.rpartition('.')[2]} {value}" for name, value in shared.items() if name != "federation.metrics"
    )
    files = [file for file in mine[0].files if all(file in cell.files for cell in mine)]
    return f"{', '.join(f'`{file}`' for file in files)}; {short}"


# ---- images


def draw(results: Results, folder: Path) -> list[Path]:
    """Figures 7 and 8: balanced accuracy on the way, and figure 8's clients after the last round."""
    written = []
    for name, column in (("figure_7", "CIFAR-10, imbalanced"), ("figure_8", "HAM10000, made-up clinics")):
        runs = chosen(results, column)
        if runs.keys() >= set(ROWS):
            folder.mkdir(parents=True, exist_ok=True)
            written.append(folder / f"shapfed_{name}.png")
            (curves_of_clients(runs) if name == "figure_7" else curve_and_bars(runs)).savefig(written[-1])
    return written


def curves_of_clients(runs: Mapping[str, Seeds]) -> Figure:
    """A panel for the global model and for each client; a line per algorithm, mean over seeds."""
    number = len(next(iter(runs["FedAvg"].values()))["trained"])
    figure = Figure(figsize=(2.6 * (number + 1), 2.6), dpi=80, layout="constrained")
    axes = panels(figure, 1, number + 1, sharey=True)
    for place, ax in enumerate(axes):
        for row in ("FedAvg", "FedAvg, by samples", "ShapFed-WA"):
            _line(ax, runs[row], row, "trained" if place else "global", max(place - 1, 0))
        ax.set_title(f"P{place}" if place else "global", fontsize="small")
        ax.set_xlabel("round", fontsize="small")
    axes[0].set_ylabel("balanced accuracy, %", fontsize="small")
    axes[0].legend(fontsize="x-small")
    return figure


def curve_and_bars(runs: Mapping[str, Seeds]) -> Figure:
    """Left: the mean of the clients' models on the way. Right: the clients after the last round, all algorithms."""
    figure = Figure(figsize=(11, 3.3), dpi=80, layout="constrained")
    left, right = panels(figure, 1, 2, width_ratios=[2, 3])
    colors = dict(zip(runs, PALETTE))  # an algorithm's, in both panels
    for row in ("FedAvg", "FedAvg, by samples", "ShapFed-WA", "ShapFed"):
        _line(left, runs[row], row, "trained", None, color=colors[row])
    left.set_xlabel("round", fontsize="small")
    left.set_ylabel("balanced accuracy, %", fontsize="small")
    for place, (row, seeds) in enumerate(runs.items()):
        own = torch.tensor([run["trained"] for run in seeds.values()])
        width = 0.8 / len(runs)
        at = [i + (place - len(runs) / 2 + 0.5) * width for i in range(own.shape[1])]
        error = own.std(0).tolist() if len(own) > 1 else None
        bars = {"yerr": error, "color": colors[row], "label": row}
        right.bar(at, own.mean(0).tolist(), width, error_kw={"linewidth": 0.7}, **bars)
    right.set_xticks(range(own.shape[1]), [f"P{i + 1}" for i in range(own.shape[1])])
    handles = right.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=len(runs), fontsize="x-small")  # over no bar
    return figure


def _line(ax: Any, seeds: Seeds, name: str, models: str, client: int | None, **style: Any) -> None:
    """One client's curve, or that of the clients' mean."""
    every = [torch.tensor([scores[models] for _, scores in run["curve"]]) for run in seeds.values()]
    mean = torch.stack(every).mean(0)
    ax.plot(
        [rounds for rounds, _ in next(iter(seeds.values()))["curve"]],
        (mean.mean(1) if client is None else mean[:, client]).tolist(),
        label=name,
        linewidth=1.2,
        **style,
    )
