"""All that a person with a GPU is asked for, in one Markdown file.

    make cuda                                                       # or:
    python tools/gpu_report.py [--out docs/results/gpu.md] [--device cuda|cpu] [--short] [--only TITLE ...]

Hardware and versions; the checks of ``gpu_checks.py``: the CPU's numbers in every precision, clients at once, memory
that runs out, streams, two ranks on a device; peak memory and a round under the profiler; the tests of ``tests/cuda``;
and seconds of a round and of a coalition, against plain loops on the same device. Without a CUDA device it says so, and
runs as much of the list as goes on the CPU. Ends with 1 where a check has failed.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import bench_round
import lightning as L
import torch
from bench_shapley import evaluators
from common import TimedLoop, grid, quiet_trainer
from gpu_checks import CHECKS, CLIENTS, NETWORKS, Place, Row, ran
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

import flsv
from flsv import FederatedDataModule, Reporting
from flsv._lightning.precision import tf32_of
from flsv.data import IIDPartitioner, Loader, Splits

ROOT = Path(__file__).parents[1]
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")
OPENING = """# On a GPU: what was run

Does flsv compute on a GPU what it computes on a CPU, and as fast as a plain loop there? `make cuda` runs the list below
on the machine that it is started on and writes this page.

"""
#: By place, what a reader has to know first.
SAID = {
    "cuda": "- **It was run on a CUDA device**, whose name is below.",
    "cpu": """- **No run on a GPU has been made: the machine had none.** What follows is the
  list as far as it goes on the CPU itself: it shows that the command works, and says nothing of CUDA.""",
}


def place_of(device: str, short: bool) -> Place:
    """The best device that there is, or the one that is asked for."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("torch finds no CUDA device here; --device auto takes what there is")
        return Place("cuda", torch.device("cuda", 0), lambda: {"accelerator": "cuda", "devices": 1}, short)
    return Place("cpu", torch.device("cpu"), lambda: {"accelerator": "cpu", "devices": 1}, short)


