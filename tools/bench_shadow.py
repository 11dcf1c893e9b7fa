"""What shadow coalitions cost, and how near their values come to those of all coalitions.

    python tools/bench_shadow.py cost [--repeats 3]
    python tools/bench_shadow.py values [--set tuning] [--seeds 5] [--only NAME ...]

``cost``: processor time of a fit on scikit-learn's digits, on one thread, in fits of the same federation without
metrics; the least of some repetitions, in turns, as other work on a machine makes memory slower for all.
``values``: federations of ``flsv.benchmark`` are trained with all coalitions beside them. From a run's utilities follow
the values of all coalitions, which are exact for its seed, and of a few. They are compared with the exact ones, and
both with the benchmark's truth, which is of other seeds.
Of more than ten clients pairs and all but one are trained. Federations that ``ShadowShapley`` refuses are left out and
named.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from common import be_quiet, grid, quiet_trainer
from torch import Tensor

from flsv import ClassifierClient, FederatedLoop, Reporting
from flsv.benchmark import federation, names, truth_table
from flsv.benchmark.federation import Federation, quiet
from flsv.benchmark.scores import mean, share_error, spearman
from flsv.data import DirichletPartitioner, FederatedDataModule
from flsv.errors import ConfigurationError
from flsv.functional import few_coalitions, few_coalitions_shapley
from flsv.metrics import ShadowShapley
from flsv.metrics.shadow import Coalitions
from flsv.seeding import isolated_rngs

QUIET = Reporting(table=False, figures=0, files=False)
KINDS: dict[str, dict[str, Any]] = {
    "singles": {"coalitions": "singles"},
    "pairs": {"coalitions": "pairs"},
    "all": {"coalitions": "all"},
}
ROUNDS, MOST_CLIENTS = 20, 10


def seconds(clients: int, options: dict[str, Any] | None) -> float:
    """Of the processor, of one fit."""
    data = FederatedDataModule(
        "digits", partitioner=DirichletPartitioner(clients, 0.5, seed=1, min_samples=40), batch_size=16
    )
    module = ClassifierClient("mlp", network_args={"hidden": [64]}, optimizer=partial(torch.optim.SGD, lr=0.1))
    metrics: dict[str, Any] = {} if options is None else {"shadow": ShadowShapley(**options)}
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(folder, ROUNDS, [FederatedLoop(metrics=metrics, seed=0, reporting=QUIET)])
        start = time.process_time()
        trainer.fit(module, data)
        return time.process_time() - start


def cost(repeats: int) -> str:
    """A row per kind of coalitions, a column per number of clients: fits."""
    sizes = (5, 6, 8)
    seconds(5, None)  # imports
    kinds: dict[str, dict[str, Any] | None] = {"plain fit, s": None} | KINDS
    taken: dict[str, list[float]] = {kind: [math.inf] * len(sizes) for kind in kinds}
    for _, (place, n), (kind, options) in product(range(repeats), enumerate(sizes), kinds.items()):
        taken[kind][place] = min(taken[kind][place], seconds(n, options))
    plain, *others = taken
    rows = [["", *(f"n = {n}" for n in sizes)], [plain, *(f"{each:.2f}" for each in taken[plain])]]
    for kind in others:
        rows.append([f"{kind}, fits", *(f"{a / b:.2f}" for a, b in zip(taken[kind], taken[plain]))])
    return grid(rows)


class Kept(ShadowShapley):
    """Keeps the last game."""

    def update(
        self, client_ids: Tensor, coalitions: Tensor, utility: Callable[[Tensor], Tensor], round_index: int = 0
    ) -> None:
        def kept(masks: Tensor) -> Tensor:
            found = utility(masks)
            vars(self)["game"] = {tuple(mask): float(value) for mask, value in zip(masks.tolist(), found)}
            return found

        super().update(client_ids, coalitions, kept, round_index)


def utilities(each: Federation, seed: int, coalitions: Coalitions) -> dict[tuple[bool, ...], float]:
    """Of all coalitions after the last round."""
    metric = Kept(coalitions=coalitions, performance=each.performance, mode=each.mode, every=each.rounds)
    loop = FederatedLoop(
        metrics={"shadow": metric},
        uploads=each.attackers(),
        local_epochs=each.local_epochs,
        seed=seed,
        reporting=QUIET,
    )
    with isolated_rngs(seed, "benchmark"), quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        each.trainer(loop).fit(each.module(), each.datamodule())
    return vars(metric)["game"]


def valued(game: dict[tuple[bool, ...], float], clients: int, which: Any) -> Tensor:
    """Float64 ``[n]``; NaN where the game of these coalitions is not known."""
    masks = few_coalitions(clients, which) if which != "all" or clients <= MOST_CLIENTS else None
    if masks is None or any(tuple(mask) not in game for mask in masks.tolist()):
        return torch.full((clients,), torch.nan, dtype=torch.float64)
    known = torch.tensor([game[tuple(mask)] for mask in masks.tolist()], dtype=torch.float64)
    return few_coalitions_shapley(masks, known).values


def game_of(each: Federation, seed: int) -> dict[tuple[bool, ...], float]:
    """Of all coalitions, or of those that pairs and all but one need."""
    clients = len(each.num_samples)
    some = [few_coalitions(clients, which) for which in ("pairs", "both")]
    few = [mask.nonzero().flatten().tolist() for mask in torch.cat(some).unique(dim=0)]
    return utilities(each, seed, "all" if clients <= MOST_CLIENTS else few)


HEAD = ["", "to", "all", "singles", "pairs", "both"]


def values(which: str | None, seeds: int, only: list[str]) -> str:
    """Rank correlations and share errors, by federation and on average."""
    scores: dict[str, list[list[float]]] = {}
    ceilings: list[float] = []
    rows, left_out = [[*HEAD, "ceiling"]], []
    for name in only or names(which):
        each = federation(name)
        start, found = time.process_time(), dict[str, list[list[float]]]()
        try:
            truth, clients = truth_table(each), len(each.num_samples)
            for seed in range(seeds):
                game = game_of(each, seed)
                told = [valued(game, clients, w) for w in ("all", "singles", "pairs", "both")]
                for what, target in (("this seed", told[0]), ("truth", truth.mean)):
                    for score, of in (("rank", spearman), ("share", share_error)):
                        values = [of(v, target) if not (v.isnan() | target.isnan()).any() else math.nan for v in told]
                        found.setdefault(f"{score}, {what}", []).append(values)
        except ConfigurationError as error:
            left_out.append(f"{name}: {str(error)[:110]}")
            continue
        print(f"{name}: {time.process_time() - start:.0f} s", flush=True)
        ceilings.append(truth.ceiling)
        for what, runs in found.items():
            scores.setdefault(what, []).append([mean(column) for column in zip(*runs)])
            end = f"{truth.ceiling:.2f}" if what == "rank, truth" else ""
            rows.append([name, what, *(f"{value:.2f}" for value in scores[what][-1]), end])
    for what, per_federation in scores.items():
        known = [[v for v in column if v == v] for column in zip(*per_federation)]
        end = f"{mean(ceilings):.2f}" if what == "rank, truth" else ""
        rows.append(["mean", what, *(f"{mean(column):.3f}" if column else "nan" for column in known), end])
        worst = max if what.startswith("share") else min
        rows.append(["worst", what, *(f"{worst(column, default=math.nan):.2f}" for column in known), ""])
    return "\n".join([grid(rows), "", "left out:", *(left_out or ["none"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "values"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", default="tuning")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    be_quiet()
    print(cost(given.repeats) if given.what == "cost" else values(given.set, given.seeds, given.only))


if __name__ == "__main__":
    main()
