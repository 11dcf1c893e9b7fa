"""What the Shapley estimators cost beside the utility itself.

    python tools/bench_shapley_overhead.py [--players 10] [--repeats 20]

The utility is a table lookup by bitmask, so what is measured is the framework: masks, memory, arithmetic, checks. One
torch thread. Medians over the repeats, each turn by turn with a NumPy baseline that does nothing but the arithmetic:
for ``exact`` the weighted sum of all marginal contributions, for ``permutation`` the cumulated bitmasks of random
orders, looked up and differenced, without a memory of coalitions, a budget or a standard error. An evaluation of
``permutation`` is a coalition met along an order; many of them are met again and cost the utility nothing.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from flsv.functional.shapley import ESTIMATORS, ShapleyEstimate, Utility


def numpy_exact(table: np.ndarray, num_players: int) -> np.ndarray:
    coalitions = np.arange(2**num_players)
    sizes = np.zeros(2**num_players, dtype=int)
    for i in range(num_players):
        sizes += coalitions >> i & 1
    weight = np.array([1 / (num_players * math.comb(num_players - 1, s)) for s in range(num_players)])
    values = np.empty(num_players)
    for i in range(num_players):
        without = coalitions[coalitions >> i & 1 == 0]
        values[i] = weight[sizes[without]] @ (table[without | 1 << i] - table[without])
    return values


def numpy_permutations(table: np.ndarray, num_players: int, count: int, seed: int) -> np.ndarray:
    orders = np.random.default_rng(seed).random((count, num_players)).argsort(axis=1)
    prefixes = np.zeros((count, num_players + 1), dtype=np.int64)
    np.cumsum(1 << orders, axis=1, out=prefixes[:, 1:])
    marginals = np.empty((count, num_players))
    np.put_along_axis(marginals, orders, np.diff(table[prefixes], axis=1), axis=1)
    return marginals.mean(axis=0)


def seconds(ours: Callable[[], object], baseline: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Medians of both, measured alternately after one warm-up each."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for function, record in zip((ours, baseline), times, strict=True):
            start = time.perf_counter()
            function()
            if repeat:
                record.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def lookup(table: torch.Tensor, num_players: int) -> Utility:
    powers = 2.0 ** torch.arange(num_players)
    return lambda masks: table[(masks.float() @ powers).long()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--players", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    n, repeats = arguments.players, arguments.repeats
    table = torch.rand(2**n, generator=torch.Generator().manual_seed(0))
    utility, array = lookup(table, n), table.double().numpy()

    report = Table(title=f"{n} players, table-lookup utility, medians of {repeats}")
    for column in ("estimator", "per", "us", "us NumPy", "ratio", "us per distinct coalition"):
        report.add_column(column, justify="left" if column in ("estimator", "per") else "right")

    ours, baseline = seconds(lambda: ESTIMATORS["exact"](utility, n), lambda: numpy_exact(array, n), repeats)
    scale = 1e6 / 2**n
    report.add_row(
        "exact",
        "coalition",
        f"{ours * scale:.3f}",
        f"{baseline * scale:.3f}",
        f"{ours / baseline:.2f}",
        f"{ours * scale:.3f}",
    )
    for count in (100, 1000, 10_000):

        def sampled(count: int = count) -> ShapleyEstimate:
            return ESTIMATORS["permutation"](
                utility, n, num_permutations=count, generator=torch.Generator().manual_seed(0)
            )

        ours, baseline = seconds(sampled, partial(numpy_permutations, array, n, count, 0), repeats)
        scale, distinct = 1e6 / (count * (n - 1)), sampled().evaluations
        report.add_row(
            f"permutation, {count:,} orders",
            "evaluation",
            f"{ours * scale:.3f}",
            f"{baseline * scale:.3f}",
            f"{ours / baseline:.2f}",
            f"{ours * 1e6 / distinct:.3f}",
        )
    console = Console()
    console.print(report)

    others = Table(title="all estimators, budget 200, same utility")
    others.add_column("estimator")
    others.add_column("ms per call", justify="right")
    others.add_column("evaluations", justify="right")
    for name, estimator in ESTIMATORS.items():
        budget = None if name in ("exact", "leave_one_out") else min(200, 2**n)

        call = partial(estimator, utility, n, budget=budget, generator=torch.Generator().manual_seed(0))
        ours, _ = seconds(call, lambda: None, max(repeats // 4, 3))
        others.add_row(name, f"{ours * 1e3:.2f}", str(call().evaluations))
    console.print(others)


if __name__ == "__main__":
    main()