def environment(place: Place) -> list[tuple[str, str]]:
    """Hardware, versions and settings."""
    found = [
        ("device", torch.cuda.get_device_name(0) if place.name == "cuda" else f"{place.name}: no GPU"),
        ("processor", f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"),
        ("system", platform.platform()),
        ("versions", f"flsv {flsv.__version__}, torch {torch.__version__}, lightning {L.__version__}"),
        ("Python", platform.python_version()),
        ("TensorFloat32 by torch's settings, on CUDA", ", ".join(tf32_of()) or "nowhere"),
        ("date", datetime.date.today().isoformat()),
    ]
    if place.name == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found[1:1] = [
            ("devices", str(torch.cuda.device_count())),
            ("memory", f"{properties.total_memory / 2**30:.0f} GiB"),
            ("compute capability", f"{properties.major}.{properties.minor}"),
            ("CUDA, cuDNN", f"{torch.version.cuda}, {torch.backends.cudnn.version()}"),
            ("driver", _driver()),
        ]
    return found


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "not known: no nvidia-smi"
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip().replace("\n", ", ")


def checked(place: Place, check: Callable[[Place], Any]) -> list[Row]:
    """The rows of a check; an error is one, too."""
    rows: list[Row] = []
    try:
        for row in check(place):
            rows.append(row)
            print(f"  {row.what}: {row.found} {row.verdict}", flush=True)
    except Exception as error:
        said = (str(error) or type(error).__name__).partition("\n")[0]
        rows.append(Row(check.__name__.replace("_", " "), f"{type(error).__name__}: {said}", "", "FAILED"))
        print(f"  {rows[-1].found}", flush=True)
    return rows


# ---- what is measured


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


def ratios(place: Place) -> list[Row]:
    """Seconds of a round, of a coalition, and of a round of many clients; against plain loops on the same device."""
    count, clients = (1, 4) if place.short else (3, 100)
    x, y = bench_round.images()
    there = x.to(place.device), y.to(place.device)
    away: dict[str, Any] = {"accelerator": place.name}

    def federated(on_device: bool) -> list[float]:
        return bench_round.federated(x, y, count + 1, True, loader=Loader(on_device=on_device), **away)[1:]

    rounds = {
        "plain PyTorch": bench_round.plain(*there, count + 1)[1:],
        "FederatedLoop, data on the device": federated(True),
        "FederatedLoop, batches copied": federated(False),
    }
    found = [("round, s", name, statistics.median(each), rounds["plain PyTorch"]) for name, each in rounds.items()]
    ways, masks = evaluators(TensorDataset(*bench_round.images(5000)), place.device)
    base: list[float] = []
    for name, way in ways.items():
        way(masks[:16])
        start = time.perf_counter()
        way(masks[16 : 32 if place.short else 272]).cpu()
        took = 1000 * (time.perf_counter() - start) / (16 if place.short else 256)
        base = base or [took]
        found.append(("coalition, ms", name, took, base))
    at_once = {engine: many_lenets(place, engine, clients, count) for engine in ("sequential", "vmap")}
    found += [
        (f"{clients} LeNets, round, s", f"engine={engine}", statistics.median(each), at_once["sequential"])
        for engine, each in at_once.items()
    ]
    goals = {"FederatedLoop, data on the device": 1.05, "engine=vmap": 0.2} if place.name == "cuda" else {}
    rows = []
    for kind, name, value, first in found:
        ratio, goal = value / statistics.median(first), goals.get(name)
        verdict = "" if goal is None else "reached" if ratio <= goal else "missed"
        rows.append(Row(f"{kind}: {name}", f"{value:.4g} ({ratio:.2f})", "" if goal is None else f"{goal}", verdict))
    return rows


def many_lenets(place: Place, engine: Any, clients: int, count: int) -> list[float]:
    """Seconds of a round of many LeNets with 60 images each."""
    x, y = torch.randn(clients * 60, 1, 28, 28), torch.arange(clients * 60) % 10
    data = FederatedDataModule(
        TensorDataset(x, y), IIDPartitioner(num_clients=clients, seed=0), batch_size=20, splits=Splits(server_val=0)
    )
    loop = TimedLoop(seed=0, reporting=Reporting(table=False, files=False), engine=engine)
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(folder, count + 1, [loop], place.name).fit(bench_round.client(bench_round.lenet), data)
    return loop.wall[1:]


def tests(place: Place) -> list[Row]:
    """``pytest -m cuda``."""
    if place.name != "cuda":
        return [Row("`pytest -m cuda tests/cuda`", "not here: they need CUDA", "", "not run")]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "tests/cuda"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = (done.stdout.strip().splitlines() or ["nothing"])[-1].strip("= ")
    return [Row("`pytest -m cuda tests/cuda`", said, "", "ok" if done.returncode == 0 else "FAILED")]


def written(place: Place, tables: dict[str, list[Row]], seconds: float) -> str:
    """The page."""
    every = [row for rows in tables.values() for row in rows]
    failed = [row.what for row in every if row.verdict == "FAILED"]
    left_out = sum(row.verdict == "not run" for row in every)
    compared = sum(row.verdict == "ok" for row in every)
    said = f"- {compared} checks hold, {len(failed)} fail, {left_out} cannot be made there."
    if failed:
        said += f" **Failed: {'; '.join(failed)}.**"
    page = OPENING + SAID[place.name] + "\n" + said + "\n"
    page += (
        "- Weights are compared as a share of the way that training has moved them, contributions and losses as they\n"
        '  are; what is "allowed" follows from the precision. Both sides start from the same seed.\n\n'
        "[On a GPU](../gpu.md) says what runs where and what to set.\n\n"
    )
    page += "## The machine\n\n" + grid([["what", "which"], *map(list, environment(place))]) + "\n"
    for title, rows in tables.items():
        page += f"\n## {title}\n\n"
        cells: Sequence[Sequence[str]] = [[r.what, r.found, r.allowed, r.verdict] for r in rows]
        page += grid([["what", "found", "allowed", "verdict"], *cells]) + "\n"
    short = " --short" if place.short else ""
    return page + f"\n`python tools/gpu_report.py --device {place.name}{short}`, {seconds:.0f} s.\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results/gpu.md"))
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--short", action="store_true", help="fewer and smaller measurements")
    every = {**CHECKS, "Peak memory": peak_memory, "A round under the profiler": one_round}
    every |= {"Tests": tests, "Ratios": ratios}
    parser.add_argument("--only", nargs="+", choices=list(every), metavar="TITLE", help=f"of {', '.join(every)}")
    options = parser.parse_args(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    place = place_of(options.device, options.short)
    if place.name != "cuda":
        print("There is no CUDA device here: this runs what goes on the CPU.", flush=True)
    start, tables = time.perf_counter(), {}
    for title in options.only or every:
        print(f"{title} ...", flush=True)
        tables[title] = checked(place, every[title])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(written(place, tables, time.perf_counter() - start))
    print(options.out)
    return int(any(row.verdict == "FAILED" for rows in tables.values() for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
