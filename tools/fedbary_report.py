"""The report of FedBary's comparison (``tables/fedbary.yaml``), in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedbary_common import Check, Setting
from fedbary_jobs import PARTS, JobCell, cells, results_of
from table_cells import Results

TITLES = {
    "protocol": "The protocol against POT",
    "variants": "Which potential to ask, and distance against noise (figures 2 and 5a)",
    "contributions": "Contribution shares (figure 4)",
    "detection": "Detection of bad samples (figure 5)",
    "removal": "Removal, duplication, filtering (tables 3 and 4)",
    "time": "Time (table 2)",
}

Job = tuple[Any, ...]


def of_part(
    name: str, results: dict[Job, Any], setting: Setting, image: Path | None = None, seconds: float = 0.0
) -> str:
    """A part's section, in Markdown."""
    lines, checks = PARTS[name].report(results, setting, image)
    numbers = sorted({job[-1] for job in results})
    end = f"{len(results)} jobs, seeds {numbers[0]} to {numbers[-1]}, {seconds:.0f} s of computing."
    return "\n".join([f"## {TITLES[name]}", "", *lines, "", *map(str, _sorted(checks)), "", end])


def _sorted(checks: list[Check]) -> list[Check]:
    return sorted(checks, key=lambda check: not check.met)


def report(found: Results, cells: Sequence[JobCell], image: Path | None = None) -> str:
    """The parts of which something is finished."""
    texts, setting = [], cells[0].setting
    for part in dict.fromkeys(job.column for job in cells):
        results, seconds = results_of(found, cells, part)
        if results:
            texts.append(of_part(part, results, setting, image, seconds))
    values = ", ".join(f"{name} {value}" for name, value in asdict(setting).items())
    return "\n\n".join([*texts, f"Setting: {values}."])


def draw(found: Results, folder: Path) -> None:
    """Figure 3, where its job is there."""
    results, _ = results_of(found, cells(False, sorted({seed for *_, seed in found})), "protocol")
    if results:
        folder.mkdir(parents=True, exist_ok=True)
        PARTS["protocol"].report(results, Setting(), folder / "fedbary_barycenter.png")
