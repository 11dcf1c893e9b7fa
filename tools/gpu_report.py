"""All that a person with a GPU is asked for, as a table.

    make cuda                                                       # or:
    python tools/gpu_report.py [--out docs/results/gpu.csv] [--device cuda|cpu] [--short] [--only TITLE ...]

Compares numbers with the CPU's in every precision, and times and memory with plain loops on the same device. Weights
are compared as a share of the way that training has moved them. Without a CUDA device it says so, and runs as much of
the list as goes on the CPU. Ends with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import bench_round
import lightning as L
import torch
from studies.common import RoundTimer, be_quiet, quiet_trainer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

import flsv
from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv._lightning.rounding import tf32_of
from flsv.core.parameter_space import ParameterSpace
from flsv.data import IIDPartitioner, Loader, Splits
from flsv.engines.ranks import FederatedStrategy
from flsv.games import ModelEvaluator
from flsv.metrics import ClassSpecificShapley, CumulativeShapley, GradientShapley, ShadowShapley
from flsv.utilities.csv_files import save_csv
from flsv.vmap.batched import NotBatched

ROOT = Path(__file__).parents[1]
CLASSES, CLIENTS, BATCH = 4, 3, 8
#: How far weights may be from the CPU's, as a share of the way that training has moved them.
ALLOWED = {"32-true": 1e-3, "32-true, TF32": 5e-2, "bf16-mixed": 0.2, "bf16-true": 0.6}
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
ITEM = "aten::_local_scalar_dense"


class Rows(nn.Module):
    """Attention over an image's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.three, self.head = (
            nn.Linear(8, 16),
            nn.Linear(16, 48),
            nn.Linear(16, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x.squeeze(1))
        q, k, v = self.three(x).chunk(3, dim=-1)
        return self.head((x + nn.functional.scaled_dot_product_attention(q, k, v)).mean(-2))


def convolution() -> nn.Module:
    first = [nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        *first, nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, CLASSES)
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {"convolution": convolution, "transformer": Rows}


def client(make: Callable[[], nn.Module]) -> ClassifierClient:
    torch.manual_seed(0)
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    return ClassifierClient(make(), num_classes=CLASSES, input_shape=(1, 8, 8), optimizer=sgd)


def images(count: int, seed: int = 0) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    means = torch.randn(CLASSES, 1, 8, 8, generator=torch.Generator().manual_seed(9))
    y = torch.arange(count) % CLASSES
    return TensorDataset(means[y] + torch.randn(count, 1, 8, 8, generator=draw), y)


@dataclass(frozen=True)
class Row:
    """What was looked at, what was found, and how far it may be."""

    what: str
    found: str
    allowed: str = ""
    verdict: str = ""


def near(what: str, apart: float, allowed: float) -> Row:
    return Row(what, f"{apart:.1e}", f"{allowed:.0e}", "ok" if apart <= allowed else "FAILED")


def not_here(what: str, why: str) -> Row:
    return Row(what, f"not here: {why}", "", "not run")


@dataclass
class Ran:
    """A fit that has ended: its weights, how far they moved, and the values of its metrics, on the CPU."""

    vector: Tensor
    moved: float
    values: dict[str, Tensor]

    def apart(self, other: Ran) -> float:
        return float((self.vector - other.vector).norm()) / max(self.moved, other.moved, 1e-12)

    def values_apart(self, other: Ran) -> float:
        return max(
            float((value - other.values[name]).abs().max()) for name, value in self.values.items()
        )


def ran(
    device: str,
    make: Callable[[], nn.Module],
    batches: int = 4,
    measured: bool = True,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> Ran:
    """One fit of two rounds; ``trainer`` and ``options`` are the Trainer's and the loop's."""
    metrics = {
        "cssv": ClassSpecificShapley(),
        "game": CumulativeShapley(performance="negative_loss"),
        "logged": CumulativeShapley(performance="val_loss", mode="min"),
        "slope": GradientShapley(),
    }
    quiet = Reporting(table=False, files=False)
    loop = FederatedLoop(metrics=metrics if measured else {}, seed=5, reporting=quiet, **options)
    own = {str(client): images(batches * BATCH, client) for client in range(CLIENTS)}
    data = FederatedDataModule(clients=own, val=images(40, 7), batch_size=BATCH)
    module = client(make)
    space = ParameterSpace(module)
    start = space.read(module).clone().float()
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(folder, 2, [loop], device, limit_val_batches=1.0, **(trainer or {})).fit(
            module, data
        )
    vector = space.read(module).cpu().float()
    known = loop.contribution_metrics.contributions
    values = {name: value.cpu().float() for name, value in known.items() if value is not None}
    return Ran(vector, float((vector - start).norm()), values)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Within it convolutions and products of float32 may be rounded to TensorFloat32, or may not."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = allowed
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])


