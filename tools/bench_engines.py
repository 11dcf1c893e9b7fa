"""One federation by every engine: are the numbers the same, and what do a round and a process cost?

    python tools/bench_engines.py [--case softmax mlp lenet resnet18] [--rounds 5] [--repeats 3]
                                  [--engines plain sequential vmap ranks]
    python tools/bench_engines.py --clients 10 100 1000 10000 [--rounds 20] [--csv FILE]

Engines run turn by turn in processes of their own with one torch thread. ``plain`` is the leanest PyTorch loop, which
gathers each shuffled batch; ``ranks`` are two processes. Prints the least seconds of a round, by the clock and of the
busiest processor, with ratios, the largest memory, and how far weights and class-specific Shapley values are from the
sequential ones. What rounds cost on Flower and NVFlare is measured by ``bench_networks.py``.

With ``--clients`` an MLP trains at ten clients of so many in each round, with values, TensorBoard, CSV files and
checkpoints. Every client has 20 samples. Prints processor seconds before round 1, of a round and after the last one,
the largest memory and the size of the run's folder, with ratios to the smallest federation.
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

import pandas as pd
import torch
from studies.common import RoundTimer, be_quiet, grid, plain_rounds, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.aggregation import ShapFedWA
from flsv.data import GroupPartitioner, IIDPartitioner, Splits
from flsv.metrics import ClassSpecificShapley
from flsv.models import LeNet5
from flsv.sampling import UniformSampler
from flsv.vmap.engine import VmapProcess

BATCH = 32
#: Clients, images of each, their shape.
CASES: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "softmax": (100, 600, (1, 28, 28)),
    "mlp": (50, 600, (1, 28, 28)),
    "lenet": (10, 600, (1, 28, 28)),
    "resnet18": (4, 64, (3, 32, 32)),
}
ENGINES = ("plain", "sequential", "vmap", "ranks")
#: Samples of each of many clients, and of the server; how many of the clients are drawn in a round.
SAMPLES_OF_CLIENT = 20
SAMPLES_OF_SERVER = 1000
COHORT = 10


def images(case: str) -> tuple[Tensor, Tensor]:
    """x ``[clients * images, *shape]`` and y, client after client."""
    clients, size, shape = CASES[case]
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(10, (clients * size,), generator=draw)
    centers = torch.randn(10, *shape, generator=draw)
    return centers[y] + torch.randn(len(y), *shape, generator=draw), y


def network(case: str) -> nn.Module:
    """Of 10 classes, always the same weights."""
    torch.manual_seed(0)
    if case == "lenet":
        return LeNet5(num_classes=10, input_shape=(1, 28, 28), channels=(10, 20), hidden=(50,))
    if case == "resnet18":
        from torchvision.models import resnet18

        return resnet18(num_classes=10)
    hidden = [nn.Linear(784, 64), nn.ReLU()] if case == "mlp" else []
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64 if hidden else 784, 10))


def run(engine: str, case: str, rounds: int, out: Path) -> None:
    """One federation, in this process (or these, of ranks)."""
    be_quiet()
    clients, size, _ = CASES[case]
    found: dict[str, Any] = {}
    if engine == "plain":
        own = torch.arange(clients * size).split(size)
        found["rounds"] = plain_rounds(network(case), *images(case), own, rounds, 0.05, BATCH)
    else:
        sgd = partial(torch.optim.SGD, lr=0.05)
        module = ClassifierClient(
            network(case), num_classes=10, input_shape=CASES[case][2], optimizer=sgd
        )
        data = FederatedDataModule(
            TensorDataset(*images(case)),
            GroupPartitioner(),
            groups=[i // size for i in range(clients * size)],
            batch_size=BATCH,
            splits=Splits(server_val=0.0),
        )
        loop = FederatedLoop(
            ShapFedWA("cssv"),
            metrics={"cssv": ClassSpecificShapley()},
            seed=0,
            reporting=Reporting(table=False),
            engine=partial(VmapProcess, chunk=clients) if engine == "vmap" else "sequential",
        )
        timer, ranks = (
            RoundTimer(),
            {"strategy": "federated", "devices": 2} if engine == "ranks" else {},
        )
        quiet_trainer(str(out.parent), rounds, [loop, timer], **ranks).fit(module, data)
        found |= {"rounds": list(zip(timer.wall, timer.processor))}
        found |= {
            "vector": loop.state.model(),
            "cssv": loop.contribution_metrics.contributions["cssv"],
        }
    if os.environ.get("LOCAL_RANK", "0") == "0":
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        torch.save({**found, "memory": memory}, out)


def compared(case: str, engines: list[str], rounds: int, repeats: int) -> str:
    """A case's table."""
    least: dict[str, list[tuple[float, float]]] = {engine: [] for engine in engines}
    last: dict[str, dict[str, Any]] = {}
    for _ in range(repeats):
        for engine in engines:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "result.pt"
                command = [
                    sys.executable,
                    __file__,
                    "--rounds",
                    str(rounds),
                    "--one",
                    engine,
                    case,
                    str(out),
                ]
                subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
                last[engine] = torch.load(out, weights_only=True)
            least[engine] += last[engine]["rounds"][1:]  # the first round warms up
    seconds = {engine: [min(column) for column in zip(*each)] for engine, each in least.items()}
    rows = [
        [
            "engine",
            "s a round",
            "CPU s",
            "to plain",
            "to sequential",
            "CPU to plain",
            "memory",
            "weights",
            "CSSV",
        ]
    ]
    for engine in engines:
        wall, processor = seconds[engine]
        row = [engine, f"{wall:.3f}", f"{processor:.3f}"]
        row += [
            f"{wall / seconds[base][0]:.2f}" if base in seconds else "-" for base in ENGINES[:2]
        ]
        row.append(f"{processor / seconds['plain'][1]:.2f}" if "plain" in seconds else "-")
        row.append(f"{last[engine]['memory']:.2f} GiB")
        for key in ("vector", "cssv"):
            known = key in last[engine] and key in last.get("sequential", {})
            apart = (
                (last[engine][key] - last["sequential"][key]).abs().max().item() if known else 0.0
            )
            row.append(f"{apart:.1e}" if known else "-")
        rows.append(row)
    clients, size, _ = CASES[case]
    return f"{case}, {clients} clients x {size} images, {rounds} rounds, {repeats} turns:\n\n{grid(rows)}\n"


