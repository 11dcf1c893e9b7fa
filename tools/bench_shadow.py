"""What shadow coalitions cost, and how near their values come to those of all coalitions.

    python tools/bench_shadow.py cost [--repeats 3]
    python tools/bench_shadow.py deep [--repeats 3]
    python tools/bench_shadow.py values [--set tuning] [--seeds 5] [--only NAME ...]

``cost``: processor time of a fit on scikit-learn's digits, on one thread, in fits of the same federation without
metrics; the least of some repetitions, in turns, as other work on a machine makes memory slower for all. ``deep``: the
same of heads on CIFAR-10 with timm's ResNet-18 and eight clients, and without the valuation after the last round.
``values``: federations of ``flsv.benchmark`` are trained with all coalitions beside them. From a run's utilities follow
the values of all coalitions, which are exact for its seed, and of a few. They are compared with the exact ones, and
both with the benchmark's truth, which is of other seeds. The heads' values are those of another run of the same seed.
Federations that ``ShadowShapley`` refuses, or of more than ten clients, are left out and named.
"""

from __future__ import annotations

import argparse
import math
import os
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
from flsv.data import DirichletPartitioner, FederatedDataModule, Files, IIDPartitioner, Splits
from flsv.errors import ConfigurationError
from flsv.functional import few_coalitions, few_coalitions_shapley
from flsv.metrics import ShadowShapley
from flsv.seeding import isolated_rngs

QUIET = Reporting(table=False, figures=0, files=False)
KINDS: dict[str, dict[str, Any]] = {
    "singles": {"coalitions": "singles"},
    "pairs": {"coalitions": "pairs"},
    "all": {"coalitions": "all"},
    "heads, pairs": {"coalitions": "pairs", "part": "head"},
    "heads, all": {"coalitions": "all", "part": "head"},
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


class Clocked(ShadowShapley):
    """How long its evaluations take."""

    def update(
        self, client_ids: Tensor, coalitions: Tensor, utility: Callable[[Tensor], Tensor], round_index: int = 0
    ) -> None:
        start = time.process_time()
        super().update(client_ids, coalitions, utility, round_index)
        vars(self)["seconds"] = vars(self).get("seconds", 0.0) + time.process_time() - start


def deep(repeats: int, rounds: int = 5, clients: int = 8) -> str:
    """A row per kind: fits, and fits without the valuation."""
    few = Splits(max_samples=800, server_val=0.1, seed=0)

    def fit(kind: dict[str, Any] | None) -> tuple[float, ...]:
        partitioner, root = IIDPartitioner(clients, seed=0), os.environ.get("FLSV_DATA_ROOT", "data")
        data = FederatedDataModule("cifar10", partitioner, batch_size=16, splits=few, files=Files(root=root))
        module = ClassifierClient("resnet18", optimizer=partial(torch.optim.SGD, lr=0.05))
        metric = None if kind is None else Clocked(**kind, every=rounds)
        metrics: dict[str, Any] = {} if metric is None else {"shadow": metric}
        with tempfile.TemporaryDirectory() as folder:
            trainer = quiet_trainer(folder, rounds, [FederatedLoop(metrics=metrics, seed=0, reporting=QUIET)])
            start = time.process_time()
            trainer.fit(module, data)
            whole = time.process_time() - start
        return whole, whole - (0.0 if metric is None else vars(metric)["seconds"])

    kinds: dict[str, dict[str, Any] | None] = {"plain fit": None}
    kinds |= {kind: KINDS[kind] for kind in ("heads, pairs", "heads, all")}
    taken: dict[str, tuple[float, ...]] = {}
    for _, (kind, options) in product(range(repeats), kinds.items()):
        taken[kind] = tuple(map(min, taken.get(kind, (math.inf, math.inf)), fit(options)))
    plain = taken["plain fit"][0]
    rows = [["", "s", "fits", "without the valuation"]]
    rows += [[kind, f"{a:.1f}", f"{a / plain:.2f}", f"{b / plain:.2f}"] for kind, (a, b) in taken.items()]
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


def utilities(each: Federation, seed: int, part: str) -> dict[tuple[bool, ...], float]:
    """Of all coalitions after the last round."""
    metric = Kept(coalitions="all", part=part, performance=each.performance, mode=each.mode, every=each.rounds)
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
    """Float64 ``[n]``."""
    masks = few_coalitions(clients, which)
    known = torch.tensor([game[tuple(mask)] for mask in masks.tolist()], dtype=torch.float64)
    return few_coalitions_shapley(masks, known).values


HEAD = ["", "to", "all", "singles", "pairs", "both", "heads, all", "heads, pairs"]


def values(which: str | None, seeds: int, only: list[str]) -> str:
    """Rank correlations and share errors, by federation and on average."""
    scores: dict[str, list[list[float]]] = {}
    ceilings: list[float] = []
    rows, left_out = [[*HEAD, "ceiling"]], []
    for name in only or names(which):
        each = federation(name)
        clients = len(each.num_samples)
        start = time.process_time()
        try:
            if clients > MOST_CLIENTS:
                raise ConfigurationError(f"{clients} clients")
            truth = truth_table(each)
            found: dict[str, list[list[float]]] = {}
            for seed in range(seeds):
                game = utilities(each, seed, "all")
                head = utilities(each, seed, "head") if each.classifies else None
                exact = valued(game, clients, "all")
                told = [exact, *(valued(game, clients, w) for w in ("singles", "pairs", "both"))]
                told += [valued(head, clients, w) for w in ("all", "pairs")] if head is not None else []
                for what, target in (("this seed", exact), ("truth", truth.mean)):
                    for score, of in (("rank", spearman), ("share", share_error)):
                        found.setdefault(f"{score}, {what}", []).append([of(value, target) for value in told])
        except ConfigurationError as error:
            left_out.append(f"{name}: {str(error)[:110]}")
            continue
        print(f"{name}: {time.process_time() - start:.0f} s", flush=True)
        ceilings.append(truth.ceiling)
        for what, runs in found.items():
            means = [mean(column) for column in zip(*runs)]
            scores.setdefault(what, []).append([*means, *[float("nan")] * (len(HEAD) - 2 - len(means))])
            end = f"{truth.ceiling:.2f}" if what == "rank, truth" else ""
            rows.append([name, what, *(f"{value:.2f}" for value in scores[what][-1]), end])
    for what, per_federation in scores.items():
        end = f"{mean(ceilings):.2f}" if what == "rank, truth" else ""
        rows.append(["mean", what, *(f"{mean(column):.3f}" for column in zip(*per_federation)), end])
        worst = max if what.startswith("share") else min
        least = [worst([v for v in column if v == v], default=float("nan")) for column in zip(*per_federation)]
        rows.append(["worst", what, *(f"{value:.2f}" for value in least), ""])
    return "\n".join([grid(rows), "", "left out:", *left_out])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "deep", "values"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", default="tuning")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    be_quiet()
    if given.what == "values":
        print(values(given.set, given.seeds, given.only))
    else:
        print({"cost": cost, "deep": deep}[given.what](given.repeats))


if __name__ == "__main__":
    main()
