"""What two ranks save of a round, and what their meeting costs.

    python tools/bench_ranks.py [--case lenet mlp100 resnet18] [--rounds 5] [--repeats 3] [--exchange]

Turn by turn, each in processes of its own with one torch thread: a plain PyTorch loop over all clients; two plain loops
over half of the clients each, side by side, which is what the machine allows at best; ``FederatedLoop`` in one process;
and on two ranks. Prints the least and the median seconds of a round, the processor seconds of the busiest process, and
the ratios. ``--exchange`` measures the meeting alone, for cohorts of k clients with P parameters. Images are random.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from common import be_quiet, grid, quiet_trainer
from torch import nn
from torch.utils.data import TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.data import IIDPartitioner, Splits
from flsv.engines.ranks import FederatedStrategy
from flsv.engines.ranks.group import meet
from flsv.models import LeNet5

#: Clients, images of each, their shape.
CASES: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "lenet": (10, 600, (1, 28, 28)),
    "mlp100": (100, 60, (1, 28, 28)),
    "resnet18": (4, 64, (3, 32, 32)),
}
BATCH = 32


def images(case: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x ``[clients * images, *shape]`` and y."""
    clients, size, shape = CASES[case]
    generator = torch.Generator().manual_seed(0)
    total = clients * size
    return torch.randn(total, *shape, generator=generator), torch.randint(10, (total,), generator=generator)


def network(case: str) -> nn.Module:
    """Of 10 classes, always the same weights."""
    torch.manual_seed(0)
    if case == "lenet":
        return LeNet5(num_classes=10, input_shape=(1, 28, 28), channels=(10, 20), hidden=(50,))
    if case == "mlp100":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    from torchvision.models import resnet18

    return resnet18(num_classes=10)


def now() -> tuple[float, float]:
    """Wall and processor seconds."""
    return time.perf_counter(), time.process_time()


def plain(case: str, rounds: int, part: int, parts: int, barrier: Any) -> list[tuple[float, float]]:
    """Federated averaging of every ``parts``-th client; the seconds of every round."""
    clients, size, _ = CASES[case]
    x, y = images(case)
    rows = torch.randperm(len(x)).view(clients, size)[part::parts]
    server, spent = network(case), []
    for _ in range(rounds):
        barrier.wait()
        start, total = now(), {}
        for own in rows:
            model = copy.deepcopy(server)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for batch in own[torch.randperm(size)].split(BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
            for name, value in model.state_dict().items():
                total[name] = total.get(name, 0) + value / len(rows)
        server.load_state_dict(total)
        end = now()
        spent.append((end[0] - start[0], end[1] - start[1]))
    return spent


class TimedLoop(FederatedLoop):
    """Takes the seconds from one round's end to the next's."""

    def on_train_start(self, *hook: Any) -> None:
        super().on_train_start(*hook)
        self.spent: list[tuple[float, float]] = []
        self.since = now()

    def on_train_epoch_end(self, *hook: Any) -> None:
        super().on_train_epoch_end(*hook)
        end = now()
        self.spent.append((end[0] - self.since[0], end[1] - self.since[1]))
        self.since = end


def federated(case: str, rounds: int, ranks: int) -> list[tuple[float, float]]:
    """The same in a Trainer."""
    clients, _, shape = CASES[case]
    loop = TimedLoop(reporting=Reporting(table=False), seed=0)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"default_root_dir": folder, "limit_val_batches": 0}
        if ranks == 1:
            trainer = quiet_trainer(folder, rounds, [loop])
        else:
            options |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
            options |= {"enable_model_summary": False, "num_sanity_val_steps": 0, "accelerator": "cpu"}
            trainer = L.Trainer(
                max_epochs=rounds, callbacks=[loop], devices=ranks, strategy=FederatedStrategy(), **options
            )
        data = FederatedDataModule(
            TensorDataset(*images(case)), IIDPartitioner(clients), batch_size=BATCH, splits=Splits(server_val=0)
        )
        trainer.fit(ClassifierClient(network(case), num_classes=10, input_shape=shape), data)
    return loop.spent