def run_many(num_clients: int, rounds: int, out: Path) -> None:
    """Train one federation of many clients in this process, and write what it has taken."""
    be_quiet()
    draw = torch.Generator().manual_seed(0)
    num_samples = num_clients * SAMPLES_OF_CLIENT + SAMPLES_OF_SERVER
    x = torch.randn(num_samples, 64, generator=draw)
    y = x[:, :10].argmax(1)
    server_samples = TensorDataset(x[:SAMPLES_OF_SERVER], y[:SAMPLES_OF_SERVER])
    client_samples = TensorDataset(x[SAMPLES_OF_SERVER:], y[SAMPLES_OF_SERVER:])

    begin = time.process_time()
    data = FederatedDataModule(
        client_samples,
        IIDPartitioner(num_clients=num_clients),
        val=server_samples,
        batch_size=10,
        splits=Splits(),
    )
    module = ClassifierClient(
        "mlp",
        network_args={"hidden": [32]},
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    loop = FederatedLoop(
        metrics={"cssv": ClassSpecificShapley()},
        sampler=UniformSampler(COHORT),
        seed=0,
        reporting=Reporting(table=False),
    )
    timer = RoundTimer()
    folder = out.parent / "run"
    trainer = quiet_trainer(
        str(folder),
        rounds,
        [loop, timer],
        logger=True,
        enable_checkpointing=True,
        limit_val_batches=1.0,
    )
    trainer.fit(module, data)

    size_of_folder = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    seconds_of_rounds = timer.processor[1:]  # the first round warms up
    facts = {
        "before the rounds (s)": timer.processor_at_start - begin,
        "a round (s)": statistics.median(seconds_of_rounds),
        "after the last round (s)": time.process_time() - timer.since[1],
        "memory (GiB)": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "folder (MiB)": size_of_folder / 2**20,
    }
    torch.save(facts, out)


def compare_sizes(
    sizes: list[int],
    rounds: int,
    repeats: int,
) -> pd.DataFrame:
    """Return a row of the least that federations of so many clients have taken, each in a process of its own."""
    rows = []
    for num_clients in sizes:
        results = []
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "result.pt"
                options = ["--rounds", str(rounds), "--many", str(num_clients), str(out)]
                subprocess.run(
                    [sys.executable, __file__, *options],
                    check=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
                results.append(torch.load(out, weights_only=True))
        best_numbers = pd.DataFrame(results).min()
        rows.append({"clients": num_clients, **best_numbers})
    return pd.DataFrame(rows)


def table_of_sizes(frame: pd.DataFrame) -> str:
    """Return the table as text, each number with its ratio to that of the first row."""
    head = list(frame.columns)
    body = []
    for record in frame.to_dict("records"):
        cells = [f"{record['clients']:,}"]
        for column in head[1:]:
            ratio = record[column] / frame[column][0]
            cells.append(f"{record[column]:.3g} ({ratio:.3g})")
        body.append(cells)
    return grid([head, *body])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    cases = list(CASES)
    engines = list(ENGINES)
    add("--case", nargs="+", choices=cases, default=cases)
    add("--engines", nargs="+", choices=engines, default=engines)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", nargs="+", type=int, help="numbers of clients, ten in a round")
    parser.add_argument("--csv", type=Path, help="file for the table of numbers of clients")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--many", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        case, engine, path = options.one
        run(case, engine, options.rounds, Path(path))
    elif options.many:
        num_clients, path = options.many
        run_many(int(num_clients), options.rounds, Path(path))
    elif options.clients:
        frame = compare_sizes(options.clients, options.rounds, options.repeats)
        if options.csv:
            frame.round(4).to_csv(options.csv, index=False)
        print(table_of_sizes(frame))
    else:
        for case in options.case:
            table = compared(case, options.engines, options.rounds, options.repeats)
            print(table, flush=True)


if __name__ == "__main__":
    main()
