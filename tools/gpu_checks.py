"""The checks of ``make cuda``, and what they train: each gives rows of what was found, and how far apart it may be.

python tools/gpu_checks.py cpu|cuda 0,0 OUT         one of two ranks, which a check starts
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flsv import FederatedDataModule, FederatedLoop, Reporting
from flsv.engines.ranks import FederatedStrategy
from flsv.errors import ConfigurationError
from flsv.games import ModelEvaluator
from flsv.metrics import ClassSpecificShapley, CumulativeShapley, GradientShapley
from flsv.parameters import ParameterSpace

CLASSES, CLIENTS, BATCH = 4, 3, 8
SEED = 5
#: How far weights may be from the CPU's, as a share of the way that training has moved them.
ALLOWED = {"32-true": 1e-3, "32-true, TF32": 5e-2, "bf16-mixed": 0.2, "bf16-true": 0.6}


class Attention(nn.Module):
    """A block of a transformer that reads an image's rows."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.read, self.place = nn.Linear(8, width), nn.Parameter(torch.zeros(8, width))
        self.norm, self.three, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x.squeeze(1)) + self.place
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for part in self.three(self.norm(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))
        return self.head((x + self.wide(x)).mean(-2))


def convolution() -> nn.Module:
    layers = [
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, CLASSES))


def wide() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 2048), nn.Linear(2048, CLASSES))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"convolution": convolution, "transformer": Attention}


class Module(L.LightningModule):
    """As a user writes it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = {**NETWORKS, "wide": wide}[kind]()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def images(count: int, seed: int = 0) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    means = torch.randn(CLASSES, 1, 8, 8, generator=torch.Generator().manual_seed(9))
    y = torch.arange(count) % CLASSES
    return TensorDataset(means[y] + torch.randn(count, 1, 8, 8, generator=draw), y)


def data(batches: int = 4, clients: int = CLIENTS) -> FederatedDataModule:
    own = {str(client): images(batches * BATCH, client) for client in range(clients)}
    return FederatedDataModule(clients=own, val=images(40, 7), batch_size=BATCH)


@dataclass(frozen=True)
class Place:
    """Where it runs.

    Attributes:
        name: ``"cuda"`` or ``"cpu"``.
        device: torch's.
        options: makes the arguments of a Trainer that trains there.
        short: whether every second of it counts.
    """

    name: str
    device: torch.device
    options: Callable[[], dict[str, Any]]
    short: bool = False


@dataclass(frozen=True)
class Row:
    """What was looked at, what was found, and how far it may be."""

    what: str
    found: str
    allowed: str = ""
    verdict: str = "ok"


def near(what: str, apart: float, allowed: float) -> Row:
    return Row(what, f"{apart:.1e}", f"{allowed:.0e}", "ok" if apart <= allowed else "FAILED")


def metrics() -> dict[str, Any]:
    return {
        "cssv": ClassSpecificShapley(),
        "game": CumulativeShapley(performance="negative_loss"),
        "logged": CumulativeShapley(performance="val_loss", mode="min"),
        "slope": GradientShapley(),
    }


@dataclass
class Ran:
    """A fit that has ended: its weights, how far they moved, and the values of its metrics, on the CPU."""

    vector: Tensor
    moved: float
    values: dict[str, Tensor]

    def apart(self, other: Ran) -> float:
        return float((self.vector - other.vector).norm()) / max(self.moved, other.moved, 1e-12)

    def values_apart(self, other: Ran) -> float:
        return max((float((v - other.values[name]).abs().max()) for name, v in self.values.items()), default=0.0)


def ran(
    place: Place | None,
    kind: str,
    folder: str,
    rounds: int = 2,
    precision: str = "32-true",
    batches: int = 4,
    clients: int = CLIENTS,
    measured: bool = True,
    **options: Any,
) -> Ran:
    """One fit; ``place`` None: on the CPU."""
    where = {"accelerator": "cpu"} if place is None else place.options()
    loop = FederatedLoop(
        metrics=metrics() if measured else {}, seed=SEED, reporting=Reporting(table=False, files=False), **options
    )
    module = Module(kind)
    start = ParameterSpace(module).read(module).clone().float()
    trainer = L.Trainer(
        max_epochs=rounds,
        precision=precision,  # type: ignore[arg-type]
        callbacks=[loop],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **where,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, data(batches, clients))
    vector = ParameterSpace(module).read(module).cpu().float()
    values = {name: value.cpu().float() for name, value in loop.board.contributions.items() if value is not None}
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


def equal_to_the_cpu(place: Place) -> Iterator[Row]:
    """Training and contributions, in every precision."""
    ways = [("32-true", False), ("32-true", True), ("bf16-mixed", False), ("bf16-true", False)]
    for kind in NETWORKS:
        for precision, rounded in ways:
            name = precision + (", TF32" if rounded else "")
            with tempfile.TemporaryDirectory() as folder, tf32(rounded):
                here, there = (
                    ran(None, kind, folder, precision=precision),
                    ran(place, kind, folder, precision=precision),
                )
            yield near(f"{kind}, {name}: weights against the CPU's", there.apart(here), ALLOWED[name])
            yield near(f"{kind}, {name}: contributions against the CPU's", there.values_apart(here), ALLOWED[name])


def clients_at_once(place: Place) -> Iterator[Row]:
    """``engine="vmap"`` against one client after the other, on the same device."""
    for kind in NETWORKS:
        for precision, rounded in (("32-true", False), ("32-true", True), ("bf16-mixed", False)):
            name = precision + (", TF32" if rounded else "")
            with tempfile.TemporaryDirectory() as folder, tf32(rounded):
                try:
                    found = [ran(place, kind, folder, precision=precision, engine=e) for e in ("vmap", "sequential")]
                except ConfigurationError as error:
                    yield Row(f"{kind}, {name}: clients at once", f"refused: {error}", "", "FAILED")
                    continue
            yield near(f"{kind}, {name}: clients at once", found[0].apart(found[1]), ALLOWED[name])


def memory_that_runs_out(place: Place) -> Iterator[Row]:
    """A chunk of models that does not fit is halved, with the same values."""
    module = Module("convolution").to(place.device).eval()
    space = ParameterSpace(module)
    samples = 40 if place.short else 2000
    batches = [tuple(part.to(place.device) for part in images(samples).tensors)]
    count = 32 if place.short else 256
    start = space.read(module)
    vectors = start + 0.1 * torch.randn(count, space.size, generator=torch.Generator().manual_seed(0)).to(start)
    expected = ModelEvaluator(module, space, batches, num_classes=CLASSES, backend="serial")(vectors)
    many = ModelEvaluator(module, space, batches, num_classes=CLASSES, backend="vmap", chunk=count)
    if place.name == "cuda":
        small = ModelEvaluator(module, space, batches, num_classes=CLASSES, backend="vmap", chunk=8)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        small(vectors[:8])
        needed = torch.cuda.max_memory_allocated() - held
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(place.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + 2.5 * needed) / total))
        how = "memory of the process limited"
    else:
        original = many._score

        def full(rows: range, *rest: Any) -> None:
            if len(rows) > count // 4:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
            original(rows, *rest)

        many._score = full  # type: ignore[method-assign]
        how = "the error is simulated"
    try:
        found = many(vectors)
    finally:
        if place.name == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
    halved = many.chunk < count
    yield Row(f"{count} models at once, {how}", f"{many.chunk} at once", f"< {count}", "ok" if halved else "FAILED")
    apart = (found.values["loss"] - expected.values["loss"]).abs().max()
    yield near("the same after halving, losses", float(apart), 1e-3)


def another_stream(place: Place) -> Iterator[Row]:
    """A fit within a stream of the user's own."""
    if place.name != "cuda":
        yield Row("a fit within a stream of its own", "not here: no streams", "", "not run")
        return
    with tempfile.TemporaryDirectory() as folder, tf32(False):
        usual = ran(place, "convolution", folder)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            own = ran(place, "convolution", folder)
        torch.cuda.synchronize()
    yield near("a fit within a stream of its own: weights", own.apart(usual), ALLOWED["32-true"])


