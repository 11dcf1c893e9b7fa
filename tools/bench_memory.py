"""Memory of a round, beyond the cohort's models: of the server's side, and of a whole fit.

    python tools/bench_memory.py [--cases fedavg cssv ...] [--sizes large many]
    python tools/bench_memory.py --fit 10 [--part FedAvg] [--rounds 2] [--mapped]

The server has to hold the models ``[k, P]`` that the clients have sent; what works on them should not hold them twice.
For k = 50 ResNet-18 (P = 11 M, 2.2 GB) and k = 1,000 MLPs (P = 1 M, 4.0 GB) of random weights, every case is one round
of ``RoundServer.finish`` in a process of its own. Prints a Markdown table: the peak of resident memory above what was
resident before, in cohort matrices (0.15 is 1.15 matrices in all), and processor seconds. With personal start points
the server holds one more matrix from the round before, which is not counted; those of the next round are. Linux; needs
up to 17 GB.

``--fit k`` is a fit of k clients with 25 million parameters each, a batch each round: the peak above what was resident
before, in models of P. Four of them beside the cohort's k are the module, its gradients, the global model and the next
one. ``--mapped``: the cohort lies in a file, as it does by itself where it would take more than a quarter of the
memory. Pages of files, which the system takes back when others need them, do not count.
"""

from __future__ import annotations

import argparse
import resource
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
from common import be_quiet
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchvision.models import resnet18

from flsv import FederatedDataModule, FederatedLoop, Reporting
from flsv.aggregation import CGSV, Aggregator, FedAdam, FedAvg, GeometricMedian
from flsv.clients.algorithms import SCAFFOLD, InRunValues
from flsv.data import IIDPartitioner, Splits
from flsv.games import CoalitionGames, ModelEvaluator
from flsv.metrics import (
    ClassSpecificShapley,
    CommunicationCost,
    ContributionMetric,
    CosineGradientShapley,
    GradientAgreement,
    InRunShapley,
)
from flsv.models import MLP
from flsv.parameters import ParameterSpace
from flsv.participants import Channel
from flsv.personalization import Personalizer, ShapFedPersonalizer
from flsv.round import FederationState, Round
from flsv.round import matrix as cohort_matrix
from flsv.server import ContributionMetrics, RoundServer

CLASSES = 10
SIZES = {"large": "k = 50, P = 11 M", "many": "k = 1,000, P = 1 M"}
CASES = {
    "fedavg": "FedAvg",
    "fedadam": "FedAdam",
    "norms": "norms of the updates",
    "cssv": "class-specific Shapley values",
    "cgsv": "CGSV, metric and aggregator",
    "median": "GeometricMedian, at most 3 steps",
    "games": "coalition games, 3 coalitions",
    "starts": "personal start points: all these metrics",
    "shapfed": "personal start points: ShapFed gives new ones",
}


class Norms(ContributionMetric):
    """How far every client has moved, ``[num_clients]``."""

    @property
    def round_fields(self) -> dict[str, Any]:
        return {"norms": lambda round: round.matrix.norms()}

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("norms", torch.zeros(num_clients), dist_reduce_fx="max")

    def update(self, client_ids: Tensor, norms: Tensor) -> None:
        self.norms[client_ids] = norms.float()

    def compute(self) -> Tensor:
        return self.norms


