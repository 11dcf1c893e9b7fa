"""What it costs to evaluate the coalitions of a round.

    python tools/bench_coalitions.py [--coalitions 1024] [--images 2000] [--batch 100]

10 clients, LeNet5, Fashion-MNIST: every coalition's uniform mean model on the server's validation images. The naive
way (a deepcopy of the module, an average of state_dicts and a DataLoader per coalition) and ``CoalitionUtility`` take
turns, a block of coalitions at a time, in one process, on one thread.
Prints times, the median over the blocks of the ratio of times, CPU times, and how many accuracies differ; where some
do, how close an image's two largest logits are in double precision (1e-7 is a tie that rounding decides). Reads
``$FLSV_DATA_ROOT``; without it, random images of the same size.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flsv import ParameterSpace, Round
from flsv.games import CoalitionUtility, ModelEvaluator
from flsv.models import LeNet5

CLIENTS, LOCAL_IMAGES, BLOCK = 10, 300, 32


def images(total: int) -> TensorDataset:
    """``[total, 1, 28, 28]`` and labels."""
    root = os.environ.get("FLSV_DATA_ROOT")
    if root is None:
        return TensorDataset(torch.randn(total, 1, 28, 28), torch.randint(10, (total,)))
    from torchvision.datasets import FashionMNIST

    data = FashionMNIST(root)
    return TensorDataset(data.data[:total, None].float() / 255, data.targets[:total])


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()


def one_round(data: TensorDataset) -> tuple[nn.Module, list[nn.Module]]:
    """A global model that has seen something, and what the clients make of it."""
    x, y = data.tensors
    server = LeNet5(num_classes=10, input_shape=(1, 28, 28))
    train(server, x, y, 1)
    clients = [copy.deepcopy(server) for _ in range(CLIENTS)]
    for model, own_x, own_y in zip(clients, x.split(LOCAL_IMAGES), y.split(LOCAL_IMAGES)):
        train(model, own_x, own_y, 2)
    return server, clients


def average(server: nn.Module, clients: list[nn.Module], mask: Tensor) -> nn.Module:
    """The members' mean model, as one writes it down."""
    model = copy.deepcopy(server)
    members = [clients[i].state_dict() for i in mask.nonzero().flatten().tolist()]
    if members:
        model.load_state_dict({name: sum(s[name] for s in members) / len(members) for name in members[0]})
    return model.eval()


@torch.no_grad()
def closest_call(server: nn.Module, clients: list[nn.Module], data: TensorDataset, mask: Tensor) -> float:
    """The least distance of an image's two largest logits, in double precision."""
    exact = [copy.deepcopy(client).double() for client in clients]
    logits = average(copy.deepcopy(server).double(), exact, mask)(data.tensors[0].double())
    return -logits.topk(2).values.diff(dim=-1).max().item()


@torch.no_grad()
def naive(server: nn.Module, clients: list[nn.Module], data: TensorDataset, batch: int, masks: Tensor) -> Tensor:
    """One coalition after the other."""
    accuracies = []
    for mask in masks:
        model = average(server, clients, mask)
        hits = sum((model(x).argmax(-1) == y).sum().item() for x, y in DataLoader(data, batch_size=batch))
        accuracies.append(hits / len(data))
    return torch.tensor(accuracies, dtype=torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coalitions", type=int, default=1024, help="at most 1024; fewer are drawn at random")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = images(CLIENTS * LOCAL_IMAGES + arguments.images)
    server, clients = one_round(TensorDataset(*data[: CLIENTS * LOCAL_IMAGES]))
    validation = TensorDataset(*data[CLIENTS * LOCAL_IMAGES :])

    space = ParameterSpace(server)
    round = Round(
        round_index=0,
        client_ids=torch.arange(CLIENTS),
        num_samples=torch.full((CLIENTS,), LOCAL_IMAGES),
        global_vector=space.read(server),
        client_vectors=torch.stack([space.read(client) for client in clients]),
        space=space,
    )

    loader = DataLoader(validation, batch_size=arguments.batch)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "naive": lambda masks: naive(server, clients, validation, arguments.batch, masks),
        "CoalitionUtility": CoalitionUtility(round, ModelEvaluator(server, space, loader, num_classes=10)),
    }
    masks = torch.tensor(list(itertools.product([False, True], repeat=CLIENTS)))
    masks = masks[torch.randperm(len(masks))[: arguments.coalitions]]
    found: dict[str, list[Tensor]] = {name: [] for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu = dict.fromkeys(ways, 0.0)
    naive(server, clients, validation, arguments.batch, masks[:2])  # warms up
    for block in masks.split(BLOCK):
        for name, way in ways.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            found[name].append(way(block))
            seconds[name].append(time.perf_counter() - start)
            cpu[name] += time.process_time() - cpu_start

    table = Table("", "s", "CPU s", "ms/coalition", "ratio", "median ratio", "accuracies that differ", "by at most")
    expected, base = torch.cat(found["naive"]), seconds["naive"]
    for name in ways:
        differences = (torch.cat(found[name]) - expected).abs()
        total = sum(seconds[name])
        table.add_row(
            name,
            f"{total:.2f}",
            f"{cpu[name]:.2f}",
            f"{1000 * total / len(masks):.1f}",
            f"{sum(base) / total:.2f}",
            f"{statistics.median(a / b for a, b in zip(base, seconds[name])):.2f}",
            f"{int((differences > 0).sum())} of {len(masks)}",
            f"{differences.max().item():.1e}",
        )
    Console().print(table)
    differ = torch.stack([torch.cat(values) != expected for values in found.values()]).any(0)
    for mask in masks[differ]:
        print(f"a coalition differs: two logits {closest_call(server, clients, validation, mask):.1e} apart")
    print(f"accuracies {expected.min():.4f} to {expected.max():.4f}")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
