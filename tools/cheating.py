"""What a client gains that cheats: its share of the payment with and without it, in the same run of the same seed.

    python tools/cheating.py                                        the page's table, its CSV and figures
    python tools/cheating.py --federations digits_sizes --seeds 1 --rounds 2 --cheats sybils scaling

One client cheats at a time. Every run is done without safeguards and with them: ``OutlierFilter``, ``NormCap(1.25)``,
``SampleCap(1.25)`` and ``CopyFilter``, whose copies and echoes are paid nothing. Trials are kept in ``--kept``: what
was stopped goes on. Prints what stands in docs/results/cheating.md; every gain goes to ``--out``.

One client that is several is the Sybil attack (Douceur, IPTPS 2002). That copies inflate Shapley values of data, too:
Han et al., "Replication-Robust Payoff-Allocation for Machine Learning Data Markets", arXiv:2006.14583.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from common import grid
from torch import Tensor

from flsv import FederatedLoop, Reporting
from flsv.attacks import Alignment, FalseReports, FreeRider, HeadAlignment, InnerProductManipulation, Scaling
from flsv.benchmark import Federation, federation, truth_table
from flsv.benchmark.federation import QUIET, quiet
from flsv.benchmark.registry import Entry, entry
from flsv.benchmark.scores import shares, spearman
from flsv.csv_files import save_csv
from flsv.data import Partitioner
from flsv.filters import CopyFilter, NormCap, OutlierFilter, SampleCap
from flsv.report.repeated import mean_half_width
from flsv.seeding import generator_for, isolated_rngs


class Cheating(Partitioner):
    """Deals as another partitioner does, but for one client, which may get samples that others have, too."""

    def __init__(self, partitioner: Partitioner, client: int, cheat: str) -> None:
        self.partitioner, self.client, self.cheat, self.seed = partitioner, client, cheat, 0
        self.needs_classes, self.keeps_groups = partitioner.needs_classes, partitioner.keeps_groups
        self.num_clients = partitioner.num_clients + (cheat in ("sybils", "split_sybils"))

    def __call__(self, labels: Tensor, num_classes: int, groups: Tensor | None = None) -> list[Tensor]:
        """Without the check that no sample is dealt twice."""
        parts = self.partition(labels, num_classes, groups, generator_for(self.seed, "partition"))
        return [part.sort().values for part in parts]

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: torch.Generator
    ) -> list[Tensor]:
        parts = self.partitioner(labels, num_classes, groups)
        me, other, own = self.client, (self.client + 1) % len(parts), parts[self.client]
        if self.cheat == "sybils":
            parts.append(own.clone())
        elif self.cheat == "split_sybils":
            parts[me], half = own[torch.randperm(len(own), generator=generator)].tensor_split(2)
            parts.append(half)
        elif self.cheat == "duplication":
            parts[me] = own.repeat(3)
        elif self.cheat == "collusion":
            parts[me] = torch.cat([own, parts[other]])
            parts[other] = parts[me].clone()
        elif self.cheat == "framing":
            parts[me] = parts[other].clone()
        return parts


@dataclass(frozen=True)
class Cheat:
    """One way to cheat: in words; as an upload (None: by the samples, see :class:`Cheating`); whether the next client
    does it, too, and is paid for it."""

    title: str
    attack: Callable[..., Any] | None = None
    pair: bool = False


CHEATS = {
    "sybils": Cheat("comes as two clients, each with all its samples"),
    "split_sybils": Cheat("comes as two clients, each with half its samples"),
    "duplication": Cheat("has each of its samples three times"),
    "collusion": Cheat("pools its samples with the next client, who does the same", pair=True),
    "framing": Cheat("trains on the next client's samples instead of its own, to look like it"),
    "scaling": Cheat("sends three times its update", partial(Scaling, factor=3.0)),
    "alignment": Cheat("turns its update half way to the server's last step", partial(Alignment, mix=0.5)),
    "heads": Cheat("turns its head's rows to the server's last step", partial(HeadAlignment, mix=1.0)),
    "echo": Cheat("sends the server's last step, and nothing of its own", partial(Alignment, mix=1.0)),
    "noise": Cheat("sends noise as long as an update", partial(FreeRider, mode="noise")),
    "flip": Cheat("sends, with the next client, the opposite of what all learnt", InnerProductManipulation, pair=True),
    "reports": Cheat("says that the others' model does badly", partial(FalseReports, loss=0.0, score=0.0)),
}
WEIGHED = "flsv.metrics.ClassSpecificShapley(weighting='samples')"
METRICS = ("size", "cssv", WEIGHED, "cgsv", "gradient_1", "gradient_agreement")
METRICS += ("fedsv_samples", "permutation_24", "banzhaf", "decayed_sum")
#: Those that ask clients what they think of models, each of which then keeps a fifth of its samples to judge by.
ASKING = ("flsv.metrics.ContributionEstimation", "flsv.metrics.ContributionEstimation(cap=1.25)")
FEDERATIONS = ("digits_duplicates", "mnist_dirichlet", "fashion_label_noise")
GUARDS = ("none", "all")
COLUMNS = ("metric", "safeguards", "cheat", "honest_percent", "gain", "half_width", "trials", "named", "others_named")


@dataclass(frozen=True)
class Run:
    """What one fit came to, by metric: shares of the payment, of who is named as a copy or an echo 0, and the rank
    correlation with the benchmark's truth, of honest runs; who is named; the model's accuracy."""

    shares: dict[str, list[float]]
    ranks: dict[str, float]
    named: list[int]
    accuracy: float


def fit(
    where: Federation, entries: Mapping[str, Entry], seed: int, guard: str, attacks: Sequence[Any], truth: Tensor | None
) -> Run:
    """One fit of a federation, with these metrics in it; ``truth`` is what honest values are ranked against."""
    metrics = {f"metric_{place}": each.build(where) for place, each in enumerate(entries.values())}
    copies = CopyFilter()
    loop = FederatedLoop(
        metrics=metrics,  # type: ignore[arg-type]
        filters=[OutlierFilter(), *([] if guard == "none" else [copies, NormCap(1.25), SampleCap(1.25)])],
        uploads=[*where.attackers(), *attacks],
        local_epochs=where.local_epochs,
        reporting=Reporting(per_class=False, figures=0, table=False, files=False),
        seed=seed,
    )
    with isolated_rngs(seed, "benchmark"), quiet():
        trainer, module, data = where.trainer(loop), where.module(), where.datamodule()
        trainer.fit(module, data)
        judged = L.Trainer(accelerator="cpu", devices=1, **QUIET).validate(module, data, verbose=False)  # type: ignore[arg-type]
    named, found, ranks = sorted(client for group in copies.groups for client in group), {}, {}
    for name, key in zip(entries, metrics):
        values = loop.board.contributions[key].detach().cpu().double()
        if truth is not None:
            ranks[name] = spearman(values, truth)
        values[named] = float("nan")
        found[name] = shares(values).tolist()
    return Run(found, ranks, named, float(judged[0]["val_accuracy"]))


def cheated(honest: Federation, cheat: str, client: int) -> tuple[Federation, list[Any]]:
    """The federation in which a client cheats so, and what it does to its updates."""
    each, clients = CHEATS[cheat], len(honest.num_samples)
    if each.attack is not None:
        return honest, [each.attack(clients=[client, (client + 1) % clients] if each.pair else [client])]
    arguments = {"partitioner": honest.data["partitioner"], "client": client, "cheat": cheat}
    dealt = {"class_path": f"{__name__}.Cheating", "init_args": arguments}
    return replace(honest, data={**honest.data, "partitioner": dealt}), []


class Trials:
    """Runs by what they are of, each done once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.path, self.runs, self.rounds, self.seeds = options.kept, {}, options.rounds, range(options.seeds)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for line in self.path.read_text().splitlines() if self.path.is_file() else ():
            key, run = json.loads(line)
            self.runs[key] = Run(**run)

    def __call__(self, name: str, metrics: Sequence[str], seed: int, guard: str, cheat: str | None) -> Run:
        """The run of a federation; ``cheat`` None: nobody cheats. Client ``seed`` is the one that does."""
        key = f"{name} {self.rounds} {seed} {guard} {cheat} {' '.join(metrics)}"
        if key not in self.runs:
            honest = federation(name)
            honest = replace(honest, rounds=self.rounds or honest.rounds)
            honest = honest.with_client_validation if metrics is ASKING else honest
            client = seed % len(honest.num_samples)
            where, attacks = (honest, []) if cheat is None else cheated(honest, cheat, client)
            judged = cheat is None and metrics is METRICS and self.rounds is None
            truth = truth_table(honest).mean if judged else None
            self.runs[key] = fit(where, dict(map(entry, metrics)), seed, guard, attacks, truth)
            with self.path.open("a") as file:
                file.write(json.dumps([key, asdict(self.runs[key])]) + "\n")
            print(f"{name}, seed {seed}, {cheat or 'honest'}, safeguards: {guard}", flush=True)
        return self.runs[key]

    def of(self, names: Sequence[str], metrics: Sequence[str], guard: str, cheat: str) -> list[Trial]:
        """Of every federation and seed."""
        return [
            Trial(self(name, metrics, seed, guard, None), self(name, metrics, seed, guard, cheat), seed, cheat)
            for name in names
            for seed in self.seeds
        ]


