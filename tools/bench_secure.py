# ruff: noqa: E501 (lines of the page are as long as the page has them)
"""What secure sums cost, and how near the values that can be had from them come to the exact ones.

    python tools/bench_secure.py [--seeds 5] [--rounds 10] [--out docs/results/secure.md]

Cost: federations of sites in one process, whose packets are counted on their way (their JSON and the bytes of their
tensors), with and without secure sums. Values: federations of nine clients are trained with all 512 coalitions beside
them (``ShadowShapley(coalitions="all")``), whose game has the exact Shapley values for its seed, and the games of all
280 ways to make three groups of three, whose coalitions are among these. ``EverybodyElse`` is of the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import lightning as L
import torch
from common import be_quiet, grid, quiet_trainer
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.aggregation import FedAvg
from flsv.benchmark.scores import share_error, spearman
from flsv.data import (
    ClosedSetLabelNoise,
    DirichletPartitioner,
    IIDPartitioner,
    OneClient,
    ProportionPartitioner,
    Splits,
    load_image_data,
)
from flsv.engines.remote import Directory, Packet, RemoteData, RemoteFederation, SecureSums, Site, agreement
from flsv.functional import exact_shapley, few_coalitions
from flsv.metrics import EverybodyElse, ShadowShapley

QUIET = Reporting(table=False, figures=0, files=False)
LOSS: dict[str, Any] = {"performance": "negative_loss"}
CLIENTS = 9


def module(hidden: int = 16) -> ClassifierClient:
    torch.manual_seed(0)
    layers, optimizer = {"hidden": [hidden]}, partial(torch.optim.SGD, lr=0.1)
    return ClassifierClient("mlp", num_classes=10, input_shape=(1, 8, 8), network_args=layers, optimizer=optimizer)


# ---- cost


class Counted:
    """Sites in this process; what crosses is counted.

    Args:
        sites: by address.

    Attributes:
        messages: of all sites, since :meth:`begin`.
        down: bytes, likewise.
        up: likewise.
    """

    def __init__(self, sites: Mapping[int, Site]) -> None:
        self.sites = dict(sites)
        self.begin()

    def begin(self) -> None:
        self.messages = self.down = self.up = 0

    def present(self) -> list[int]:
        return list(self.sites)

    def exchange(self, packets: Mapping[int, Packet], wait: Any) -> dict[int, Packet]:
        replies = {address: self.sites[address].answer(packet) for address, packet in packets.items()}
        self.messages += len(packets)
        self.down += sum(map(size, packets.values()))
        self.up += sum(map(size, replies.values()))
        return replies


def size(packet: Packet) -> int:
    return len(json.dumps(packet.plain)) + sum(tensor.nbytes for tensor in packet.tensors.values())


class Part(L.LightningDataModule):
    """The training images of one of n sites; for the server, the test images as its validation set."""

    def __init__(self, site: int, sites: int) -> None:
        super().__init__()
        self.site, self.sites = site, sites

    def train_dataloader(self) -> DataLoader:
        digits = load_image_data("digits").train
        return DataLoader(Subset(digits, range(self.site, 1437, self.sites)), batch_size=16, shuffle=True)


class OfServer(L.LightningDataModule):
    def val_dataloader(self) -> DataLoader:
        return DataLoader(load_image_data("digits").test, batch_size=360)


def loop(kind: str, sites: int, seed: int = 0) -> FederatedLoop:
    """``kind``: which metrics."""
    groups = [list(range(first, first + 3)) for first in range(0, sites, 3)]
    metrics = {
        "no metric": {},
        "EverybodyElse": {"else": EverybodyElse(**LOSS)},
        "groups": {"groups": ShadowShapley(coalitions="all", groups=groups, **LOSS)},
    }[kind]
    return FederatedLoop(FedAvg(), metrics=metrics, seed=seed, reporting=QUIET)


def site_data(site: int, sites: int) -> FederatedDataModule:
    return FederatedDataModule(
        Part(site, sites), OneClient(), batch_size=16, splits=Splits(server_val=0.0, client_val=0.2)
    )


def federation(
    kind: str, sites: int, secure: Any, rounds: int, hidden: int = 64
) -> tuple[FederatedLoop, Counted, float]:
    """A fit across packets: the loop, what has crossed, and its seconds."""
    make, names = partial(loop, kind, sites), [f"site {i}" for i in range(sites)]
    with tempfile.TemporaryDirectory() as folder:
        options = {"folder": Path(folder), "upload_seed": 0, "secure": secure}
        wire = Counted(
            {i: Site(name, partial(module, hidden), partial(site_data, i, sites), make, **options)
             for i, name in enumerate(names)}
        )  # fmt: skip
        ours = agreement(module(hidden), make(), secure)
        directory = Directory(wire, names, ours, Path(folder) / "sites.json", timeout=60, wait=60)
        directory.gather()
        known = [directory.sizes[i] for i in range(sites)]
        data = RemoteData(names, known, 10, own=OfServer(), counted=not secure)
        fitted = make().replace(engine=partial(RemoteFederation, directory, secure=secure))
        wire.begin()
        start = time.perf_counter()
        quiet_trainer(folder, rounds, [fitted]).fit(module(hidden), data)
        return fitted, wire, time.perf_counter() - start


def cost(rounds: int) -> list[list[str]]:
    """A row per number of sites, metrics and kind of sums."""
    rows = [["sites", "measured by", "sums", "messages", "kB down", "kB up", "s", "largest difference of values"]]
    for sites, kind in [(3, "no metric"), (3, "EverybodyElse"), (6, "no metric"), (6, "EverybodyElse"), (6, "groups"),
                        (9, "EverybodyElse"), (9, "groups")]:  # fmt: skip
        plain: Mapping[str, Tensor] = {}
        for name, secure in {"in clear": False, "secure": True, "16 bits": SecureSums(clip=0.5, bits=16)}.items():
            fitted, wire, seconds = federation(kind, sites, secure, rounds)
            plain = plain or fitted.contributions
            off = [float((value - plain[metric]).abs().max()) for metric, value in fitted.contributions.items()]
            each = sites * rounds
            rows.append(
                [str(sites), kind, name, f"{wire.messages / each:.0f}", f"{wire.down / each / 1e3:.0f}",
                 f"{wire.up / each / 1e3:.0f}", f"{seconds / rounds:.2f}", f"{max(off):.1e}" if off and secure else ""]
            )  # fmt: skip
            print(*rows[-1], flush=True)
    return rows


# ---- values


def datas() -> dict[str, Callable[[], FederatedDataModule]]:
    splits = Splits(server_val=0.15, client_val=0.2, seed=0)
    few = {"batch_size": 16, "splits": splits}
    wrong = [ClosedSetLabelNoise(0.4, clients=[1, 4, 7]), ClosedSetLabelNoise(0.8, clients=[2, 5, 8])]
    return {
        "wrong labels": lambda: FederatedDataModule("digits", IIDPartitioner(CLIENTS), corruptions=wrong, **few),
        "sizes": lambda: FederatedDataModule(
            "digits", ProportionPartitioner([[share / 45] for share in [1, 4, 10] * 3]), **few
        ),
        "Dirichlet(0.3)": lambda: FederatedDataModule(
            "digits", DirichletPartitioner(CLIENTS, 0.3, seed=1, min_samples=30), **few
        ),
    }


class Kept(ShadowShapley):
    """Keeps the last game."""

    def update(
        self, client_ids: Tensor, coalitions: Tensor, utility: Callable[[Tensor], Tensor], round_index: int = 0
    ) -> None:
        def kept(masks: Tensor) -> Tensor:
            found = utility(masks).double()
            vars(self)["game"] = {tuple(mask): value for mask, value in zip(masks.tolist(), found)}
            return found

        super().update(client_ids, coalitions, kept, round_index)


def played(make: Callable[[], FederatedDataModule], seed: int, rounds: int) -> tuple[dict[Any, Tensor], Tensor]:
    """The game of all coalitions after the last round, and ``EverybodyElse``."""
    exact = Kept(coalitions="all", every=rounds, **LOSS)
    metrics = {"exact": exact, "else": EverybodyElse(**LOSS)}
    fitted = FederatedLoop(FedAvg(), metrics=metrics, seed=seed, reporting=QUIET)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet_trainer(folder, rounds, [fitted]).fit(module(), make())
    return vars(exact)["game"], fitted.contributions["else"].double()


def groupings(clients: Sequence[int] = tuple(range(CLIENTS))) -> Iterator[list[list[int]]]:
    """All ways to make groups of three."""
    if not clients:
        yield []
        return
    first, *rest = clients
    for others in combinations(rest, 2):
        left = [client for client in rest if client not in others]
        yield from ([[first, *others], *more] for more in groupings(left))


def of_groups(game: Mapping[Any, Tensor], groups: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """The groups' values, and the clients' equal parts of them, as ``ShadowShapley(groups=...)`` has them."""

    def utility(masks: Tensor) -> Tensor:
        return torch.stack(
            [game[tuple(any(m[g] and c in group for g, group in enumerate(groups)) for c in range(CLIENTS))]
             for m in masks.tolist()]
        )  # fmt: skip

    values = exact_shapley(utility, len(groups)).values
    dealt = torch.zeros(CLIENTS, dtype=torch.float64)
    for value, members in zip(values, groups):
        dealt[list(members)] = value / len(members)
    return values, dealt


def alike(values: Tensor) -> list[list[int]]:
    order = values.argsort().tolist()
    return [sorted(order[place : place + 3]) for place in range(0, CLIENTS, 3)]


def scores(make: Callable[[], FederatedDataModule], seeds: int, rounds: int) -> dict[str, list[list[float]]]:
    """By method: for each seed the rank correlations with this seed's exact values, with the mean of the other
    seeds', and what part of the payment by this seed's goes to others."""
    runs = [played(make, seed, rounds) for seed in range(seeds)]
    masks = few_coalitions(CLIENTS, "all")
    exact = [exact_shapley(lambda m, g=game: torch.stack([g[tuple(x)] for x in m.tolist()]), CLIENTS).values
             for game, _ in runs]  # fmt: skip
    assert len(runs[0][0]) == len(masks)
    found = defaultdict[str, list[list[float]]](list)
    for seed, (game, others) in enumerate(runs):
        own, rest = exact[seed], torch.stack(exact[:seed] + exact[seed + 1 :]).mean(0)

        def judged(values: Tensor, own: Tensor = own, rest: Tensor = rest) -> list[float]:
            return [spearman(values, own), spearman(values, rest), share_error(values, own)]

        found["exact, this seed"].append(judged(own))
        drawn = [judged(of_groups(game, groups)[1]) for groups in groupings()]
        found["groups, mean of all 280"].append([statistics.mean(column) for column in zip(*drawn)])
        found["groups of alike clients"].append(judged(of_groups(game, alike(rest))[1]))
        found["EverybodyElse"].append(judged(others))
        found["all alike"].append(judged(torch.ones_like(own)))
        within = [spearman(of_groups(game, groups)[0], torch.stack([own[g].sum() for g in groups]))
                  for groups in groupings()]  # fmt: skip
        found["groups among groups"].append([statistics.mean(within), float("nan"), float("nan")])
    return dict(found)


def values(seeds: int, rounds: int) -> tuple[list[list[str]], dict[tuple[str, str], list[float]]]:
    """A row per federation and method, and the means behind it."""
    head = ["federation", "values", "rank, this seed", "least", "rank, other seeds", "payment to others"]
    rows, means = [head], dict[tuple[str, str], list[float]]()
    for name, make in datas().items():
        start = time.perf_counter()
        for method, runs in scores(make, seeds, rounds).items():
            mean = means[name, method] = [statistics.mean(column) for column in zip(*runs)]
            shown = ["" if each != each else f"{each:.2f}" for each in mean]
            rows.append([name, method, shown[0], f"{min(run[0] for run in runs):.2f}", *shown[1:]])
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    return rows, means


# ---- the page


def machine() -> str:
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]  # fmt: skip
    return (
        f"{os.cpu_count()} cores ({names[0] if names else platform.machine()}), beside other work; one thread; "
        f"torch {torch.__version__}, Python {platform.python_version()}, {date.today()}"
    )


def page(costs: list[list[str]], table: list[list[str]], means: Any, seeds: int, rounds: int, cost_rounds: int) -> str:
    by = {(row[0], row[1], row[2]): row for row in costs[1:]}
    plain, sums, half = (by["6", "EverybodyElse", kind] for kind in ("in clear", "secure", "16 bits"))
    grouped, ungrouped = by["6", "groups", "secure"], by["6", "groups", "in clear"]
    off = max((row[7] for row in costs[1:] if row[2] == "secure" and row[7]), key=float)

    def told(method: str, place: int = 0) -> str:
        return ", ".join(f"{means[name, method][place]:.2f} ({name})" for name in dict.fromkeys(n for n, _ in means))

    return f"""# Secure sums

