"""How well a few trainings settle what clients are worth: of the shipped tables of all coalitions, a few are shown.

    python tools/settle_table.py [--sets tuning held_out] [--values BENCH/values.csv] [--out FILE.md]

Of each federation of ``flsv.benchmark`` every coalition has been trained with several seeds. ``flsv settle`` is given
the coalitions that it would have trained, of one seed (or of two, averaged), and its values are compared with the mean
Shapley values of the other seeds. ``--values`` is what ``flsv bench`` has written: then the metric ``--hint`` of a run
joins the fit. Takes seconds: nothing is trained.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from common import grid
from scipy import stats
from torch import Tensor

from flsv.benchmark import federation, names, truth_table
from flsv.benchmark.true_values import ExactTruth
from flsv.errors import ConfigurationError
from flsv.functional import few_coalitions, few_coalitions_shapley
from flsv.functional.shapley.few_coalitions import Which

#: Title, coalitions, seeds of each, and whether a run's metric joins the fit.
DESIGNS: tuple[tuple[str, Which, int, bool], ...] = (
    ("each alone, n + 2", "singles", 1, False),
    ("with the hint", "singles", 1, True),
    ("all but one, n + 2", "leave-one-out", 1, False),
    ("with the hint", "leave-one-out", 1, True),
    ("both, 2 n + 2", "both", 1, False),
    ("both with the hint", "both", 1, True),
    ("both, two seeds", "both", 2, False),
    ("both, two seeds, with the hint", "both", 2, True),
    ("all 2^n", "all", 1, False),
)
Hints = dict[str, dict[str, dict[int, float]]]  # federation, seed, client
LEVEL = 0.9


def of_truth(truth: ExactTruth, masks: Tensor) -> Tensor:
    """``[s, K]``, the utilities of these coalitions."""
    return truth.utilities[:, (masks * 2 ** torch.arange(truth.num_clients)).sum(1)]


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


def trials(
    truth: ExactTruth, which: Which, count: int, hints: Sequence[Tensor] | None
) -> Iterator[tuple[float, float, float]]:
    """Rank and linear correlation with the other seeds, and the share of clients whose interval holds their value."""
    masks = few_coalitions(truth.num_clients, which)
    utilities, seeds = of_truth(truth, masks), len(truth.seeds)
    for first in range(seeds):
        given = [(first + more) % seeds for more in range(count)]
        others = [seed for seed in range(seeds) if seed not in given]
        table = utilities[given]
        noise = float(table.var(0).mean().sqrt()) / count**0.5 if count > 1 else None
        hint = None if hints is None else hints[first % len(hints)]
        found, right = few_coalitions_shapley(masks, table.mean(0), noise, hint), truth.values[others].mean(0)
        half = float(stats.norm.ppf((1 + LEVEL) / 2)) * found.stderr
        rank, linear = (float(of(found.values, right).statistic) for of in (stats.spearmanr, stats.pearsonr))
        yield rank, linear, float(((found.values - right).abs() <= half).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=("tuning", "held_out"), default=["tuning", "held_out"])
    parser.add_argument("--values", type=Path, help="values.csv of flsv bench, for the hint")
    parser.add_argument("--hint", default="gradient_agreement", help="the metric that is taken from there")
    parser.add_argument("--out", type=Path, help="a Markdown file to write, besides printing")
    options = parser.parse_args()
    text, hints = [], read_hints(options.values, options.hint)
    for chosen in options.sets:
        rows = [["", "clients", "seeds", *(title for title, *_ in DESIGNS)]]
        found: list[list[tuple[float, float, float]]] = [[] for _ in DESIGNS]
        for name in names():
            each = federation(name)
            if each.set != chosen:
                continue
            try:
                truth = truth_table(each)
            except ConfigurationError as why:
                print(f"{name} is left out: {why}")
                continue
            if not isinstance(truth, ExactTruth):
                print(f"{name} is left out: not all of its coalitions are trained")
                continue
            cells = []
            told = [
                torch.tensor([said[i] for i in range(truth.num_clients)], dtype=torch.float64)
                for _, said in sorted(hints.get(name, {}).items())
            ]
            for place, (_, which, count, hinted) in enumerate(DESIGNS):
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
            cells = [f"{float(summary(torch.tensor(column)[:, place])):.3f}" if column else "-" for column in found]
            rows.append([f"**{title}**", "", "", *cells])
        text.append(
            f"**{chosen.replace('_', ' ')}**, Spearman's correlation with the other seeds' values\n\n{grid(rows)}"
        )
    page = "\n\n".join(text)
    print(page)
    if options.out:
        options.out.write_text(page + "\n")


if __name__ == "__main__":
    main()
