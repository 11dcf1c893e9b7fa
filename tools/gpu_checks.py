"""The checks of ``tools/gpu_report.py``: each gives rows of what was found, and how far apart it may be."""

from __future__ import annotations

import itertools
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
from gpu_modules import CLASSES, CLIENTS, NETWORKS, Module, data, images
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from flsv import FederatedLoop, Reporting
from flsv.errors import ConfigurationError
from flsv.games import ModelEvaluator
from flsv.metrics import ClassSpecificShapley, CumulativeShapley, GradientShapley
from flsv.parameters import ParameterSpace

SEED = 5
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")
#: How far weights may be from the CPU's, as a share of the way that training has moved them.
ALLOWED = {"32-true": 1e-3, "32-true, TF32": 5e-2, "bf16-mixed": 0.2, "bf16-true": 0.6}


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
    callbacks: Any = (),
    ckpt_path: Any = None,
    **options: Any,
) -> Ran:
    """One fit; ``place`` None: on the CPU."""
    where = {"accelerator": "cpu"} if place is None else place.options()
    saving = any(isinstance(each, L.pytorch.callbacks.ModelCheckpoint) for each in callbacks)
    loop = FederatedLoop(
        metrics=metrics() if measured else {}, seed=SEED, reporting=Reporting(table=False, files=False), **options
    )
    module = Module(kind)
    start = ParameterSpace(module).read(module).clone().float()
    trainer = L.Trainer(
        max_epochs=rounds,
        precision=precision,  # type: ignore[arg-type]
        callbacks=[loop, *callbacks],
        logger=False,
        enable_checkpointing=saving,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **where,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, data(batches, clients), ckpt_path=ckpt_path, weights_only=False)
    vector = ParameterSpace(module).read(module).cpu().float()
    values = {name: value.cpu().float() for name, value in loop.contributions.items() if value is not None}
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


def games_at_once(place: Place) -> Iterator[Row]:
    """All coalitions under vmap against one model after the other, by logits and by what is logged."""
    for kind in NETWORKS:
        with tempfile.TemporaryDirectory() as folder, tf32(False):
            loop = FederatedLoop(seed=SEED, reporting=Reporting(table=False, files=False))
            probe = _Games(kind)
            trainer = L.Trainer(
                max_epochs=1,
                callbacks=[loop, probe],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
                **place.options(),
            )
            trainer.fit(Module(kind), data())
        yield from probe.rows


class _Games(L.Callback):
    """Evaluates models in the middle of a fit."""

    def __init__(self, kind: str) -> None:
        self.kind, self.rows = kind, list[Row]()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        space, val = ParameterSpace(pl_module), trainer.datamodule.val_dataloader()  # type: ignore[attr-defined]
        start = space.read(pl_module)
        draw = torch.Generator().manual_seed(0)
        vectors = start + 0.1 * torch.randn(16, space.size, generator=draw).to(start)
        batches = [tuple(part.to(start.device) for part in batch) for batch in val]
        scores = {
            backend: ModelEvaluator(pl_module, space, batches, num_classes=CLASSES, backend=backend)(vectors)
            for backend in ("vmap", "serial")
        }
        apart = (scores["vmap"].values["loss"] - scores["serial"].values["loss"]).abs().max()
        self.rows.append(near(f"{self.kind}: a game under vmap, losses", float(apart), 1e-4))


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


def resumed(place: Place) -> Iterator[Row]:
    """From a checkpoint of this device and of the CPU, against the run that was not interrupted."""
    for kind, first in itertools.product(NETWORKS, (place, None)):
        with tempfile.TemporaryDirectory() as folder, tf32(False):
            whole = ran(place, kind, folder, rounds=3)
            saving = L.pytorch.callbacks.ModelCheckpoint(dirpath=folder, save_last=True)
            ran(first, kind, folder, callbacks=[saving])
            again = ran(place, kind, folder, rounds=3, ckpt_path=str(Path(folder, "last.ckpt")))
        of = "this device" if first is not None else "the CPU"
        yield near(f"{kind}: resumed from a checkpoint of {of}", again.apart(whole), ALLOWED["32-true"])


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
            script = Path(__file__).with_name("gpu_ranks.py")
            command = [sys.executable, str(script), place.name, ",".join(map(str, devices)), str(target)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ})
            where = "the CPU" if place.name == "cpu" else "one device" if devices == [0, 0] else "two devices"
            what = f"two ranks on {where}: weights"
            if done.returncode or not target.exists():
                said = (done.stderr.strip().splitlines() or ["no word"])[-1]
                yield Row(what, f"ended with {done.returncode}: {said}", "", "FAILED")
                continue
            yield near(what, float((torch.load(target) - alone.vector).norm()) / alone.moved, ALLOWED["32-true"])


def peak_memory(place: Place) -> Iterator[Row]:
    """The most that a fit holds, in models, beside what was there."""
    if place.name != "cuda":
        yield Row("peak memory of a fit", f"not here: {place.name} does not count it", "", "not run")
        return
    for clients in (CLIENTS, 2 * CLIENTS):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with tempfile.TemporaryDirectory() as folder:
            ended = ran(place, "wide", folder, clients=clients, measured=False)
        models = (torch.cuda.max_memory_allocated() - before) / (4 * len(ended.vector))
        size = 4 * len(ended.vector) >> 20
        yield Row(f"peak of a fit with {clients} clients of {size} MiB each", f"{models:.1f} models", "", "")


def one_round(place: Place) -> Iterator[Row]:
    """Launches and waits of a batch: what two rounds take more for twice as many batches, over these."""
    few, many = 4, 12
    for kind in NETWORKS:
        found = [_counted(place, kind, batches) for batches in (few, many)]
        extra = 2 * CLIENTS * (many - few)
        for what in found[0]:
            each = (found[1][what] - found[0][what]) / extra
            waits = what.startswith(("waits", ".item()"))
            verdict = "" if not waits else "ok" if each <= 0 else "FAILED"
            yield Row(f"{kind}: {what} a batch", f"{each:.2f}", "0" if waits else "", verdict)


def _counted(place: Place, kind: str, batches: int) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if place.name == "cuda" else [])]
        ran(place, kind, folder, batches=batches, measured=False)  # what is made once
        with profile(activities=activities) as profiled:
            ran(place, kind, folder, batches=batches, measured=False)
    events = {event.key: event.count for event in profiled.key_averages()}
    items = {".item()": events.get("aten::_local_scalar_dense", 0)}
    if place.name != "cuda":
        return items
    return {
        "launches": sum(events.get(name, 0) for name in LAUNCHES),
        "waits": sum(events.get(name, 0) for name in WAITS[:3]),
        **items,
    }


#: In this order, by the title of its table.
CHECKS: dict[str, Callable[[Place], Iterator[Row]]] = {
    "The CPU's numbers": equal_to_the_cpu,
    "Clients at once": clients_at_once,
    "Models of a game at once": games_at_once,
    "Memory that runs out": memory_that_runs_out,
    "Streams": another_stream,
    "Resume": resumed,
    "Two ranks": two_ranks,
    "Peak memory": peak_memory,
    "A round under the profiler": one_round,
}
