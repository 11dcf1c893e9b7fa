"""What a client gains that cheats: its share of the payment with and without it, in the same run of the same seed.

    python tools/studies/cheating.py                                        the page's table and its CSV
    python tools/studies/cheating.py --federations digits_sizes --seeds 1 --rounds 2 --cheats sybils scaling

One client cheats at a time. Every run is done without safeguards and with them: ``OutlierFilter``, ``NormCap(1.25)``,
``SampleCap(1.25)`` and ``CopyFilter``, whose copies and echoes are paid nothing. Runs are kept in ``--kept``: what was
stopped goes on. Every gain goes to ``--out``: in points of the payment, the mean over trials and half its 90 % interval
by Student's t.

One client that is several is the Sybil attack (Douceur, IPTPS 2002). That copies inflate Shapley values of data, too:
Han et al., "Replication-Robust Payoff-Allocation for Machine Learning Data Markets", arXiv:2006.14583.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pandas as pd
import torch
from common import grid
from torch import Tensor

from flsv import FederatedLoop, Reporting
from flsv.attacks import Alignment, FalseReports, FreeRider, InnerProductManipulation, Scaling
from flsv.benchmark import Federation, federation
from flsv.benchmark.federation import QUIET, quiet
from flsv.benchmark.registry import entry
from flsv.benchmark.scores import shares
from flsv.data import Partitioner
from flsv.filters import CopyFilter, NormCap, OutlierFilter, SampleCap
from flsv.report.reading import mean_half_width
from flsv.utilities.seeding import generator_for, isolated_rngs


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
    "echo": Cheat("sends the server's last step, and nothing of its own", partial(Alignment, mix=1.0)),
    "noise": Cheat("sends noise as long as an update", partial(FreeRider, mode="noise")),
    "flip": Cheat("sends, with the next client, the opposite of what all learnt", InnerProductManipulation, pair=True),
    "reports": Cheat("says that the others' model does badly", partial(FalseReports, loss=0.0, score=0.0)),
}
WEIGHED = "flsv.metrics.ClassSpecificShapley(weighting='samples')"
METRICS = ("size", "cssv", WEIGHED, "cgsv", "gradient_1", "gradient_agreement")
METRICS += ("fedsv_samples", "permutation_24", "decayed_sum")
#: Those that ask clients what they think of models, each of which then keeps a fifth of its samples to judge by.
ASKING = ("flsv.metrics.ContributionEstimation", "flsv.metrics.ContributionEstimation(cap=1.25)")
FEDERATIONS = ("digits_duplicates", "mnist_dirichlet", "fashion_label_noise")
GUARDS = ("none", "all")


@dataclass(frozen=True)
class Run:
    """What one fit came to: shares of the payment by metric, of who is named as a copy or an echo 0; who is named; the
    model's accuracy."""

    shares: dict[str, list[float]]
    named: list[int]
    accuracy: float


def fit(where: Federation, names: Sequence[str], seed: int, guard: str, attacks: Sequence[Any]) -> Run:
    """One fit of a federation, with these metrics in it."""
    entries = dict(map(entry, names))
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
    named = sorted(client for group in copies.groups for client in group)
    found = {}
    for name, key in zip(entries, metrics):
        values = metrics[key].per_client(loop.contribution_metrics.contributions[key]).detach().cpu().double()
        values[named] = float("nan")
        found[name] = shares(values).tolist()
    return Run(found, named, float(judged[0]["val_accuracy"]))


def cheated(honest: Federation, cheat: str, client: int) -> tuple[Federation, list[Any]]:
    """The federation in which a client cheats so, and what it does to its updates."""
    each, clients = CHEATS[cheat], len(honest.num_samples)
    if each.attack is not None:
        return honest, [each.attack(clients=[client, (client + 1) % clients] if each.pair else [client])]
    arguments = {"partitioner": honest.data["partitioner"], "client": client, "cheat": cheat}
    dealt = {"class_path": f"{__name__}.Cheating", "init_args": arguments}
    return replace(honest, data={**honest.data, "partitioner": dealt}), []


class Runs:
    """Runs by what they are of, each done once and kept in a file of JSON lines."""

    def __init__(self, path: Path, rounds: int | None) -> None:
        self.path, self.rounds, self.runs = path, rounds, dict[str, Run]()
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text().splitlines() if path.is_file() else ():
            key, run = json.loads(line)
            self.runs[key] = Run(**run)

    def __call__(self, name: str, metrics: Sequence[str], seed: int, guard: str, cheat: str | None) -> Run:
        """The run of a federation; ``cheat`` None: nobody cheats. Client ``seed`` is the one that does."""
        key = f"{name} {self.rounds} {seed} {guard} {cheat} {' '.join(metrics)}"
        if key not in self.runs:
            where, attacks = federation(name), list[Any]()
            where = replace(where, rounds=self.rounds or where.rounds)
            where = where.with_client_validation if metrics is ASKING else where
            if cheat is not None:
                where, attacks = cheated(where, cheat, seed % len(where.num_samples))
            self.runs[key] = fit(where, metrics, seed, guard, attacks)
            with self.path.open("a") as file:
                file.write(json.dumps([key, asdict(self.runs[key])]) + "\n")
            print(f"{name}, seed {seed}, {cheat or 'honest'}, safeguards: {guard}", flush=True)
        return self.runs[key]


