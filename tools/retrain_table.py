"""How well a few retrainings tell what clients are worth: of the shipped tables of all coalitions, a few are shown.

    python tools/retrain_table.py [--sets tuning held_out fresh] [--values BENCH/values.csv] [--out FILE.md]

Of each federation of ``flsv.benchmark`` every coalition has been trained with several seeds. ``flsv retrain`` is given
the coalitions that it would have trained, of one seed (or of two, averaged), and its values are compared with the mean
Shapley values of the other seeds; and its shares with those by all coalitions of the same seed, as are those of
KernelSHAP and of the fit without a bound on the noise. ``--values`` is what ``flsv bench`` has written: then the metric
``--hint`` of a run joins the fit. Takes seconds: nothing is trained.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from unittest.mock import patch

import torch
from common import grid
from scipy import stats
from torch import Tensor

from flsv.benchmark import federation, names, truth_table
from flsv.benchmark.federation import SETS
from flsv.benchmark.scores import share_error
from flsv.benchmark.truth import Truth
from flsv.errors import ConfigurationError
from flsv.functional import ShapleyEstimate, few_coalitions, few_coalitions_shapley, kernel_shap
from flsv.functional.shapley.few_coalitions import Which, retrained_shapley
from flsv.functional.shapley.game import shapley_of_table, t_quantile

#: Title, coalitions, seeds of each, and whether a run's metric joins the fit.
DESIGNS: tuple[tuple[str, Which, int, bool], ...] = (
    ("each alone, n + 2", "singles", 1, False),
    ("with the hint", "singles", 1, True),
    ("all but one, n + 2", "leave-one-out", 1, False),
    ("each alone and pairs", "pairs", 1, False),
    ("both, 2 n + 2", "both", 1, False),
    ("both, two seeds", "both", 2, False),
    ("all 2^n", "all", 1, False),
    ("all 2^n, two seeds", "all", 2, False),
)
Hints = dict[str, dict[str, dict[int, float]]]  # federation, seed, client
LEVEL = 0.9
#: Seeds of the trainings that a table needs before it is asked whether an interval over two of them holds the mean of
#: the others: with one other, that one's own error is most of the distance.
ENOUGH = 4


def unbounded(masks: Tensor, utilities: Tensor, noise: float | None) -> ShapleyEstimate:
    """The fit of version 0.2.0, which may take everything for noise."""
    with patch.object(importlib.import_module("flsv.functional.shapley.few_coalitions"), "MOST_NOISE", math.inf):
        return few_coalitions_shapley(masks, utilities, noise)


def by_kernel_shap(masks: Tensor, utilities: Tensor, noise: float | None) -> ShapleyEstimate:
    """It has no standard error."""
    values = kernel_shap(masks, utilities)
    return ShapleyEstimate(values, torch.full_like(values, torch.nan), len(masks))


#: What makes values of a few coalitions' utilities, given the noise where seeds tell it.
FITS: dict[str, Callable[[Tensor, Tensor, float | None], ShapleyEstimate]] = {
    "noise without a bound (0.2.0)": unbounded,
    "the fit": few_coalitions_shapley,
    "KernelSHAP": by_kernel_shap,
}


def of_table(table: Tensor, masks: Tensor) -> Tensor:
    """``[s, K]``, the utilities of these coalitions, of ``[s, 2^n]``."""
    return table[:, (masks * 2 ** torch.arange(masks.shape[1])).sum(1)]


def read_hints(path: Path | None, metric: str) -> Hints:
    """What a metric said in the runs of ``flsv bench``."""
    hints: Hints = {}
    if path is not None:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if (row["metric"], row["condition"]) == (metric, "base") and row["client"].isdigit():
                    seeds = hints.setdefault(row["federation"], {})
                    seeds.setdefault(row["seed"], {})[int(row["client"])] = float(row["value"])
    return hints


def noise_of(table: Tensor) -> float | None:
    """Standard deviation of the seeds' mean ``[seeds, K]``; None of one seed, which does not tell it."""
    return float(table.var(0).mean().sqrt()) / len(table) ** 0.5 if len(table) > 1 else None


def holds(values: Tensor, half: Tensor, right: Tensor) -> float:
    """The share of clients whose interval holds their value; NaN without intervals."""
    held = ((values - right).abs() <= half + 1e-9).double()
    return float(torch.where(half.isnan(), half, held).mean())


def trials(
    truth: Truth, which: Which, count: int, hints: Sequence[Tensor] | None
) -> Iterator[tuple[float, float, float]]:
    """Rank and linear correlation with the other seeds, and the share of clients whose interval holds their value."""
    masks = few_coalitions(truth.num_clients, which)
    for first, given, others in splits(len(truth.seeds), count):
        table, hint = of_table(truth.utilities[given], masks), None if hints is None else hints[first % len(hints)]
        values, half = retrained_shapley(masks, table, hint, LEVEL)
        right = truth.values[others].mean(0)
        rank, linear = (float(of(values, right).statistic) for of in (stats.spearmanr, stats.pearsonr))
        yield rank, linear, holds(values, half, right) if which != "all" or len(truth.seeds) >= ENOUGH else math.nan