# ---- the checks: each gives rows of a device, fewer where it is to be short


def equal_to_the_cpu(device: str, short: bool) -> Iterator[Row]:
    """Training and contributions, in every precision; and all clients at once, on the same device."""
    for kind, make in NETWORKS.items():
        for name, allowed in ALLOWED.items():
            precision, _, rounded = name.partition(", ")
            with tf32(bool(rounded)):
                there = ran(device, make, trainer={"precision": precision})
                on_cpu = ran("cpu", make, trainer={"precision": precision})
                yield near(
                    f"{kind}, {name}: weights against the CPU's",
                    there.apart(on_cpu),
                    allowed,
                )
                yield near(
                    f"{kind}, {name}: contributions against the CPU's",
                    there.values_apart(on_cpu),
                    allowed,
                )
                if precision != "bf16-true":
                    yield clients_at_once(
                        f"{kind}, {name}", device, make, precision, there, allowed
                    )


def clients_at_once(
    title: str,
    device: str,
    make: Callable[[], nn.Module],
    precision: str,
    one_by_one: Ran,
    allowed: float,
) -> Row:
    """Train all clients as one batched model, or tell that it is refused."""
    row_name = f"{title}: clients at once"
    try:
        mapped = ran(device, make, trainer={"precision": precision}, engine="vmap")
    except NotBatched as error:
        return Row(row_name, f"refused: {error}")
    return near(row_name, mapped.apart(one_by_one), allowed)


def same_seed_twice(device: str, short: bool) -> Iterator[Row]:
    """Two runs of the same, as a user has them and with deterministic kernels, which must agree to the bit."""
    for kind, make in NETWORKS.items():
        for what, options in {"": {}, ", deterministic": {"deterministic": True}}.items():
            first, again = (ran(device, make, trainer=dict(options)) for _ in range(2))
            apart = (
                0.0 if torch.equal(first.vector, again.vector) else max(first.apart(again), 1e-12)
            )
            found = near(f"{kind}: the same seed twice{what}", apart, 0.0)
            yield found if options else Row(found.what, found.found)


def coalitions_in_fits(device: str, short: bool) -> Iterator[Row]:
    """ShadowShapley: what a fit with it takes, in fits without."""
    x, y = bench_round.images(300 if short else 3000)
    for kind, make in {"LeNet": bench_round.lenet, "MLP": bench_round.mlp}.items():
        seconds = []
        for metrics in ({}, {}, {"value": ShadowShapley()}):  # the first warms up
            loop = FederatedLoop(
                metrics=metrics, seed=0, reporting=Reporting(table=False, files=False)
            )
            data = FederatedDataModule(TensorDataset(x, y), IIDPartitioner(5), batch_size=32)
            start = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                trainer = quiet_trainer(
                    folder, 2 if short else 5, [loop], device, limit_val_batches=1.0
                )
                trainer.fit(bench_round.client(make), data)
            seconds.append(time.perf_counter() - start)
        yield Row(f"{kind}, 5 clients: ShadowShapley, fits", f"{seconds[2] / seconds[1]:.2f}")


def memory_that_runs_out(device: str, short: bool) -> Iterator[Row]:
    """A chunk of models that does not fit is halved, with the same values."""
    if device != "cuda":
        yield not_here("models at once in too little memory", f"{device} has none of its own")
        return
    module, count = client(convolution).cuda().eval(), 32 if short else 256
    space = ParameterSpace(module)
    batches = [tuple(part.cuda() for part in images(40 if short else 2000).tensors)]
    vectors = space.read(module) + 0.1 * torch.randn(count, space.size, device=device)

    def evaluator(backend: Any, chunk: int) -> ModelEvaluator:
        return ModelEvaluator(
            module, space, batches, num_classes=CLASSES, backend=backend, chunk=chunk
        )

    expected = evaluator("serial", 1)(vectors)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    evaluator("vmap", 8)(vectors[:8])
    needed = torch.cuda.max_memory_allocated() - held
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, (torch.cuda.memory_reserved() + 2.5 * needed) / total)
    )
    many = evaluator("vmap", count)
    try:
        found = many(vectors)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    verdict = "ok" if many.chunk < count else "FAILED"
    yield Row(
        f"{count} models in too little memory", f"{many.chunk} at once", f"< {count}", verdict
    )
    apart = (found.values["loss"] - expected.values["loss"]).abs().max()
    yield near("the same after halving, losses", float(apart), 1e-3)