def paid(cheat: str, seed: int, honest: Run, run: Run) -> set[int]:
    """Who is paid for the cheat: the client, the one that it cheats with, and all after the honest ones."""
    clients, now = (len(next(iter(each.shares.values()))) for each in (honest, run))
    me = seed % clients
    beside = {(me + 1) % clients} if CHEATS[cheat].pair else set()
    return {me, *beside, *range(clients, now)}


def part(run: Run, metric: str, they: set[int]) -> float:
    """Their share of the payment."""
    return sum(share for client, share in enumerate(run.shares[metric]) if client in they)


def gains(cheat: str, guard: str, trials: Sequence[tuple[int, Run, Run]]) -> list[dict[str, Any]]:
    """A row per metric, of runs with and without the cheat, by the seeds."""
    who = [paid(cheat, seed, honest, run) for seed, honest, run in trials]
    more = {
        "trials": len(trials),
        "named": sum(bool(they & {*run.named}) for they, (_, _, run) in zip(who, trials)),
        "others_named": sum(len({*run.named} - they) for they, (_, _, run) in zip(who, trials)),
        "honest_accuracy": sum(honest.accuracy for _, honest, _ in trials) / len(trials),
        "accuracy_lost": sum(honest.accuracy - run.accuracy for _, honest, run in trials) / len(trials),
    }
    rows = []
    for metric in trials[0][1].shares:
        before = 100 * pd.Series([part(honest, metric, they) for they, (_, honest, _) in zip(who, trials)])
        after = 100 * pd.Series([part(run, metric, they) for they, (_, _, run) in zip(who, trials)])
        points = after - before
        half = mean_half_width(points.std(), len(points))
        numbers = {"honest_percent": before.mean(), "gain": points.mean(), "half_width": half}
        rows.append({"metric": metric, "safeguards": guard, "cheat": cheat, **numbers, **more})
    return rows


def page_table(found: pd.DataFrame) -> str:
    """A row a metric, the most gamed first: its best cheats without and with safeguards."""
    by = found.set_index(["metric", "safeguards", "cheat"]).sort_index()
    rows = []
    for metric in found.query("safeguards == 'all'")["metric"].unique():
        free, guarded = by.loc[metric, "none"], by.loc[metric, "all"]
        first, last = free["gain"].idxmax(), guarded["gain"].idxmax()
        shown = [f"{each['gain']:+.1f} ± {each['half_width']:.1f}" for each in (free.loc[first], guarded.loc[first])]
        left = 100 * guarded["gain"].max() / free["gain"].max()
        best = f"{last} {guarded['gain'].max():+.1f}"
        rows.append([f"`{metric}`", f"{free.loc[first, 'honest_percent']:.1f}", first, *shown, best, f"{left:.0f} %"])
    head = ["metric", "honest share, %", "best cheat", "gain", "with safeguards", "best with safeguards", "left"]
    return grid([head, *sorted(rows, key=lambda row: -float(row[3].split()[0]))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about = "; ".join(f"{name}: {each.title}" for name, each in CHEATS.items())
    parser.add_argument("--federations", nargs="+", default=FEDERATIONS, metavar="NAME", help="of flsv bench --list")
    parser.add_argument("--cheats", nargs="+", default=[*CHEATS], choices=CHEATS, metavar="CHEAT", help=about)
    parser.add_argument("--seeds", type=int, default=3, help="runs of every federation; client SEED cheats in each")
    parser.add_argument("--rounds", type=int, help="of every run. Default: the federation's")
    parser.add_argument("--kept", type=Path, default=Path("runs/cheating.jsonl"), help="runs that are done")
    parser.add_argument("--out", type=Path, default=Path("runs/cheating.csv"), help="all gains")
    options = parser.parse_args()
    runs, rows = Runs(options.kept, options.rounds), list[dict[str, Any]]()
    for cheat in options.cheats:
        metrics = ASKING if cheat == "reports" else METRICS
        for guard in ("none",) if metrics is ASKING else ("none", "all"):
            trials = [
                (seed, runs(name, metrics, seed, guard, None), runs(name, metrics, seed, guard, cheat))
                for name in options.federations
                for seed in range(options.seeds)
            ]
            rows += gains(cheat, guard, trials)
    found = pd.DataFrame(rows)
    found.round(3).to_csv(options.out, index=False)
    print(f"\n{page_table(found)}\n\nAll gains: {options.out}")


if __name__ == "__main__":
    main()