class FewCoalitions(ContributionMetric):
    """What the first client, the first half and all are worth; told of everybody, ``[num_clients]``."""

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("worth", torch.zeros(num_clients), dist_reduce_fx="max")

    def update(self, client_ids: Tensor, utility: Any) -> None:
        k = len(client_ids)
        masks = torch.arange(k) < torch.tensor([[1], [k // 2], [k]])
        self.worth[client_ids] = utility(masks).mean().float()

    def compute(self) -> Tensor:
        return self.worth


def federation(size: str) -> tuple[int, nn.Module, Tensor]:
    """k, the module and the server's validation images."""
    torch.manual_seed(0)
    if size == "large":
        return 50, resnet18(num_classes=CLASSES), torch.randn(16, 3, 32, 32)
    return 1000, MLP(num_classes=CLASSES, input_shape=(784,), hidden=(1000, 200)), torch.randn(16, 784)


def models(k: int, vector: Tensor) -> Tensor:
    """``[k, P]`` near a vector, row by row: at no time more than these."""
    rows = torch.empty(k, len(vector))
    for row in rows:
        row.uniform_(0, 0.01).add_(vector)
    return rows


def metrics(case: str) -> dict[str, ContributionMetric]:
    made: dict[str, ContributionMetric] = {
        "cssv": ClassSpecificShapley(),
        "cgsv": CosineGradientShapley(),
        "norms": Norms(),
        "games": FewCoalitions(),
    }
    if case == "starts":
        return made
    name = "cssv" if case == "shapfed" else case
    return {name: made[name]} if name in made else {}


def measure(case: str, size: str) -> None:
    """Print the extra matrices and the seconds of one case."""
    be_quiet()
    k, module, x = federation(size)
    space = ParameterSpace(module)
    board = ContributionMetrics(metrics(case))
    board.bind(k, CLASSES, None)
    aggregator: Aggregator = {
        "fedadam": FedAdam(),
        "cgsv": CGSV(),
        "median": GeometricMedian(iterations=3, tolerance=0),
    }.get(case, FedAvg())
    personalizer: Personalizer | None = ShapFedPersonalizer() if case == "shapfed" else None
    y = torch.arange(len(x)) % CLASSES
    evaluator = ModelEvaluator(module, space, [(x, y)], num_classes=CLASSES)
    strategies = {"aggregator": aggregator, **({} if personalizer is None else {"personalizer": personalizer})}
    server = RoundServer(board, strategies, space, Channel(), games=CoalitionGames(evaluator))

    vector = space.read(module)
    personal = case in ("starts", "shapfed")
    starts = [row.clone() for row in models(k, vector)] if personal else None
    state = FederationState(num_clients=k, global_vector=vector, starts=dict(enumerate(starts or [])))
    matrix = models(k, vector)
    ids, samples = torch.arange(k), torch.arange(1, k + 1)
    round = Round(0, ids, samples, vector, matrix, space, starts=starts, games=server.games)
    before, clock = resident(), time.process_time()
    # The peak must be this round's: that of what has been prepared is forgotten.
    Path("/proc/self/clear_refs").write_text("5")
    server.finish(round, state)
    print((peak() - before) / (matrix.numel() * matrix.element_size()), time.process_time() - clock)


class Wide(L.LightningModule):
    """25 million parameters."""

    def __init__(self, width: int = 1250, depth: int = 16) -> None:
        super().__init__()
        self.network = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)), nn.Linear(width, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)


#: What a fit is measured with: FedAvg and nothing else where no more is said.
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


def fit(k: int, rounds: int, module: Wide, width: int, parts: dict[str, Any]) -> None:
    """A federation of k clients with one batch each."""
    samples = TensorDataset(torch.randn(9 * k, width), torch.arange(9 * k) % CLASSES)
    splits = Splits(server_val=1 / 9)
    data = FederatedDataModule(samples, partitioner=IIDPartitioner(k), batch_size=8, splits=splits)
    loop = FederatedLoop(**parts, reporting=Reporting(table=False))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=rounds, accelerator="cpu", callbacks=[loop], default_root_dir=folder,
            enable_model_summary=False, **quiet,
        )  # fmt: skip
        trainer.fit(module, data)


def measure_fit(k: int, rounds: int, part: str, mapped: bool) -> None:
    """Print what a fit takes, in models, and its seconds."""
    be_quiet()
    torch.set_num_threads(1)
    fit(k, 1, Wide(16, 1), 16, PARTS[part]())  # imports and thread pools are no models
    if mapped:
        vars(cohort_matrix)["LARGE"] = 0.0
    before, held, done = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            held.append(anonymous() - before)

    watching = threading.Thread(target=watch)
    watching.start()
    module, clock, wall = Wide(), time.process_time(), time.perf_counter()
    fit(k, rounds, module, 1250, PARTS[part]())
    clock, wall = time.process_time() - clock, time.perf_counter() - wall
    done.set()
    watching.join()
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    where = "in a file" if mapped else "in memory"
    print(f"| {part} | {k} | {where} | {max(held) / size:.2f} | {clock:.1f} | {wall:.1f} |")


def anonymous() -> int:
    """Bytes of this process's own memory: without pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) * 1024


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    """The most that they have been."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--part", choices=PARTS, default="ClassSpecificShapley", help="what the fit is measured with")
    parser.add_argument("--mapped", action="store_true", help="the cohort of the fit lies in a file")
    parser.add_argument("--fit", type=int, metavar="K", help="a whole fit of K clients instead")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.fit:
        measure_fit(arguments.fit, arguments.rounds, arguments.part, arguments.mapped)
        return
    if arguments.measure:
        measure(*arguments.measure)
        return
    print("| a round of | " + " | ".join(f"{SIZES[size]}: matrices beyond, seconds" for size in arguments.sizes) + " |")
    print("|---|" + "---|" * len(arguments.sizes))
    for case in arguments.cases:
        cells = []
        for size in arguments.sizes:
            command = [sys.executable, __file__, "--measure", case, size]
            told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
            cells.append(f"{float(told[-2]):.2f}, {float(told[-1]):.1f} s")
        print(f"| {CASES[case]} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
