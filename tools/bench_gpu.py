"""What a GPU gives: the round, the coalitions and ResNet-34, in one table.

    python tools/bench_gpu.py [--rounds 3] [--coalitions 256] [--resnet-rounds 2] [--accelerator cuda]

- A round of ``bench_round.py`` (10 clients x 600 Fashion-MNIST images, LeNet5): plain PyTorch with its images on the
  device, ``FederatedLoop`` with the data there (``on_device``) and copied batch by batch.
- 100 LeNets one after the other, and at once by ``engine="vmap"``.
- Coalitions of ``bench_coalitions.py``: one after the other, and by ``CoalitionUtility`` under vmap and serially.
- ``configs/cifar10_resnet34.yaml`` for a few rounds, on random images where ``$FLSV_DATA_ROOT`` has no CIFAR-10.

Times are medians; a first run of everything warms up. ``--accelerator cpu`` is for trying the script out.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import bench_coalitions
import bench_round
import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from flsv import ClassifierClient, FederatedDataModule, ParameterSpace, Reporting, Round
from flsv.aggregation import ShapFedWA
from flsv.data import DirichletPartitioner, IIDPartitioner, Loader, Splits, load_image_data
from flsv.errors import ConfigurationError
from flsv.games import CoalitionUtility, ModelEvaluator
from flsv.metrics import ClassSpecificShapley

Row = tuple[str, str, float, float]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def rounds(device: torch.device, accelerator: str, count: int) -> list[Row]:
    """Seconds of a round."""
    x, y = bench_round.images()
    there = x.to(device), y.to(device)
    ways: dict[str, Callable[[], list[float]]] = {
        "plain PyTorch": lambda: bench_round.plain(*there, count + 1),
        "FederatedLoop, data on the device": lambda: bench_round.federated(
            x, y, count + 1, True, accelerator=accelerator, loader=Loader(on_device=True)
        ),
        "FederatedLoop, batches copied": lambda: bench_round.federated(
            x, y, count + 1, True, accelerator=accelerator, loader=Loader(on_device=False)
        ),
    }
    # A run's first round warms up.
    return compared("round, s", {name: statistics.median(way()[1:]) for name, way in ways.items()})


def coalitions(device: torch.device, count: int) -> list[Row]:
    """Milliseconds of a coalition on 2,000 images."""
    clients, local = bench_coalitions.CLIENTS, bench_coalitions.LOCAL_IMAGES
    data = bench_coalitions.images(clients * local + 2000)
    server, trained = bench_coalitions.one_round(TensorDataset(*data[: clients * local]))
    x, y = data[clients * local :]
    server.to(device)
    trained = [client.to(device) for client in trained]
    space = ParameterSpace(server)
    round = Round(
        round_index=0,
        client_ids=torch.arange(clients),
        num_samples=torch.full((clients,), local),
        global_vector=space.read(server),
        client_vectors=torch.stack([space.read(client) for client in trained]),
        space=space,
    )
    there = TensorDataset(x.to(device), y.to(device))

    def utility(backend: str) -> Callable[[Tensor], Tensor]:
        loader = DataLoader(there, batch_size=100)
        return CoalitionUtility(round, ModelEvaluator(server, space, loader, num_classes=10, backend=backend))

    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "one after the other": lambda masks: bench_coalitions.naive(server, trained, there, 100, masks),
        "CoalitionUtility, vmap": utility("vmap"),
        "CoalitionUtility, serial": utility("serial"),
    }
    masks = torch.tensor(list(itertools.product([False, True], repeat=clients)))
    masks = masks[torch.randperm(len(masks), generator=torch.Generator().manual_seed(0))[: count + 16]]
    found, expected = {}, None
    for name, way in ways.items():
        way(masks[:16])
        wait(device)
        start = time.perf_counter()
        values = way(masks[16:])
        wait(device)
        found[name] = 1000 * (time.perf_counter() - start) / max(1, count)
        expected = values if expected is None else expected
        print(f"{name}: accuracies differ by at most {(values - expected).abs().max().item():.1e}")
    return compared("coalition, ms", found)


def resnet(accelerator: str, count: int, samples: int | None) -> list[Row]:
    """Seconds of a round of ``cifar10_resnet34.yaml``: precision, model, metric and partition are its own."""
    try:
        images, what = load_image_data("cifar10", os.environ.get("FLSV_DATA_ROOT", "data")).train, "CIFAR-10"
    except ConfigurationError as error:
        print(f"random images instead of CIFAR-10: {error}")
        size, draw = samples or 50_000, torch.Generator().manual_seed(0)
        images = TensorDataset(torch.randn(size, 3, 32, 32, generator=draw), torch.arange(size) % 10)
        what = "random images"
    data = FederatedDataModule(
        images,
        DirichletPartitioner(num_clients=5, alpha=0.5, min_samples=min(500, (samples or 50_000) // 20), seed=0),
        batch_size=64,
        splits=Splits(max_samples=samples),
    )
    loop = bench_round.TimedLoop(
        ShapFedWA("cssv"), {"cssv": ClassSpecificShapley()}, reporting=Reporting(table=False), seed=0
    )
    trainer = L.Trainer(
        max_epochs=count + 1,
        accelerator=accelerator,
        devices=1,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[loop],
    )
    trainer.fit(
        ClassifierClient("resnet34_small", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01)), data
    )
    return [("ResNet-34 round, s", what, statistics.median(loop.seconds[1:]), 1.0)]


def clients_at_once(accelerator: str, clients: int, count: int) -> list[Row]:
    """Seconds of a round of many LeNets with 60 images each, one after the other and at once."""
    x, y = torch.randn(clients * 60, 1, 28, 28), torch.arange(clients * 60) % 10
    found = {}
    for engine in ("sequential", "vmap"):
        data = FederatedDataModule(
            TensorDataset(x, y), IIDPartitioner(num_clients=clients, seed=0), batch_size=20, splits=Splits(server_val=0)
        )
        loop = bench_round.TimedLoop(seed=0, reporting=Reporting(table=False, files=False), engine=engine)
        trainer = L.Trainer(
            max_epochs=count + 1,
            accelerator=accelerator,
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[loop],
        )
        client = ClassifierClient(
            bench_round.lenet(),
            num_classes=10,
            input_shape=(1, 28, 28),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        )
        trainer.fit(client, data)
        found[f"engine={engine}"] = statistics.median(loop.seconds[1:])
    return compared(f"{clients} LeNets, round, s", found)


def compared(kind: str, found: dict[str, float]) -> list[Row]:
    """With ratios to the first."""
    base = next(iter(found.values()))
    return [(kind, name, value, value / base) for name, value in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--coalitions", type=int, default=256)
    parser.add_argument("--clients", type=int, default=100, help="LeNets at once")
    parser.add_argument("--resnet-rounds", type=int, default=2, help="0: none")
    parser.add_argument("--resnet-samples", type=int, default=None, help="of CIFAR-10; default: all")
    parser.add_argument("--accelerator", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if arguments.accelerator == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --accelerator cpu tries the script out")
    device = torch.device(arguments.accelerator)
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    rows = rounds(device, arguments.accelerator, arguments.rounds) + coalitions(device, arguments.coalitions)
    rows += clients_at_once(arguments.accelerator, arguments.clients, arguments.rounds)
    if arguments.resnet_rounds:
        rows += resnet(arguments.accelerator, arguments.resnet_rounds, arguments.resnet_samples)
    table = Table("what", "how", "median", "ratio")
    for kind, name, value, ratio in rows:
        table.add_row(kind, name, f"{value:.4g}", f"{ratio:.2f}")
    Console().print(table)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{os.cpu_count()} cores"
    print(f"{where}, torch {torch.__version__}, {Path(__file__).name} {arguments}")


if __name__ == "__main__":
    main()