def splits(seeds: int, count: int) -> Iterator[tuple[int, list[int], list[int]]]:
    """The first, those that are given, and the others: all sets of so many seeds."""
    for given in combinations(range(seeds), count):
        yield given[0], list(given), [seed for seed in range(seeds) if seed not in given]


def errors(tables: Mapping[str, Tensor]) -> str:
    """What every fit's shares and intervals miss, of federations' tables ``[s, 2^n]`` of all coalitions."""
    head = [
        "", "trainings", "share error, same seeds", "largest of a federation", "other seeds",
        f"held by {LEVEL:.0%} intervals, same seeds", "other seeds",
    ]  # fmt: skip
    rows = [head]
    for title, which, count, hinted in DESIGNS:
        exactly = which == "all"
        if hinted or (exactly and count == 1):  # of one seed nothing tells an error
            continue
        for name, fit in FITS.items():
            if exactly and name != "the fit":  # all are exact
                continue
            found = []
            for table in tables.values():
                masks = few_coalitions(int(math.log2(table.shape[1])), which)
                exact = shapley_of_table(table.T.contiguous()).T
                cases = []
                for _, given, others in splits(len(table), count):
                    some = of_table(table[given], masks)
                    if exactly:
                        values, half = retrained_shapley(masks, some, level=LEVEL)
                    else:
                        fitted = fit(masks, some.mean(0), noise_of(some))
                        values, half = fitted.values, t_quantile(LEVEL) * fitted.stderr
                    same, other = exact[given].mean(0), exact[others].mean(0)
                    missed = (share_error(values, same), share_error(values, other))
                    enough = not exactly or len(table) >= ENOUGH
                    held = (holds(values, half, same), holds(values, half, other)) if enough else (math.nan,) * 2
                    cases.append((*missed, *held))
                found.append(torch.tensor(cases, dtype=torch.float64).mean(0))
            mean, most = torch.stack(found).nanmean(0).tolist(), float(torch.stack(found)[:, 0].max())
            numbers = [f"{each:.3f}" if each == each else "-" for each in (mean[0], most, *mean[1:])]
            rows.append([name, title, *numbers])
    return grid(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--values", type=Path, help="values.csv of flsv bench, for the hint")
    parser.add_argument("--hint", default="one_round", help="the metric that is taken from there")
    parser.add_argument("--out", type=Path, help="a Markdown file to write, besides printing")
    options = parser.parse_args()
    text, hints = [], read_hints(options.values, options.hint)
    designs = [design for design in DESIGNS if hints or not design[3]]
    for chosen in options.sets:
        rows = [["", "clients", "seeds", *(title for title, *_ in designs)]]
        found: list[list[tuple[float, float, float]]] = [[] for _ in designs]
        tables = {}
        for name in names():
            each = federation(name)
            if each.set != chosen:
                continue
            try:
                truth = truth_table(each)
            except ConfigurationError as why:
                print(f"{name} is left out: {why}")
                continue
            if truth.utilities is None:
                print(f"{name} is left out: not all of its coalitions are trained")
                continue
            tables[name] = truth.utilities
            cells = []
            told = [
                torch.tensor([said[i] for i in range(truth.num_clients)], dtype=torch.float64)
                for _, said in sorted(hints.get(name, {}).items())
            ]
            for place, (_, which, count, hinted) in enumerate(designs):
                if len(truth.seeds) <= count or (hinted and not told):
                    cells.append("-")
                    continue
                mean = torch.tensor(list(trials(truth, which, count, told if hinted else None))).nanmean(0).tolist()
                found[place].append((mean[0], mean[1], mean[2]))
                cells.append(f"{mean[0]:.2f}")
            rows.append([name, str(truth.num_clients), str(len(truth.seeds)), *cells])
        for title, place, summary in (
            ("mean", 0, lambda column: column.nanmean()),
            ("least", 0, lambda column: column.min()),
            ("mean of Pearson's r", 1, lambda column: column.nanmean()),
            (f"held by {LEVEL:.0%} intervals", 2, lambda column: column.nanmean()),
        ):
            numbers = [float(summary(torch.tensor(column)[:, place])) if column else math.nan for column in found]
            cells = [f"{each:.3f}" if each == each else "-" for each in numbers]
            rows.append([f"**{title}**", "", "", *cells])
        title = f"**{chosen.replace('_', ' ')}**"
        text += [
            f"{title}, Spearman's correlation with the other seeds' values\n\n{grid(rows)}",
            f"{title}, shares and intervals\n\n{errors(tables)}",
        ]
    page = "\n\n".join(text)
    print(page)
    if options.out:
        options.out.write_text(page + "\n")


if __name__ == "__main__":
    main()
