"""What `flsv retrain` should do with a few coalitions: designs by their cost, fits, and how much a hint counts.

    flsv bench --federations tuning --metric one_round --conditions --seeds 2 --out runs/hints
    python tools/retrain_choices.py [--values runs/hints/values.csv] [--set fresh] [--federations NAME ...]

As ``retrain_table.py``: of the truth's tables of all coalitions a few are shown, of one seed, and what comes of them is
compared with the mean Shapley values of the other seeds. A design costs the samples that its trainings visit, in fits
of everybody: all but one costs n - 1 fits and each alone one, which numbers of trainings do not say. Every difference
is of the same federations, with the 95 % interval of Student's t over them. Nothing is trained; a minute.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations
from pathlib import Path

import torch
from common import grid
from retrain_table import Hints, of_table, read_hints, splits
from scipy import stats
from table_statistics import paired
from torch import Tensor

from flsv.benchmark import federation, names, truth_table
from flsv.benchmark.federation import SETS
from flsv.benchmark.scores import share_error
from flsv.benchmark.truth import Truth
from flsv.errors import ConfigurationError
from flsv.functional import few_coalitions, few_coalitions_shapley, kernel_shap

Fit = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # masks, utilities and a hint to values
#: Of a federation: by design, fit and hint's weight (0: none) the rank correlation and the share error.
Scores = dict[tuple[str, str, float], tuple[float, float]]
#: By federation: truth, clients' samples, scores.
Known = Mapping[str, tuple[Truth, Tensor, Scores]]
#: Prior variances of the hint over the coalitions, in units of each other part's.
WEIGHTS = (0.0, 0.1, 1.0, 10.0, 100.0)


def of_sizes(clients: int, sizes: tuple[int, ...]) -> Tensor:
    """Bool ``[K, n]``: nobody, everybody, and all coalitions of these sizes.

    Example:
        >>> of_sizes(3, (1,)).int().tolist()
        [[0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
    """
    chosen = sorted({0, clients, *(size % clients for size in sizes)} - {0, clients})
    members = [(), tuple(range(clients)), *(some for size in chosen for some in combinations(range(clients), size))]
    masks = torch.zeros(len(members), clients, dtype=torch.bool)
    for row, some in enumerate(members):
        masks[row, list(some)] = True
    return masks


#: Title to the sizes of its coalitions; -1: all but one.
DESIGNS: dict[str, tuple[int, ...]] = {
    "each alone": (1,),
    "all but one": (-1,),
    "each alone, all but one": (1, -1),
    "each alone, pairs": (1, 2),
    "each alone, pairs, all but one": (1, 2, -1),
}


def by_the_fit(masks: Tensor, utilities: Tensor, hint: Tensor | None, weight: float = 0.1) -> Tensor:
    """That of ``flsv retrain``."""
    return few_coalitions_shapley(masks, utilities, None, hint, weight).values


def by_kernel_shap(masks: Tensor, utilities: Tensor, hint: Tensor | None) -> Tensor:
    return kernel_shap(masks, utilities)


def by_both(masks: Tensor, utilities: Tensor, hint: Tensor | None) -> Tensor:
    """Half-way between the two."""
    return (by_the_fit(masks, utilities, None) + kernel_shap(masks, utilities)) / 2


FITS: dict[str, Fit] = {"the fit": by_the_fit, "KernelSHAP": by_kernel_shap, "half-way": by_both}


def visits(masks: Tensor, samples: Tensor) -> float:
    """Samples that training these coalitions visits, in fits of everybody.

    Example:
        >>> visits(of_sizes(4, (-1,)), torch.tensor([10, 20, 30, 40]))
        4.0
    """
    return float((masks.double() @ samples.double()).sum() / samples.sum())


def scores(truth: Truth, hints: list[Tensor]) -> Scores:
    """Means over the seeds, each of which is shown once."""
    found: dict[tuple[str, str, float], list[tuple[float, float]]] = {}
    for first, given, others in splits(len(truth.seeds), 1):
        right = truth.values[others].mean(0)
        for design, sizes in DESIGNS.items():
            masks = of_sizes(truth.num_clients, sizes)
            utilities = of_table(truth.utilities[given], masks).mean(0)
            made = {(name, 0.0): fit(masks, utilities, None) for name, fit in FITS.items()}
            if hints:
                hint = hints[first % len(hints)]
                for weight in WEIGHTS[1:]:
                    made["the fit", weight] = by_the_fit(masks, utilities, hint, weight)
            for (name, weight), values in made.items():
                found.setdefault((design, name, weight), []).append(score(values, right))
        exact = truth.values[given].mean(0)
        found.setdefault(("all 2^n", "exact", 0.0), []).append(score(exact, right))
    return {key: tuple(torch.tensor(each, dtype=torch.float64).mean(0).tolist()) for key, each in found.items()}  # type: ignore[misc]


def score(values: Tensor, right: Tensor) -> tuple[float, float]:
    """Rank correlation, 0 where all values are the same, and share error."""
    rank = float(stats.spearmanr(values, right).statistic) if float(values.max() - values.min()) > 0 else 0.0
    return rank, share_error(values, right)


def tables(by_federation: Known) -> list[str]:
    """Designs and fits; hints by their weight; differences."""

    def mean(numbers: list[float]) -> float:
        return sum(numbers) / len(numbers)

    ceiling = [each[2]["all 2^n", "exact", 0.0] for each in by_federation.values()]
    columns = [f"{name}: {what}" for name in FITS for what in ("rank", "least", "share error")]
    rows = [["coalitions", "fits of everybody", *columns]]
    for design, sizes in DESIGNS.items():
        cost = mean([visits(of_sizes(t.num_clients, sizes), samples) for t, samples, _ in by_federation.values()])
        row = [design, f"{cost:.1f}"]
        for name in FITS:
            found = [each[2][design, name, 0.0] for each in by_federation.values()]
            row += [f"{mean([r for r, _ in found]):.3f}", f"{min(r for r, _ in found):.2f}"]
            row.append(f"{mean([e for _, e in found]):.3f}")
        rows.append(row)
    cost = mean([visits(few_coalitions(t.num_clients, "all"), samples) for t, samples, _ in by_federation.values()])
    row = ["all 2^n", f"{cost:.1f}", f"{mean([r for r, _ in ceiling]):.3f}", f"{min(r for r, _ in ceiling):.2f}"]
    rows.append([*row, f"{mean([e for _, e in ceiling]):.3f}", *["-"] * 3 * (len(FITS) - 1)])
    parts = [grid(rows), "The fit minus KernelSHAP, and minus half-way, by pairs of federations:", _fits(by_federation)]
    pairs, both = ((design, "the fit", 0.0) for design in ("each alone, pairs", "each alone, all but one"))
    apart = (_differences(by_federation, pairs, both, what) for what in (0, 1))
    parts.append("Each alone and pairs minus each alone and all but one: rank {}, share error {}".format(*apart))
    hinted = {name: each for name, each in by_federation.items() if ("each alone", "the fit", WEIGHTS[1]) in each[2]}
    if hinted:
        parts += [f"With the hint, {len(hinted)} federations, by its weight:", _hints(hinted)]
    return parts


def _differences(by_federation: Known, of: tuple[str, str, float], minus: tuple[str, str, float], what: int) -> str:
    first, second = (
        {place: each[2][key][what] for place, each in enumerate(by_federation.values())} for key in (of, minus)
    )
    found = paired(first, second)
    text = f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
    return f"**{text}**" if found.verdict != "not told apart" else text


def _fits(by_federation: Known) -> str:
    others = [(name, what) for name in FITS if name != "the fit" for what in (0, 1)]
    rows = [["coalitions", *(f"{('rank', 'share error')[what]}, {name}" for name, what in others)]]
    for design in DESIGNS:
        pick = partial(_differences, by_federation, (design, "the fit", 0.0))
        rows.append([design, *(pick((design, name, 0.0), what) for name, what in others)])
    return grid(rows)


def _hints(by_federation: Known) -> str:
    """Means, differences to no hint, and what the hint harms most."""
    minus = ["rank, minus without", "share error, minus without", "worst rank, minus without"]
    rows = [["coalitions", "weight", "rank", "least", "share error", *minus]]
    for design in DESIGNS:
        for weight in WEIGHTS:
            key, none = (design, "the fit", weight), (design, "the fit", 0.0)
            found = [each[2][key] for each in by_federation.values()]
            worst = min(each[2][key][0] - each[2][none][0] for each in by_federation.values())
            rank, error = torch.tensor(found, dtype=torch.float64).mean(0).tolist()
            row = [design, f"{weight:g}", f"{rank:.3f}", f"{min(r for r, _ in found):.2f}", f"{error:.3f}"]
            if weight:
                row += [_differences(by_federation, key, none, what) for what in (0, 1)] + [f"{worst:+.2f}"]
            rows.append([*row, *["-"] * (8 - len(row))])
    return grid(rows)


def hints_of(hints: Hints, name: str, clients: int) -> list[Tensor]:
    """A vector of each seed, of those that have a value for everybody."""
    told = [said for _, said in sorted(hints.get(name, {}).items()) if set(said) == set(range(clients))]
    vectors = [torch.tensor([said[i] for i in range(clients)], dtype=torch.float64) for said in told]
    return [vector for vector in vectors if bool(vector.isfinite().all())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, default="tuning")
    parser.add_argument("--federations", nargs="+", help="these only")
    parser.add_argument("--values", type=Path, help="values.csv of flsv bench, for the hint")
    parser.add_argument("--hint", default="one_round", help="the metric that is taken from there")
    parser.add_argument("--each", action="store_true", help="a line a federation, too")
    options = parser.parse_args()
    hints = read_hints(options.values, options.hint)
    found: dict[str, tuple[Truth, Tensor, Scores]] = {}
    for name in options.federations or names(options.set):
        each = federation(name)
        try:
            truth = truth_table(each)
        except ConfigurationError as why:
            print(f"{name} is left out: {why}")
            continue
        if truth.utilities is not None and each.available:
            found[name] = truth, each.num_samples, scores(truth, hints_of(hints, name, truth.num_clients))
            each.release()
    print(f"{len(found)} federations: {', '.join(found)}\n")
    print("\n\n".join(tables(found)))
    if options.each:
        shown = [(design, fit, 0.0) for design in DESIGNS for fit in ("the fit", "KernelSHAP")]
        rows = [["federation", *(f"{design}: {fit}" for design, fit, _ in shown), "all 2^n"]]
        for name, (_, _, by) in found.items():
            cells = [by[key] for key in shown]
            rows.append([name, *(f"{r:.2f} ({e:.2f})" for r, e in [*cells, by["all 2^n", "exact", 0.0]])])
        print("\nRank correlation (share error):\n\n" + grid(rows))


if __name__ == "__main__":
    main()