def two_ranks(device: str, short: bool) -> Iterator[Row]:
    """Two processes on one device, and on two where there are as many; they exchange through the CPU."""
    with tf32(False):
        alone = ran(device, convolution)
    for second in range(min(2, torch.cuda.device_count()) if device == "cuda" else 1):
        what = f"two ranks on {device} 0 and {second}: weights"
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "vector.pt")
            command = [
                sys.executable,
                __file__,
                "--device",
                device,
                "--rank",
                str(second),
                "--out",
                str(target),
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode:
                yield Row(
                    what,
                    f"ended with {done.returncode}: {done.stderr.strip()[-200:]}",
                    "",
                    "FAILED",
                )
            else:
                apart = float((torch.load(target) - alone.vector).norm()) / alone.moved
                yield near(what, apart, ALLOWED["32-true"])


def one_rank(device: str, second: int, out: Path) -> None:
    """A process of :func:`two_ranks`."""
    places = [
        torch.device(device, number) if device == "cuda" else torch.device("cpu")
        for number in (0, second)
    ]
    strategy = FederatedStrategy(parallel_devices=places)
    with tf32(False):
        found = ran(
            device,
            convolution,
            trainer={"strategy": strategy, "devices": "auto" if device == "cuda" else 2},
        )
    if strategy.global_rank == 0:
        torch.save(found.vector, out)


def one_round(device: str, short: bool) -> Iterator[Row]:
    """Launches and waits of a batch: what two rounds take more for twelve batches than for four, over these."""
    for kind, make in NETWORKS.items():
        few, many = (_counted(device, make, batches) for batches in (4, 12))
        for what, count in few.items():
            each = (many[what] - count) / (2 * CLIENTS * 8)
            verdict = "" if what == "launches" else "ok" if each <= 0 else "FAILED"
            yield Row(f"{kind}: {what} a batch", f"{each:.2f}", "0" if verdict else "", verdict)


def _counted(device: str, make: Callable[[], nn.Module], batches: int) -> dict[str, int]:
    ran(device, make, batches, measured=False)  # what is made once
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiled:
        ran(device, make, batches, measured=False)
    events = {event.key: event.count for event in profiled.key_averages()}
    names = {
        ".item()": [ITEM],
        **({"launches": LAUNCHES, "waits": WAITS} if device == "cuda" else {}),
    }
    return {what: sum(events.get(name, 0) for name in each) for what, each in names.items()}


def cuda_tests(device: str, short: bool) -> Iterator[Row]:
    """``pytest -m cuda``."""
    if device != "cuda":
        yield not_here("pytest -m cuda tests/device", "they need CUDA")
        return
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "tests/device"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    summary = done.stdout.strip().splitlines()[-1:]
    yield Row(
        "pytest -m cuda tests/device",
        "".join(summary).strip("= "),
        "",
        "FAILED" if done.returncode else "ok",
    )


def ratios(device: str, short: bool) -> Iterator[Row]:
    """Seconds and images a second of a round, and of a round of many clients: by flsv, by a plain loop on the same
    device, and by Lightning's Trainer without the loop."""
    rounds, clients = (2, 4) if short else (4, 100)
    x, y = bench_round.images()

    def federated(on_device: bool) -> list[float]:
        return bench_round.federated(
            x, y, rounds, True, loader=Loader(on_device=on_device), accelerator=device
        )

    def lightning_alone() -> list[float]:
        return bench_round.trainer_alone(x.to(device), y.to(device), rounds, accelerator=device)

    ways: dict[str, Callable[[], list[float]]] = {
        "plain PyTorch": lambda: bench_round.plain(x.to(device), y.to(device), rounds),
        "Lightning's Trainer alone, data on the device": lightning_alone,
        "FederatedLoop, data on the device": lambda: federated(True),
        "FederatedLoop, batches copied": lambda: federated(False),
    }
    yield from _ratios("round", ways, device, len(x))
    ways = {
        engine: partial(many_lenets, device, engine, clients, rounds)
        for engine in ("sequential", "vmap")
    }
    yield from _ratios(f"round of {clients} LeNets", ways, device, 60 * clients)


def _ratios(
    what: str, ways: dict[str, Callable[[], list[float]]], device: str, images: int
) -> Iterator[Row]:
    """Rows of each way's seconds of a round, in ratio to the first way's too, of images a second, and of memory."""
    base = 0.0
    for name, run in ways.items():
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        median = statistics.median(run()[1:])  # the first round warms up
        base = base or median
        yield Row(f"{what}, s: {name}", f"{median:.4g} ({median / base:.2f})")
        yield Row(f"{what}, images a second: {name}", f"{images / median:.4g}")
        if device == "cuda":
            yield Row(
                f"{what}, MiB at most: {name}", f"{torch.cuda.max_memory_allocated() / 2**20:.0f}"
            )


def many_lenets(device: str, engine: Any, clients: int, rounds: int) -> list[float]:
    """Seconds of rounds of many LeNets with 60 images each."""
    samples = TensorDataset(torch.randn(clients * 60, 1, 28, 28), torch.arange(clients * 60) % 10)
    data = FederatedDataModule(
        samples, IIDPartitioner(clients), batch_size=20, splits=Splits(server_val=0)
    )
    loop = FederatedLoop(seed=0, reporting=Reporting(table=False, files=False), engine=engine)
    timer = RoundTimer()
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(folder, rounds, [loop, timer], device).fit(
            bench_round.client(bench_round.lenet), data
        )
    return timer.wall


def machine(device: str, short: bool) -> Iterator[Row]:
    """Hardware, versions and settings."""
    yield Row("device", torch.cuda.get_device_name(0) if device == "cuda" else f"{device}: no GPU")
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        yield Row(
            "devices, memory of each",
            f"{torch.cuda.device_count()}, {properties.total_memory / 2**30:.0f} GiB",
        )
        yield Row("compute capability", f"{properties.major}.{properties.minor}")
        yield Row("CUDA, cuDNN", f"{torch.version.cuda}, {torch.backends.cudnn.version()}")
    yield Row("processor", f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores")
    yield Row(
        "versions", f"flsv {flsv.__version__}, torch {torch.__version__}, lightning {L.__version__}"
    )
    yield Row("system", f"{platform.platform()}, Python {platform.python_version()}")
    yield Row("TensorFloat32 by torch's settings, on CUDA", ", ".join(tf32_of()) or "nowhere")
    yield Row("date", datetime.date.today().isoformat())


CHECKS: dict[str, Callable[[str, bool], Iterator[Row]]] = {
    "machine": machine,
    "numbers": equal_to_the_cpu,
    "seeds": same_seed_twice,
    "memory": memory_that_runs_out,
    "ranks": two_ranks,
    "profiler": one_round,
    "tests": cuda_tests,
    "coalitions": coalitions_in_fits,
    "ratios": ratios,
}


def checked(title: str, device: str, short: bool) -> Iterator[Row]:
    """The rows of a check; an error is one, too."""
    try:
        yield from CHECKS[title](device, short)
    except Exception as error:
        text = str(error).partition("\n")[0]
        yield Row(title, f"{type(error).__name__}: {text}", "", "FAILED")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/gpu.csv")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--short", action="store_true", help="fewer and smaller measurements")
    parser.add_argument(
        "--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), metavar="TITLE"
    )
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    be_quiet()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic products need
    if options.rank is not None:
        one_rank(options.device, options.rank, options.out)
        return 0
    if options.device != "cuda":
        print("There is no CUDA device here: this runs what goes on the CPU.", flush=True)
    start, lines = time.perf_counter(), [["check", "what", "found", "allowed", "verdict"]]
    for title in options.only:
        for row in checked(title, options.device, options.short):
            lines.append([title, *astuple(row)])
            print(*lines[-1], sep=" | ", flush=True)
    save_csv(options.out, lines)
    verdicts = [line[-1] for line in lines]
    print(f"{options.out}: {time.perf_counter() - start:.0f} s")
    for verdict in ("ok", "FAILED", "not run"):
        print(f"{verdict}: {verdicts.count(verdict)} checks")
    return int("FAILED" in verdicts)


if __name__ == "__main__":
    raise SystemExit(main())
