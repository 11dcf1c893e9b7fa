"""How often the 90 % intervals of the sampled estimators hold the exact value, by the benchmark's tables of truth.

    python tools/estimator_coverage.py [--seeds 20] [--out FILE.md]

Of each federation of ``flsv.benchmark`` whose coalitions have all been trained, the first seed's table is a game of
six to eight players: its exact values are known, and an estimator draws some of its coalitions. Ten games of ten
players are simulated, smooth ones: an accuracy that saturates in the mean of the members' updates. It also prints by
how much a coalition's utility differs between two trainings, as a share of the variance between coalitions. Takes
minutes.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from common import grid
from torch import Generator, Tensor

from flsv.benchmark import federation, names, truth_table
from flsv.functional.shapley import (
    ShapleyEstimate,
    permutation_shapley,
    surrogate_shapley,
)
from flsv.functional.shapley.game import shapley_of_table, t_quantile

ESTIMATORS: dict[str, Callable[..., ShapleyEstimate]] = {
    "permutations": permutation_shapley,
    "surrogate": surrogate_shapley,
    "surrogate, unbiased": partial(surrogate_shapley, unbiased=True),
}
BUDGETS = {"the benchmark's": (4,), "smooth, ten players": (4, 8, 20)}  # games, and coalitions to a player
LEVEL = 0.9


def smooth(seed: int, players: int = 10) -> Tensor:
    """``[2^n]``: an accuracy of the members' mean update."""
    updates = torch.randn(players, 6, generator=Generator().manual_seed(seed), dtype=torch.float64) * 0.7 + 0.5
    masks = ((torch.arange(2**players)[:, None] >> torch.arange(players)) & 1).double()
    models = masks @ updates / masks.sum(dim=1, keepdim=True).clamp_min(1)
    return 0.9 * torch.exp(-(models - 0.6).square().sum(dim=1) / 3)


def game(table: Tensor) -> Callable[[Tensor], Tensor]:
    """Looks coalitions up in a table ``[2^n]``."""
    return lambda masks: table[(masks.long() * 2 ** torch.arange(masks.shape[1])).sum(1)]


def held(table: Tensor, estimator: Callable[..., ShapleyEstimate], each: int, seed: int) -> tuple[float, float]:
    """The share of players whose interval holds their value: by Student's t, and by the normal distribution."""
    players = len(table).bit_length() - 1
    exact = shapley_of_table(table[:, None])[:, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = estimator(game(table), players, budget=each * players, generator=Generator().manual_seed(seed))
    missed = (found.values - exact).abs()
    quantiles = t_quantile(LEVEL, found.freedom), t_quantile(LEVEL)
    student, normal = ((missed <= q * found.stderr + 1e-9).double().mean() for q in quantiles)
    return float(student), float(normal)


def coverage(tables: Sequence[Tensor], estimator: Callable[..., ShapleyEstimate], each: int, seeds: int) -> str:
    """Of the games that have more coalitions than are drawn."""
    few = [table for table in tables if each * (len(table).bit_length() - 1) < len(table) - 2]
    cases = [held(table, estimator, each, seed) for table in few for seed in range(seeds)]
    student, normal = (statistics.mean(case) for case in zip(*cases))
    return f"{student:.2f} ({normal:.2f})"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="draws of each estimator on each game")
    parser.add_argument("--out", type=Path, help="write the tables there, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: truth_table(federation(name)) for name in names()}
    truths = {name: truth for name, truth in found.items() if truth.utilities is not None}
    games = {"the benchmark's": [truth.utilities[0].double() for truth in truths.values() if truth.num_clients > 5]}
    games["smooth, ten players"] = [smooth(seed) for seed in range(10)]
    columns = [(title, each) for title, budgets in BUDGETS.items() for each in budgets]
    rows = [["estimator", *(f"{title}: {each} n" for title, each in columns)]]
    for name, estimator in ESTIMATORS.items():
        rows.append([name, *(coverage(games[title], estimator, each, options.seeds) for title, each in columns)])
    noise = {
        name: float(truth.utilities.double().var(0).mean() / truth.utilities.double().mean(0).var())
        for name, truth in truths.items()
    }
    least, most = min(noise, key=noise.__getitem__), max(noise, key=noise.__getitem__)
    text = grid(rows) + (
        f"\n\nShare of players whose {LEVEL:.0%} interval holds the exact value, in brackets with the normal quantile "
        f"in place of Student's; {options.seeds} draws of each game, n players, so many coalitions.\n\n"
        f"Variance of a coalition's utility between trainings, as a share of the variance between coalitions: "
        f"{noise[least]:.1%} ({least}) to {noise[most]:.1%} ({most}), median {statistics.median(noise.values()):.1%}.\n"
    )
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