@dataclass(frozen=True)
class Trial:
    """One client that cheats in one run, beside the same run in which nobody does."""

    honest: Run
    cheated: Run
    seed: int
    cheat: str

    def they(self, run: Run) -> set[int]:
        """Who is paid for the cheat: the client, the one that it cheats with, and all after the honest ones."""
        clients = len(next(iter(self.honest.shares.values())))
        me = self.seed % clients
        beside = {(me + 1) % clients} if CHEATS[self.cheat].pair else set()
        return {me, *beside, *range(clients, len(next(iter(run.shares.values()))))}

    def share(self, run: Run, metric: str) -> float:
        """What they are paid, %."""
        return 100 * sum(run.shares[metric][client] for client in self.they(run))


@dataclass(frozen=True)
class Gain:
    """Over trials, in points of the payment: the honest share, the mean gain, and half of its 90 % interval."""

    honest: float
    points: float
    half: float

    def __str__(self) -> str:
        return f"{self.points:+.1f}" + (f" ± {self.half:.1f}" if self.half == self.half else "")


def gain(trials: Sequence[Trial], metric: str) -> Gain:
    """By Student's t over paired differences."""
    before = np.array([each.share(each.honest, metric) for each in trials])
    points = np.array([each.share(each.cheated, metric) for each in trials]) - before
    half = mean_half_width(float(points.std(ddof=min(1, len(points) - 1))), len(points))
    return Gain(float(before.mean()), float(points.mean()), half)


