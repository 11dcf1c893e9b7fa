"""FedBary's comparison (Li et al., CVPR 2024): figures 2 to 5 and tables 2 to 4, on what is at hand.

    python tools/fedbary_table.py [--root DATA] [--seeds 5] [--workers 2] [--out FILE.md]
    python tools/fedbary_table.py --parts time                    runs alone, twenty minutes of it
    python tools/fedbary_table.py --parts detection --only mnist  one of a part's rows
    python tools/fedbary_table.py --full --root DATA              the paper's sizes
    python tools/fedbary_table.py --full --short                  every job of it at small sizes, and an estimate

Parts: protocol (against POT; figure 3), variants (figures 2 and 5a), contributions (figure 4), detection (figure 5),
removal (points, duplicates, tables 3 and 4) and time (table 2), which runs alone after all others and has to be asked
for. Every part says what has to be reached and whether it was. Finished jobs are kept, and a killed table goes on.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from fedbary_common import FULL, Check, Setting
from fedbary_jobs import PARTS, SHORT, JobCell, cells, counted, results_of
from table_cells import Kept, Results, finish

from flsv.engines.ranks import ranks_of_environment
from flsv.participants import ALONE

TITLES = {
    "protocol": "The protocol against POT",
    "variants": "Which potential to ask, and distance against noise (figures 2 and 5a)",
    "contributions": "Contribution shares (figure 4)",
    "detection": "Detection of bad samples (figure 5)",
    "removal": "Removal, duplication, filtering (tables 3 and 4)",
    "time": "Time (table 2)",
}
IMAGE = Path(__file__).parents[1] / "docs" / "images" / "fedbary_barycenter.png"

Job = tuple[Any, ...]


def report(
    name: str, results: dict[Job, Any], setting: Setting, image: Path | None = None, seconds: float = 0.0
) -> str:
    """A part's section, in Markdown."""
    lines, checks = PARTS[name].report(results, setting, image)
    numbers = sorted({job[-1] for job in results})
    end = f"{len(results)} jobs, seeds {numbers[0]} to {numbers[-1]}, {seconds:.0f} s of computing."
    return "\n".join([f"## {TITLES[name]}", "", *lines, "", *map(str, _sorted(checks)), "", end])


def _sorted(checks: list[Check]) -> list[Check]:
    return sorted(checks, key=lambda check: not check.met)


def sections(found: Results, jobs: Sequence[JobCell], setting: Setting, image: Path | None) -> str:
    """The parts of which something is finished."""
    texts = []
    for part in dict.fromkeys(job.column for job in jobs):
        results, seconds = results_of(found, jobs, part)
        if results:
            texts.append(report(part, results, setting, image, seconds))
    values = ", ".join(f"{name} {value}" for name, value in asdict(setting).items())
    return "\n\n".join([*texts, f"Setting: {values}."])


def short(jobs: Sequence[JobCell], whole: Setting, seeds: int, root: str) -> str:
    """Run small jobs, and say what all seeds of the whole ones would take."""
    found, gpu = {}, 0.0
    for done, job in enumerate(jobs, 1):
        found[job.key], seconds = counted(job, whole, root)
        gpu += seeds * seconds
        print(f"{done}/{len(jobs)} {job.column}, {job.row}", flush=True)
    end = (
        f"Each of {len(jobs)} jobs at small sizes. The paper's sizes with {seeds} seeds: about {gpu / 3600:.1f} GPU "
        "hours for torch's operators, by counting them and not measured; what is done once a round is multiplied by "
        "the batches, too. Transport programmes are solved on the CPU, and are not in it, nor are the coalition games "
        "of figure 4, which other threads play."
    )
    return f"{sections(found, jobs, SHORT, None)}\n\n{end}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=os.environ.get("FLSV_DATA_ROOT", "data"))
    parser.add_argument("--full", action="store_true", help="the paper's sizes")
    parser.add_argument("--short", action="store_true", help="one seed at small sizes, and what --full would take")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=10, help="the methods were settled looking at seed 0")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), help="by default all but time; with --full all")
    parser.add_argument("--only", nargs="+", help="only these of the parts' rows, such as mnist")
    parser.add_argument("--kept", type=Path, default=Path("runs/tables/fedbary.jsonl"), help="finished jobs")
    parser.add_argument("--any-version", action="store_true", help="jobs kept by other versions of the sources count")
    parser.add_argument("--finished", action="store_true", help="report the finished jobs, and run nothing")
    parser.add_argument("--image", type=Path, default=IMAGE, help="where figure 3 goes")
    parser.add_argument("--out", type=Path, help="write the report there, too")
    options = parser.parse_args(arguments)
    ranks = ranks_of_environment()
    if ranks.rank and (options.short or options.finished):
        return
    setting = SHORT if options.short else FULL if options.full else Setting()
    seeds = range(options.first_seed, options.first_seed + (1 if options.short else options.seeds))
    everything = options.full or options.short or options.finished
    parts = options.parts or [part for part in PARTS if everything or part != "time"]
    jobs = [job for job in cells(parts, setting, seeds) if not options.only or job.row in options.only]
    left_out = [] if options.parts else [part for part in PARTS if part not in parts]
    asking = f"Left out, until --parts names it: {', '.join(left_out)}." if left_out else ""
    if not jobs:
        parser.error(f"no job of these parts is called so. {asking}".strip())
    start, kept = time.perf_counter(), Kept(options.kept, options.any_version, options.root)
    if options.short:
        text = short(jobs, FULL, options.seeds, options.root)
    elif options.finished:
        found = {job.key: result for job in jobs if (result := kept.find(job)) is not None}
        text = sections(found, jobs, setting, options.image)
        text += f"\n\n{len(found)} of {len(jobs)} jobs are finished."
    else:
        shared = [job for job in jobs if job.column != "time"]
        alone = [job for job in jobs if job.column == "time"]
        found = finish(shared, kept, options.root, options.workers, ranks) if shared else {}
        if ranks.rank:
            return
        found |= finish(alone, kept, options.root, workers=1, ranks=ALONE) if alone else {}
        workers = options.workers * ranks.size if shared else 1
        text = sections(found, jobs, setting, options.image)
        text += f"\n\n{time.perf_counter() - start:.0f} s with {workers} workers, torch {torch.__version__}."
    text += f"\n\n{asking}" if asking else ""
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