What do [secure sums](../deployment.md#secure-aggregation) cost in bytes, messages and time, and which contributions can still be
had from them? Sites in one process whose packets are counted; federations of nine clients on scikit-learn's digits for the values.

- **The same values**: `EverybodyElse` and grouped `ShadowShapley` differ from the run in clear by {off} at most.
- **What it costs**: with six sites and `EverybodyElse` a site has {sums[3]} messages a round instead of {plain[3]}, and sends
  {sums[5]} kB instead of {plain[5]}; with `SecureSums(bits=16)` {half[5]}. Two groups of three send {grouped[5]} kB ({ungrouped[5]} in clear): each
  site sends a masked row for every coalition, also for those that it is not in.
- **What groups can tell**: which group is worth more (rank correlation of groups: {told("groups among groups")}),
  not who of a group. Of single clients, groups that somebody makes without knowing them have
  {told("groups, mean of all 280")}; if alike clients are put together,
  {told("groups of alike clients")}; three values for nine clients allow 0.95 at most.
- **`EverybodyElse`** gives each client a value of its own: {told("EverybodyElse")}. It says who is of use to the
  others' own validation samples, which in the first of these have wrong labels, too: another question than the exact values'.
- So a federation that pays by secure sums pays groups, and should make them of sites that want to be paid alike.

## What it costs

```bash
python tools/bench_secure.py
```

{machine()}.

Per site and round, in {cost_rounds} rounds: an MLP of 4,810 parameters (19 kB), packets as JSON and the bytes of their
tensors, without what Flower and TLS add. Seconds are a round's of all sites, one after the other. "16 bits":
`SecureSums(clip=0.5, bits=16)`. The last column: of values, to the run in clear.

{grid(costs)}

Messages of a round: keys, shares, the masked model, unmasking, and a question of `EverybodyElse`. Keys and shares grow with the
number of sites: each seals two shares for each other.

## What the values are worth

Nine clients, an MLP of 1,210 parameters, FedAvg, {rounds} rounds, {seeds} seeds. "Exact": Shapley values of all 512 coalitions, each
trained as a federation of its own with the same seed; "other seeds": their mean over the other seeds. A seed's own exact values
against others are the ceiling. "Wrong labels": clients 0, 3, 6 have none, 1, 4, 7 40 %, 2, 5, 8 80 %; "sizes": amounts
of 1, 4 and 10; performance is minus the validation loss. "Alike clients": those next to each
other by the other seeds' values, which nobody knows beforehand. "Groups among groups": the rank correlation of the three
groups' values with the sums of their clients' exact ones. "Payment to others": the share of a payment by the values that goes to
others than by the exact ones. Groups' values are computed from the game of all coalitions, in which those of groups are;
`tests/metrics/test_shadow_groups.py` and `tests/engines/remote/secure/test_grouped.py` hold that the metric gives the same, with
secure sums, too.

{grid(table)}

Not measured: larger models, a network in between, more than nine sites. Several runs with other groups say more of single
clients than one run does: to who pays, and to who attacks.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--cost-rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("docs/results/secure.md"))
    given = parser.parse_args()
    be_quiet()
    table, means = values(given.seeds, given.rounds)
    text = page(cost(given.cost_rounds), table, means, given.seeds, given.rounds, given.cost_rounds)
    given.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