Gains = Mapping[tuple[str, str, str], Gain]
"""By metric, safeguards and cheat."""


def best(gains: Gains, metric: str, guard: str) -> str:
    mine = {cheat: each.points for (name, g, cheat), each in gains.items() if (name, g) == (metric, guard)}
    return max(mine, key=lambda cheat: mine[cheat])


def page_table(gains: Gains) -> str:
    """A row a metric, the most gamed first."""
    rows = []
    for metric in dict.fromkeys(name for name, guard, _ in gains if guard == "all"):
        first, last = best(gains, metric, "none"), best(gains, metric, "all")
        free, same, left = gains[metric, "none", first], gains[metric, "all", first], gains[metric, "all", last]
        words = [f"`{metric.removeprefix('flsv.metrics.')}`", f"{free.honest:.1f}", first.replace("_", " "), str(free)]
        rest = f"{100 * left.points / free.points:.0f} %" if free.points > 0 else "-"
        words += [str(same), f"{last.replace('_', ' ')} {left}", rest]
        rows.append((free.points, words))
    head = ["metric", "honest share, %", "best cheat", "gain", "with safeguards", "best with safeguards", "left"]
    return grid([head, *(words for _, words in sorted(rows, key=lambda row: -row[0]))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about = "; ".join(f"{name}: {each.title}" for name, each in CHEATS.items())
    parser.add_argument("--federations", nargs="+", default=FEDERATIONS, metavar="NAME", help="of flsv bench --list")
    parser.add_argument("--cheats", nargs="+", default=[*CHEATS], choices=CHEATS, metavar="CHEAT", help=about)
    parser.add_argument("--seeds", type=int, default=3, help="runs of every federation; client SEED cheats in each")
    parser.add_argument("--rounds", type=int, help="of every run. Default: the federation's")
    parser.add_argument("--kept", type=Path, default=Path("runs/cheating.jsonl"), help="trials that are done")
    parser.add_argument("--out", type=Path, default=Path("runs/cheating.csv"), help="all gains")
    options = parser.parse_args()
    trials = Trials(options)
    gains: dict[tuple[str, str, str], Gain] = {}
    rows = [[*COLUMNS, "accuracy_lost"]]
    honest: dict[str, dict[int, Run]] = {}
    for cheat in options.cheats:
        metrics = ASKING if cheat == "reports" else METRICS
        for guard in GUARDS[:1] if metrics is ASKING else GUARDS:
            found = trials.of(options.federations, metrics, guard, cheat)
            named = sum(bool(each.they(each.cheated) & {*each.cheated.named}) for each in found)
            others = sum(len({*each.cheated.named} - each.they(each.cheated)) for each in found)
            lost = np.mean([each.honest.accuracy - each.cheated.accuracy for each in found])
            for metric in found[0].honest.shares:
                each = gains[metric, guard, cheat] = gain(found, metric)
                numbers = [f"{number:.1f}" for number in (each.honest, each.points, each.half)]
                rows.append([metric, guard, cheat, *numbers, str(len(found)), str(named), str(others), f"{lost:.3f}"])
            if metrics is METRICS:
                honest[guard] = {id(each.honest): each.honest for each in found}
    save_csv(options.out, rows)
    print(f"\n{page_table(gains)}\n")
    for (metric, _, cheat), each in gains.items():
        if cheat == "reports":
            print(f"{metric}, {cheat}: {each}, honest {each.honest:.1f} %")
    for guard, kept in honest.items():
        runs = [*kept.values()]
        ranks = ", ".join(f"{metric} {np.mean([run.ranks[metric] for run in runs]):.2f}" for metric in runs[0].ranks)
        accuracy, named = np.mean([run.accuracy for run in runs]), sum(len(run.named) for run in runs)
        print(f"Nobody cheats, safeguards {guard}: accuracy {accuracy:.3f}, {named} named; rank correlations {ranks}")
    print(f"All gains: {options.out}")


if __name__ == "__main__":
    main()
