"""One federation by every engine: are the numbers the same, and what do a round and a process cost?

    python tools/bench_engines.py [--clients 12] [--rounds 6] [--engines sequential ranks vmap remote]

Every engine runs in processes of its own with one torch thread: ``sequential``; ``ranks``, two of them; ``vmap``; and
``remote``, sites that train by themselves (each with a Trainer and a data module of its own) behind packets that go
through JSON and copies, without a network. Prints, as a Markdown table, the median seconds of a round after the first,
the largest memory of a process, and how far weights and class-specific Shapley values are from the sequential ones.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from common import be_quiet
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.aggregation import ShapFedWA
from flsv.data import GroupPartitioner, Splits
from flsv.engines.remote import Directory, RemoteData, RemoteFederation, Site, agreement
from flsv.metrics import ClassSpecificShapley

IMAGES, BATCH = 200, 32
ENGINES = ("sequential", "ranks", "vmap", "remote")


def images(clients: int) -> tuple[Tensor, Tensor]:
    """x ``[clients * IMAGES, 1, 28, 28]``, y: of random blobs, one per class."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(10, (clients * IMAGES,), generator=draw)
    centers = torch.randn(10, 1, 28, 28, generator=draw)
    return centers[y] + torch.randn(len(y), 1, 28, 28, generator=draw), y


def make_module() -> ClassifierClient:
    torch.manual_seed(0)
    options: dict[str, Any] = {"network_args": {"hidden": [64]}, "optimizer": partial(torch.optim.SGD, lr=0.05)}
    return ClassifierClient("mlp", num_classes=10, input_shape=(1, 28, 28), **options)


def make_loop(**options: Any) -> FederatedLoop:
    metrics = {"cssv": ClassSpecificShapley()}
    return FederatedLoop(ShapFedWA("cssv"), metrics=metrics, seed=0, reporting=Reporting(table=False), **options)


class SiteData(L.LightningDataModule):
    def __init__(self, clients: int, client: int) -> None:
        super().__init__()
        rows = slice(client * IMAGES, (client + 1) * IMAGES)
        self.data = TensorDataset(*(part[rows] for part in images(clients)))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.data, batch_size=BATCH, shuffle=True)


class Wire:
    """Sites in this process, behind packets."""

    def __init__(self, sites: list[Site]) -> None:
        self.sites = sites

    def present(self) -> dict[int, str]:
        return {i: f"site {i}" for i in range(len(self.sites))}

    def exchange(self, packets: Any, seconds: float) -> Any:
        for address, packet in packets.items():
            yield address, self.sites[address].answer(packet)


class Clock(L.Callback):
    def __init__(self) -> None:
        self.rounds: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.rounds.append(time.perf_counter() - self.start)


def run(engine: str, clients: int, rounds: int, out: Path) -> None:
    """One federation, in this process (or these, of ranks)."""
    torch.set_num_threads(1)
    clock, module = Clock(), make_module()
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    options |= {"accelerator": "cpu", "enable_progress_bar": False, "default_root_dir": str(out.parent)}
    groups = [i // IMAGES for i in range(clients * IMAGES)]
    data: Any = FederatedDataModule(
        TensorDataset(*images(clients)),
        GroupPartitioner(),
        groups=groups,
        batch_size=BATCH,
        splits=Splits(server_val=0.0),
    )
    loop = make_loop(engine="vmap" if engine == "vmap" else "sequential")
    if engine == "ranks":
        options |= {"strategy": "federated", "devices": 2}
    if engine == "remote":
        names = [f"site {i}" for i in range(clients)]
        folder = out.parent / "sites"
        sites = [Site(make_module, partial(SiteData, clients, i), make_loop, folder / n) for i, n in enumerate(names)]
        directory = Directory(Wire(sites), names, agreement(module, loop), folder / "book.json")
        directory.gather()
        data = RemoteData(names, [directory.sizes[i] for i in range(clients)], 10)
        loop = make_loop(engine=partial(RemoteFederation, directory))
    trainer = L.Trainer(max_epochs=rounds, callbacks=[loop, clock], num_sanity_val_steps=0, **options)
    trainer.fit(module, data)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        result = {"rounds": clock.rounds, "memory": memory}
        torch.save({**result, "vector": loop.state.model(), "cssv": loop.contributions["cssv"]}, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--one", nargs=2, metavar=("ENGINE", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    be_quiet()
    if args.one:
        run(args.one[0], args.clients, args.rounds, Path(args.one[1]))
        return
    print(f"{args.clients} clients of {IMAGES} images, an MLP of 50,890 parameters, {args.rounds} rounds.\n")
    print("| engine | seconds a round | memory of the largest process | weights | CSSV |")
    print("|---|---|---|---|---|")
    base: dict[str, Any] | None = None
    for engine in args.engines:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "result.pt"
            command = [sys.executable, __file__, "--clients", str(args.clients), "--rounds", str(args.rounds)]
            subprocess.run(
                [*command, "--one", engine, str(out)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
            found = torch.load(out, weights_only=True)
        base = base or found
        seconds = statistics.median(found["rounds"][1:])
        apart = [f"{(found[key] - base[key]).abs().max().item():.1e}" for key in ("vector", "cssv")]
        print(f"| {engine} | {seconds:.3f} | {found['memory']:.2f} GiB | {apart[0]} | {apart[1]} |", flush=True)


if __name__ == "__main__":
    main()
