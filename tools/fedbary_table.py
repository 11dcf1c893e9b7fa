"""FedBary's comparison (Li et al., CVPR 2024): figures 3 to 5 and tables 2 to 4, on what is at hand.

    python tools/fedbary_table.py [--root DATA] [--seeds 2] [--workers 2] [--out docs/results/fedbary.md]
    python tools/fedbary_table.py --parts protocol time
    python tools/fedbary_table.py --full --root DATA              the paper's sizes

Parts: protocol (against POT; figure 3), contributions (figure 4), detection (figure 5), removal (points, duplicates,
tables 3 and 4) and time (table 2), which runs alone after all others. Every part says what has to be reached and
whether it was.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import fedbary_contributions
import fedbary_detection
import fedbary_protocol
import fedbary_removal
import fedbary_time
import torch
from fedbary_common import FULL, Check, Setting

PARTS: dict[str, Any] = {
    "protocol": fedbary_protocol,
    "contributions": fedbary_contributions,
    "detection": fedbary_detection,
    "removal": fedbary_removal,
    "time": fedbary_time,
}
TITLES = {
    "protocol": "The protocol against POT",
    "contributions": "Contribution shares (figure 4)",
    "detection": "Detection of bad samples (figure 5)",
    "removal": "Removal, duplication, filtering (tables 3 and 4)",
    "time": "Time (table 2)",
}
IMAGE = Path(__file__).parents[1] / "docs" / "images" / "fedbary_barycenter.png"

Job = tuple[Any, ...]


def work(job: Job, setting: Setting, root: str) -> tuple[Any, float]:
    """One job's result and its seconds."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    result = PARTS[job[0]].run(job, setting, root)
    return result, time.perf_counter() - start


def report(name: str, results: dict[Job, tuple[Any, float]], setting: Setting, image: Path | None = None) -> str:
    """A part's section, in Markdown."""
    lines, checks = PARTS[name].report({job: result for job, (result, _) in results.items()}, setting, image)
    seconds = sum(spent for _, spent in results.values())
    numbers = sorted({job[-1] for job in results})
    seeds = "" if name == "time" else f", seeds {numbers[0]} to {numbers[-1]}"
    end = f"{len(results)} jobs{seeds}, {seconds:.0f} s of computing."
    return "\n".join([f"## {TITLES[name]}", "", *lines, "", *map(str, _sorted(checks)), "", end])


def _sorted(checks: list[Check]) -> list[Check]:
    return sorted(checks, key=lambda check: not check.met)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=os.environ.get("FLSV_DATA_ROOT", "data"))
    parser.add_argument("--full", action="store_true", help="the paper's sizes")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=10, help="the methods were settled looking at seed 0")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--image", type=Path, default=IMAGE, help="where figure 3 goes")
    parser.add_argument("--out", type=Path, help="write the report there, too")
    arguments = parser.parse_args()
    setting = FULL if arguments.full else Setting()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    start = time.perf_counter()
    results: dict[Job, tuple[Any, float]] = {}
    call: Callable[[Job], tuple[Any, float]] = partial(work, setting=setting, root=arguments.root)
    jobs = [job for part in arguments.parts for job in PARTS[part].jobs(setting, seeds)]
    alone = [job for job in jobs if job[0] == "time"]
    shared = [job for job in jobs if job[0] != "time"]

    def show(job: Job, result: tuple[Any, float]) -> None:
        results[job] = result
        print(f"{len(results)}/{len(jobs)} {job} {result[1]:.1f} s", flush=True)

    with ProcessPoolExecutor(arguments.workers) as pool:
        for job, result in zip(shared, pool.map(call, shared)):
            show(job, result)
    for job in alone:
        show(job, call(job))
    sections = [
        report(part, {job: r for job, r in results.items() if job[0] == part}, setting, arguments.image)
        for part in arguments.parts
    ]
    values = ", ".join(f"{name} {value}" for name, value in asdict(setting).items())
    end = f"{time.perf_counter() - start:.0f} s with {arguments.workers} workers, torch {torch.__version__}."
    text = "\n\n".join([*sections, f"Setting: {values}.", end])
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
