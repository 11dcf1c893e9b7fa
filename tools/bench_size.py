"""Memory and time at size: a fit of large models, and a federation of very many clients in one process.

    python tools/bench_size.py fit [--clients 10 30] [--part FedAvg] [--rounds 2] [--mapped]
    python tools/bench_size.py clients [--clients 1000 10000 100000 1000000] [--cohort 10] [--rounds 5] [--logged]

``fit``: k clients with 25 million parameters each, a batch each round: the peak of the process's own memory above what
was held before, in models. Four of them beside the cohort's k are the module, its gradients, the global model and the
next one. ``--mapped``: the cohort lies in a file, as it does by itself where it would take more than a quarter of the
memory. Linux.

``clients``: two samples of four numbers and ten parameters each, so that training is next to nothing; class-specific
Shapley values of all clients, ShapFed-WA, a checkpoint a round. Processor seconds until the first round, and the median
of a round in the first and in the last third of the rounds but the first. ``--logged``: with TensorBoard and CSV files.
Every number of clients runs in a process of its own with one thread.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from common import TimedLoop, be_quiet, grid, quiet_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.aggregation import FedAdam, ShapFedWA
from flsv.clients.algorithms import SCAFFOLD, InRunValues
from flsv.data import IIDPartitioner, Splits
from flsv.metrics import ClassSpecificShapley, CommunicationCost, CosineGradientShapley, GradientAgreement, InRunShapley
from flsv.round import matrix as cohort_matrix
from flsv.sampling import UniformSampler

#: What a fit is measured with.
PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "FedAvg": dict,
    "FedAdam": lambda: {"aggregator": FedAdam()},
    "SCAFFOLD": lambda: {"client_algorithm": SCAFFOLD()},
    "ClassSpecificShapley": lambda: {"metrics": {"it": ClassSpecificShapley()}},
    "CommunicationCost": lambda: {"metrics": {"it": CommunicationCost()}},
    "GradientAgreement": lambda: {"metrics": {"it": GradientAgreement()}},
    "InRunShapley": lambda: {"metrics": {"it": InRunShapley()}, "client_algorithm": InRunValues()},
    "CosineGradientShapley": lambda: {"metrics": {"it": CosineGradientShapley()}},
}


class Wide(L.LightningModule):
    """25 million parameters."""

    def __init__(self, width: int = 1250, depth: int = 16) -> None:
        super().__init__()
        self.network = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)), nn.Linear(width, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def fit(k: int, rounds: int, module: Wide, width: int, parts: dict[str, Any]) -> None:
    """A federation of k clients with one batch each."""
    samples = TensorDataset(torch.randn(9 * k, width), torch.arange(9 * k) % 10)
    data = FederatedDataModule(samples, IIDPartitioner(k), batch_size=8, splits=Splits(server_val=1 / 9))
    loop = FederatedLoop(**parts, reporting=Reporting(table=False))
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(folder, rounds, [loop], limit_val_batches=1.0).fit(module, data)


def memory_of_a_fit(k: int, options: argparse.Namespace) -> dict[str, str]:
    """What a fit takes, in models, and its processor seconds."""
    parts = PARTS[options.part]
    fit(k, 1, Wide(16, 1), 16, parts())  # imports and thread pools are no models
    if options.mapped:
        vars(cohort_matrix)["LARGE"] = 0.0
    before, held, done = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            held.append(anonymous() - before)

    watching = threading.Thread(target=watch)
    watching.start()
    module, clock = Wide(), time.process_time()
    fit(k, options.rounds, module, 1250, parts())
    clock = time.process_time() - clock
    done.set()
    watching.join()
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    where = "in a file" if options.mapped else "in memory"
    models = f"{max(held) / size:.2f}"
    return {"what": options.part, "k": str(k), "the cohort lies": where, "models": models, "CPU s": f"{clock:.1f}"}


def anonymous() -> int:
    """Bytes of this process's own memory: without pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) * 1024


def many_clients(clients: int, options: argparse.Namespace) -> dict[str, str]:
    """One federation; a row of the table."""
    torch.manual_seed(0)
    begun, count = time.process_time(), 2 * clients + 1000
    x = torch.randn(count, 4)
    samples = TensorDataset(x, (x[:, 0] > 0).long())
    data = FederatedDataModule(samples, IIDPartitioner(clients), batch_size=2, splits=Splits(server_val=1000 / count))
    module = ClassifierClient(nn.Linear(4, 2), num_classes=2, input_shape=(4,))
    loop = TimedLoop(
        ShapFedWA("cssv"),
        metrics={"cssv": ClassSpecificShapley()},
        sampler=UniformSampler(options.cohort),
        seed=0,
        reporting=Reporting(table=False, figures=0),
    )
    with tempfile.TemporaryDirectory() as folder:
        saving = ModelCheckpoint(folder, save_last=True)
        loggers = [TensorBoardLogger(folder), CSVLogger(folder)] if options.logged else False
        more: dict[str, Any] = {"logger": loggers, "enable_checkpointing": True, "limit_val_batches": 1.0}
        quiet_trainer(folder, options.rounds, [loop, saving], **more).fit(module, data)
        size = Path(folder, "last.ckpt").stat().st_size / 2**20
    third = max(1, (options.rounds - 1) // 3)
    first, last = loop.processor[1 : third + 1], loop.processor[-third:]
    return {
        "clients": f"{clients:,}",
        "CPU s before the first round": f"{loop.since[1] - sum(loop.processor) - begun:.1f}",
        "CPU s a round, at first": f"{statistics.median(first):.3f}",
        "at last": f"{statistics.median(last):.3f}",
        "memory": f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB",
        "checkpoint": f"{size:.1f} MiB",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("fit", "clients"))
    parser.add_argument("--clients", nargs="+", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--part", choices=PARTS, default="ClassSpecificShapley", help="what the fit is measured with")
    parser.add_argument("--mapped", action="store_true", help="the cohort of the fit lies in a file")
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--logged", action="store_true", help="with TensorBoard and CSV files")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    default = [10, 30] if options.what == "fit" else [1000, 10_000, 100_000, 1_000_000]
    options.rounds = options.rounds or (2 if options.what == "fit" else 5)
    if options.one:
        be_quiet()
        print(json.dumps((memory_of_a_fit if options.what == "fit" else many_clients)(options.clients[0], options)))
        return
    rows: list[list[str]] = []
    for clients in options.clients or default:
        command = [sys.executable, *sys.argv, "--rounds", str(options.rounds), "--one", "--clients", str(clients)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        row = json.loads(done.stdout.strip().splitlines()[-1])
        rows += [[*row.values()]] if rows else [[*row], [*row.values()]]
        print(rows[-1], file=sys.stderr, flush=True)
    print(grid(rows))


if __name__ == "__main__":
    main()
