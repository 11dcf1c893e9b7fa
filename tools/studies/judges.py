"""Coalitions judged by the clients: how near their values are to the truth, and what lies about it bring.

    python tools/studies/judges.py tuning           the benchmark's tuning federations
    python tools/studies/judges.py drawn_0_16       16 federations drawn here

In one run, the same models of coalitions are scored on the server's validation samples and on those that all clients
hold out, a fifth each, beside CSSV and CGSV. The truth of the benchmark's federations is the package's. Of those drawn
here it is ShadowShapley's by the server under two other seeds: four to six clients have skewed labels of scikit-learn's
digits, and in each second federation one of them has 60 % random ones, also where it judges.

Each client in turn lies about what it judges: it says that it gets all right of coalitions with itself, and nothing of
others; that coalitions get the less right, the more others are in; and this with ten times as many samples. What it
gains is its share of the payment, less its share where it tells the truth.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from common import be_quiet, grid
from scipy.stats import t as student
from sklearn.datasets import load_digits
from torch import Tensor

from flsv import ClassifierClient, FederatedLoop, Reporting
from flsv.benchmark import Federation, federation, names, truth_table
from flsv.benchmark.federation import SETS, quiet
from flsv.benchmark.scores import share_error, shares, spearman
from flsv.data import DirichletPartitioner, FederatedDataModule, Splits
from flsv.functional import few_coalitions_shapley
from flsv.games.judges import hits_by_class, unlike_others
from flsv.metrics import ClassSpecificShapley, CosineGradientShapley, ShadowShapley
from flsv.metrics.shadow import coalition_masks
from flsv.utilities.seeding import isolated_rngs

BY = ("server", "clients", "cssv", "cgsv")
#: Rounds between two valuations: the last one is enough.
LATE = 1000


class Drawn(Federation):
    """Number NAME: its data, and its module."""

    def datamodule(self) -> FederatedDataModule:
        number = int(self.name.removeprefix("drawn_"))
        draw = torch.Generator().manual_seed(number)
        x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
        x, order = (x / 16).float().view(-1, 1, 8, 8), torch.randperm(len(y), generator=draw)
        server, rest = order[:600], order[600:]
        clients = int(torch.randint(4, 7, (), generator=draw))
        noisy = int(torch.randint(clients, (), generator=draw)) if number % 2 else -1
        held = {}
        deal = DirichletPartitioner(clients, alpha=0.5, min_samples=30, seed=number)
        for client, part in enumerate(deal(y[rest], 10)):
            labels = y[rest[part]].clone()
            wrong = torch.rand(len(part), generator=draw) < (0.6 if client == noisy else 0.0)
            labels[wrong] = torch.randint(10, (int(wrong.sum()),), generator=draw)
            held[str(client)] = x[rest[part]], labels
        splits = Splits(server_val=0.0, client_val=0.2, seed=number)
        data = FederatedDataModule(clients=held, val=(x[server], y[server]), splits=splits, batch_size=16)
        data.setup("fit")
        return data

    def module(self) -> ClassifierClient:
        optimizer = partial(torch.optim.SGD, lr=0.1)
        return ClassifierClient("mlp", network_args={"hidden": [32]}, optimizer=optimizer)


def given(name: str) -> list[Federation]:
    """Federations by the name of a set, of one of them, or ``drawn_FIRST_COUNT``."""
    if name.startswith("drawn_"):
        first, count = map(int, name.split("_")[1:])
        return [Drawn(f"drawn_{n}", "drawn", "fresh", 8, {}, {}) for n in range(first, first + count)]
    return [each for n in (names(name) if name in SETS else [name]) if (each := federation(n)).available]


def fit(where: Federation, metrics: dict[str, Any], seed: int) -> FederatedLoop:
    """One run of a federation with these metrics."""
    loop = FederatedLoop(
        metrics=metrics,
        uploads=[*where.attackers()],
        local_epochs=where.local_epochs,
        reporting=Reporting(figures=0, table=False, files=False),
        seed=seed,
    )
    with isolated_rngs(seed, "benchmark"), quiet():
        where.trainer(loop).fit(where.module(), where.datamodule())
    return loop


def truth_of(where: Federation) -> Tensor:
    """``[n]``."""
    if not isinstance(where, Drawn):
        return truth_table(where).mean
    found = [fit(where, {"server": ShadowShapley(every=LATE)}, seed).contributions["server"] for seed in (101, 102)]
    return torch.stack([each.as_subclass(Tensor) for each in found]).mean(0)


def told(kind: str, liar: int, answers: dict[int, Tensor], masks: Tensor) -> dict[int, Tensor]:
    """What all say, one of whom lies: counts ``[M + 1]`` above hits ``[K, M + 1]``."""
    counts = answers[liar][0] * (10 if "inflated" in kind else 1)
    others = masks.clone()
    others[:, liar] = False
    part = masks[:, liar].double() if kind == "itself" else 1 - others.double().sum(1) / (masks.shape[1] - 1)
    return answers | {liar: torch.cat([counts[None], (part[:, None] * counts).long()])}


def values_of(answers: dict[int, Tensor], samples: Tensor, masks: Tensor) -> Tensor:
    """``[n]``, as ClientJudges and ShadowShapley come to them."""
    hits, held = hits_by_class([*answers.values()], samples[[*answers]])
    return few_coalitions_shapley(masks, (hits / held).nanmean(1)).values


def named(answers: dict[int, Tensor], liar: int) -> bool:
    """Whether an event names the liar."""
    stacked = torch.stack([*answers.values()]).double()
    return liar in [[*answers][place] for place in unlike_others((stacked[:, 1:] / stacked[:, :1]).nanmean(-1))]


def measure(where: Federation, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of scores, by whom models were judged, and of lies."""
    truth, here = truth_of(where), where.with_client_validation if not isinstance(where, Drawn) else where
    game: dict[str, Any] = {"performance": where.performance, "mode": where.mode, "every": LATE}
    metrics: dict[str, Any] = {"server": ShadowShapley(**game), "clients": ShadowShapley(**game, judges="clients")}
    if isinstance(where, Drawn) or where.classifies:
        metrics["cssv"] = ClassSpecificShapley()
    loop = fit(here, {**metrics, "cgsv": CosineGradientShapley()}, seed)
    found = {name: value.as_subclass(Tensor).cpu().double() for name, value in loop.contributions.items()}
    about = {"federation": where.name, "seed": seed}
    scores = [
        about | {"by": name, "rank": spearman(values, truth), "misallocated": 100 * share_error(values, truth)}
        for name, values in found.items()
    ]
    judges = loop.run.server.games.evaluator_of(loop.metrics["clients"].measured_by)  # type: ignore[union-attr]
    answers = {client: answer.cpu() for client, answer in judges.answers.items()}
    masks = coalition_masks("auto", len(truth))
    if not all(answer.ndim == 2 and len(answer) == 1 + len(masks) for answer in answers.values()):
        return scores, []  # no classes, or coalitions were trained one by one
    samples = here.datamodule().num_samples
    honest = shares(values_of(answers, samples, masks))
    lies = []
    for kind in ("", "itself", "spite", "spite, inflated"):
        for liar in answers:
            said = told(kind, liar, answers, masks) if kind else answers
            gain = 100 * float(shares(values_of(said, samples, masks))[liar] - honest[liar])
            lies.append(about | {"lie": kind, "liar": liar, "gain": gain, "named": named(said, liar)})
    return scores, lies