def exchange(k: int, parameters: int, rank: int, port: int) -> list[tuple[float, float]]:
    """Two ranks tell each other half of a cohort's models."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = meet(rank, 2, torch.device("cpu"))
    block, spent = torch.randn(k // 2, parameters), []
    for _ in range(12):
        ranks.everybody(None, "ready")
        start = now()
        ranks.everybody([None] * (k // 2), "updates")
        whole = torch.empty(k, parameters)
        whole[rank::2] = block
        ranks.rows(whole, [i % 2 for i in range(k)], "rows")
        end = now()
        spent.append((end[0] - start[0], end[1] - start[1]))
    return spent


def work(kind: str, arguments: tuple[Any, ...], variables: dict[str, str], barrier: Any, results: Any) -> None:
    """In a process of its own."""
    be_quiet()
    os.environ.update(variables)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    functions = {"plain": plain, "federated": federated, "exchange": exchange}
    more = (barrier,) if kind == "plain" else ()
    results.put(functions[kind](*arguments, *more))


def run(kind: str, arguments: list[tuple[Any, ...]]) -> list[list[tuple[float, float]]]:
    """One process per tuple of arguments, all at once; their results."""
    context = multiprocessing.get_context("forkserver")
    results, barrier = context.Queue(), context.Barrier(len(arguments))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank, given in enumerate(arguments):
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
        given = (*given, rank, int(port)) if kind == "exchange" else given
        processes.append(context.Process(target=work, args=(kind, given, variables, barrier, results), daemon=True))
        processes[-1].start()
    found = [results.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    return found


def bench(case: str, rounds: int, repeats: int) -> None:
    """Print one case's table."""
    kinds = {
        "plain loop": ("plain", [(case, rounds, 0, 1)]),
        "two plain half-loops": ("plain", [(case, rounds, 0, 2), (case, rounds, 1, 2)]),
        "one process": ("federated", [(case, rounds, 1)]),
        "two ranks": ("federated", [(case, rounds, 2)] * 2),
    }
    walls: dict[str, list[float]] = {name: [] for name in kinds}
    processors: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(repeats):
        for name, (kind, arguments) in kinds.items():
            for of_round in list(zip(*run(kind, arguments)))[1:]:  # the first round warms up
                walls[name].append(max(wall for wall, _ in of_round))
                processors[name].append(max(processor for _, processor in of_round))
    rows = [["", "least s/round", "median s/round", "processor s", "wall ratio", "median ratio", "processor ratio"]]
    for name in kinds:
        base = "plain loop" if "plain" in name else "one process"
        numbers = min(walls[name]), statistics.median(walls[name]), statistics.median(processors[name])
        ratios = (
            min(walls[name]) / min(walls[base]),
            statistics.median(walls[name]) / statistics.median(walls[base]),
            statistics.median(processors[name]) / statistics.median(processors[base]),
        )
        rows.append([name, *(f"{number:.4f}" for number in numbers), *(f"{ratio:.2f}" for ratio in ratios)])
    clients, size, _ = CASES[case]
    print(f"\n{case}: {clients} clients x {size} images, {json.dumps({'rounds': rounds, 'repeats': repeats})}\n")
    print(grid(rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--exchange", action="store_true")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, sys.path), str(Path(__file__).parent)])
    multiprocessing.get_context("forkserver").set_forkserver_preload(["bench_ranks"])
    for case in options.case:
        bench(case, options.rounds, options.repeats)
    if options.exchange:
        rows = [["k", "P", "MB", "least ms", "median ms"]]
        for k in (10, 100):
            for parameters in (10_000, 100_000, 1_000_000):
                spent = [
                    max(walls) * 1000
                    for walls in zip(*([w for w, _ in r] for r in run("exchange", [(k, parameters)] * 2)))
                ]
                megabytes = k * parameters * 4 / 1e6
                rows.append(
                    [
                        str(k),
                        f"{parameters:,}",
                        f"{megabytes:.0f}",
                        f"{min(spent):.1f}",
                        f"{statistics.median(spent):.1f}",
                    ]
                )
        print(f"\n{grid(rows)}")


if __name__ == "__main__":
    main()
