"""All that a person with a GPU is asked for, in one Markdown file.

    make cuda                                                       # or:
    python tools/gpu_report.py [--out docs/results/gpu.md] [--device cuda|cpu] [--short] [--only TITLE ...]

Hardware and versions; the checks of ``gpu_checks.py``: the CPU's numbers in every precision, clients and models at
once, memory that runs out, streams, resume, two ranks on a device, peak memory, a round under the profiler; the tests
of ``tests/cuda``; and the ratios of ``bench_gpu.py``. Without a CUDA device it says so, and runs as much of the list as
goes on the CPU. Ends with 1 where a check has failed.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from common import grid
from gpu_checks import CHECKS, Place, Row

import flsv
from flsv._lightning.precision import tf32_of

ROOT = Path(__file__).parents[1]
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


def ratios(place: Place) -> list[Row]:
    """Seconds of a round, a coalition and of 100 clients at once; against plain loops on the same device."""
    import bench_gpu

    rounds, count = (1, 16) if place.short else (3, 256)
    rows = [*bench_gpu.rounds(place.device, place.name, rounds), *bench_gpu.coalitions(place.device, count)]
    rows += bench_gpu.clients_at_once(place.name, 4 if place.short else 100, rounds)
    if place.name == "cuda":
        rows += bench_gpu.resnet(place.name, 2, None)
    goals = {"FederatedLoop, data on the device": (1.05, "<="), "engine=vmap": (0.2, "<=")}
    found = []
    for kind, name, value, ratio in rows:
        goal = goals.get(name, (None, ""))[0] if place.name == "cuda" else None
        verdict = "" if goal is None else "reached" if ratio <= goal else "missed"
        found.append(Row(f"{kind}: {name}", f"{value:.4g} ({ratio:.2f})", "" if goal is None else f"{goal}", verdict))
    return found


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
    every = {**CHECKS, "Tests": tests, "Ratios": ratios}
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