def interval(values: Iterable[float]) -> str:
    """Mean and half its 90 % interval."""
    known = pd.Series([*values]).dropna()
    half = student.ppf(0.95, len(known) - 1) * known.sem() if len(known) > 1 else float("nan")
    return f"{known.mean():+.3f} ± {half:.3f}" if known.abs().max() < 2 else f"{known.mean():+.1f} ± {half:.1f}"


def table(scores: pd.DataFrame) -> str:
    """A row for each judge, means over federations; and what the clients' judgement has more, pair by pair."""
    means = scores.groupby(["by", "federation"])[["rank", "misallocated"]].mean()
    rows: list[Sequence[str]] = [
        ["by", "rank", "worst", "misallocated, %", "clients: rank", "clients: misallocated", "federations"]
    ]
    ours = means.loc["clients"]
    for by in BY:
        mine = means.loc[by]
        more = (ours - mine).dropna()
        paired = ["", ""] if by == "clients" else [interval(more["rank"]), interval(more["misallocated"])]
        cells = f"{mine['rank'].mean():.3f}", f"{mine['rank'].min():.2f}", f"{mine['misallocated'].mean():.1f}"
        rows.append([by, *cells, *paired, str(len(mine))])
    return grid(rows)


def lies_table(lies: pd.DataFrame) -> str:
    """A row for each lie."""
    rows: list[Sequence[str]] = [["lie", "gain, points", "most", "named", "cases"]]
    for lie, found in lies.groupby("lie"):
        most = f"{found['gain'].max():+.1f}"
        rows.append(
            [str(lie) or "none", interval(found["gain"]), most, f"{100 * found['named'].mean():.0f} %", str(len(found))]
        )
    return grid(rows)


def by_federation(lies: pd.DataFrame) -> pd.DataFrame:
    """Of each federation and lie: the mean gain and the largest, and the share of the liars that an event names."""
    found = lies.assign(lie=lies["lie"].replace("", "none")).groupby(["federation", "lie"])
    return found.agg(gain=("gain", "mean"), most=("gain", "max"), named=("named", "mean"), cases=("gain", "count"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help="a federation of flsv bench, a set, drawn_FIRST_COUNT")
    parser.add_argument("--seeds", type=int, default=1, help="runs of every federation")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/judges"), help="folder of judges.csv and judges_lies.csv"
    )
    options = parser.parse_args()
    be_quiet()
    options.out.mkdir(parents=True, exist_ok=True)
    scores, lies = list[dict[str, Any]](), list[dict[str, Any]]()
    for where in [each for name in options.names for each in given(name)]:
        for seed in range(options.seeds):
            try:
                found = measure(where, seed)
            except Exception as error:
                print(f"{where.name}: {str(error)[:200]}", flush=True)
                continue
            scores += found[0]
            lies += found[1]
            print(where.name, {row["by"]: round(row["rank"], 2) for row in found[0]}, flush=True)
            pd.DataFrame(scores).round(4).to_csv(options.out / "judges.csv", index=False)
            by_federation(pd.DataFrame(lies)).round(2).to_csv(options.out / "judges_lies.csv")
    print(f"\n{table(pd.DataFrame(scores))}\n\n{lies_table(pd.DataFrame(lies))}")


if __name__ == "__main__":
    main()
