"""What the intervals of contributions cover: the truth of the benchmark, and the same metric's values with other seeds.

    python tools/intervals_table.py [--seeds 5] [--out FILE.md]

Federations of scikit-learn's digits from ``flsv.benchmark``, whose coalitions have all been trained, so that their true
Shapley values are known; nothing is downloaded. All metrics ride in one fit of each federation and seed. Values and
ends of intervals are taken as shares: divided by the sum of the metric's values above 0. A case is a client in a run.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from common import be_quiet, grid
from torch import Tensor

from flsv import FederatedLoop, Reporting
from flsv.benchmark import Federation, federation, truth_table
from flsv.benchmark.registry import entry
from flsv.benchmark.scores import shares
from flsv.seeding import isolated_rngs

FEDERATIONS = ("digits_dirichlet", "digits_sizes", "digits_label_noise")
#: Deviations on each side that hold 90 % of a normal variable.
WANTED = 1.645
METRICS = {
    "ClassSpecificShapley": "ClassSpecificShapley",
    "CosineGradientShapley": "CosineGradientShapley",
    "DecayedShapley (no division)": "DecayedShapley(normalize=False)",
    "SurrogateFederatedShapley": "SurrogateFederatedShapley(estimator='exact')",
    "CumulativeShapley, sample weights, exact": "CumulativeShapley(weighting='samples')",
    "GradientShapley": "GradientShapley",
    "CumulativeShapley, permutations, 24 evaluations": (
        "CumulativeShapley(weighting='samples', estimator='permutation', estimator_args={'budget': 24})"
    ),
    "PartialFederatedShapley (momentum 0.5)": "PartialFederatedShapley(momentum=0.5)",
    "LeaveOneOut (last round)": "LeaveOneOut",
}


@dataclass(frozen=True)
class Case:
    """A metric in a run: its values, and the ends of their 90 % intervals, float64 ``[n]``, as shares."""

    value: Tensor
    low: Tensor
    high: Tensor


Results = dict[tuple[str, int, str], Case]
"""By federation, seed and metric."""


def as_shares(value: Tensor, low: Tensor, high: Tensor) -> Case:
    """Divided by the sum of the values above 0.

    Example:
        >>> case = as_shares(torch.tensor([3.0, 1.0]), torch.tensor([2.0, -1.0]), torch.tensor([4.0, 3.0]))
        >>> case.value.tolist(), case.low.tolist(), case.high.tolist()
        ([0.75, 0.25], [0.5, -0.25], [1.0, 0.75])
    """
    total = value.double().clamp(min=0).sum()
    return Case(value.double() / total, low.double() / total, high.double() / total)


def run(where: Federation, seed: int, metrics: Mapping[str, str]) -> dict[str, Case]:
    """One fit with all of them."""
    made = {name: entry(f"flsv.metrics.{path}")[1].build(where) for name, path in metrics.items()}
    inside = {f"metric_{place}": metric for place, metric in enumerate(made.values())}
    loop = FederatedLoop(
        metrics=inside,  # type: ignore[arg-type]
        local_epochs=where.local_epochs,
        reporting=Reporting(per_class=False, figures=0, table=False, files=False),
        seed=seed,
    )
    with isolated_rngs(seed, "benchmark"):
        where.trainer(loop).fit(where.module(), where.datamodule())
    found = {}
    for name, metric in made.items():
        value = metric.per_client(metric.compute())
        low, high = metric.intervals(value=value)
        found[name] = as_shares(value, low, high)
    return found


# ---- the report


def covers(case: Case, wanted: Tensor) -> Tensor:
    """Bool ``[n]``."""
    return (case.low <= wanted) & (wanted <= case.high)


def coverage(results: Results, truths: Mapping[str, Tensor]) -> str:
    """How often the intervals hold the truth's share, and the mean of the other seeds' values; and how wide they are,
    beside what the values' deviation over the seeds asks for."""
    asked = ["covers the truth's share", "covers the other seeds' mean"]
    rows = [["metric", *asked, "half width, as a share", "half width that the deviation over seeds asks for"]]
    for metric in dict.fromkeys(metric for _, _, metric in results):
        truth, others, width, wanted = [], [], [], []
        for (where, seed, name), case in results.items():
            if name != metric:
                continue
            truth.append(covers(case, truths[where]))
            width.append((case.high - case.low) / 2)
            rest = [c.value for (w, s, m), c in results.items() if (w, m) == (where, metric) and s != seed]
            if rest:
                others.append(covers(case, torch.stack(rest).mean(0)))
        for where in truths:
            values = [case.value for (w, _, m), case in results.items() if (w, m) == (where, metric)]
            if len(values) > 1:
                wanted.append(WANTED * torch.stack(values).std(0))
        held = [f"{torch.cat(found).double().mean():.2f}" if found else "-" for found in (truth, others)]
        rows.append([metric, *held, *(f"{torch.cat(found).mean():.3f}" if found else "-" for found in (width, wanted))])
    return grid(rows)


def repetition(results: Results, truths: Mapping[str, Tensor]) -> str:
    """The distance of the shares of the mean over the seeds to the truth, as a part of a single run's: half the sum of
    absolute differences; below 1, repeating helps."""
    rows = [["metric", *truths]]
    for metric in dict.fromkeys(metric for _, _, metric in results):
        cells = []
        for where, truth in truths.items():
            values = [case.value for (w, _, m), case in results.items() if (w, m) == (where, metric)]
            single = torch.stack([distance(shares(value), truth) for value in values]).mean()
            cells.append(f"{distance(shares(torch.stack(values).mean(0)), truth) / single:.2f}")
        rows.append([metric, *cells])
    return grid(rows)


def distance(mine: Tensor, truth: Tensor) -> Tensor:
    return (mine - truth).abs().sum() / 2


def report(results: Results, truths: Mapping[str, Tensor], seeds: int) -> str:
    runs = len({(where, seed) for where, seed, _ in results})
    return "\n\n".join(
        [
            f"{', '.join(truths)}, {seeds} seeds each: {runs} runs.",
            coverage(results, truths),
            "Distance to the truth of the mean over the seeds, as a part of a single run's:",
            repetition(results, truths),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--federations", nargs="+", default=list(FEDERATIONS), help="of the digits")
    parser.add_argument("--out", type=Path, help="write the tables there, too")
    options = parser.parse_args(arguments)
    be_quiet()
    known = {name: federation(name) for name in options.federations}
    truths = {name: shares(truth_table(each).mean) for name, each in known.items()}
    results: Results = {}
    for name, each in known.items():
        for seed in range(options.seeds):
            found = run(each, seed, METRICS)
            results |= {(name, seed, metric): case for metric, case in found.items()}
            print(f"{name}, seed {seed}", flush=True)
    text = report(results, truths, options.seeds)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