def two_ranks(place: Place) -> Iterator[Row]:
    """Two processes on one device, and on two where there are as many; they exchange through the CPU."""
    ways = [[0, 0]]
    if place.name == "cuda" and torch.cuda.device_count() > 1:
        ways.append([0, 1])
    else:
        yield Row("two ranks on two devices", "not here: one device", "", "not run")
    for devices in ways:
        with tempfile.TemporaryDirectory() as folder, tf32(False):
            alone = ran(place, "convolution", folder)
            target = Path(folder, "vector.pt")
            command = [sys.executable, __file__, place.name, ",".join(map(str, devices)), str(target)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ})
            where = "the CPU" if place.name == "cpu" else "one device" if devices == [0, 0] else "two devices"
            what = f"two ranks on {where}: weights"
            if done.returncode or not target.exists():
                said = (done.stderr.strip().splitlines() or ["no word"])[-1]
                yield Row(what, f"ended with {done.returncode}: {said}", "", "FAILED")
                continue
            yield near(what, float((torch.load(target) - alone.vector).norm()) / alone.moved, ALLOWED["32-true"])


#: In this order, by the title of its table.
CHECKS: dict[str, Callable[[Place], Iterator[Row]]] = {
    "The CPU's numbers": equal_to_the_cpu,
    "Clients at once": clients_at_once,
    "Memory that runs out": memory_that_runs_out,
    "Streams": another_stream,
    "Two ranks": two_ranks,
}


def one_rank(name: str, devices: str, out: Path) -> None:
    places = [torch.device("cpu") if name == "cpu" else torch.device("cuda", int(each)) for each in devices.split(",")]

    def options() -> dict[str, object]:
        strategy = FederatedStrategy(parallel_devices=places)
        ranks.append(strategy)
        return {"accelerator": name, "devices": len(places) if name == "cpu" else "auto", "strategy": strategy}

    ranks: list[FederatedStrategy] = []
    with tempfile.TemporaryDirectory() as folder, tf32(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = ran(Place(name, places[0], options), "convolution", folder)
    if ranks[0].global_rank == 0:
        torch.save(found.vector, out)


if __name__ == "__main__":
    one_rank(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
