"""FedBary's jobs as cells, so that finished ones are kept; and what the paper's sizes would take.

The jobs are no ``flsv fit`` runs: a cell's row is what a job is about, its column the part that knows how to run it,
and its command this table's own.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import fedbary_contributions
import fedbary_detection
import fedbary_protocol
import fedbary_removal
import fedbary_time
import fedbary_variants
from common import be_quiet
from fedbary_common import FULL, Setting
from table_cells import Results
from table_presets import FLOPS_PER_SECOND, SECONDS_PER_OPERATOR, Operators
from table_runs import Cell, Measured

PARTS: dict[str, Any] = {
    "protocol": fedbary_protocol,
    "variants": fedbary_variants,
    "contributions": fedbary_contributions,
    "detection": fedbary_detection,
    "removal": fedbary_removal,
    "time": fedbary_time,
}

#: The paper's table at sizes that a minute or two are enough for.
SHORT = Setting(
    support=36,
    iterations=2,
    samples=60,
    points=20,
    validation=60,
    epochs=1,
    components=16,
    protocol_samples=20,
    federation_samples=120,
    federation_validation=0.2,
    rounds=1,
    filter_samples=240,
    filter_rounds=1,
    duplication_samples=60,
    variants_samples=40,
    time_samples=60,
    time_iterations=1,
    time_rounds=1,
)

Job = tuple[Any, ...]  # part, what it is about, seed


@dataclass(frozen=True)
class JobCell(Cell):
    """A job as a cell of a table.

    Args:
        job: part, what it is about, seed.
        setting: sizes.
    """

    job: Job = ()
    setting: Setting = field(default_factory=Setting)

    @property
    def command(self) -> str:
        """What to type for this job alone."""
        full = ["--full"] if self.setting == FULL else []
        words = ["--columns", self.column, "--rows", self.row, "--first-seed", str(self.seed), "--seeds", "1"]
        return shlex.join(["python", "tools/run_table.py", "tools/tables/fedbary.yaml", *full, *words])


def cells(full: bool, seeds: Sequence[int], setting: Setting | None = None) -> list[JobCell]:
    """The cells of all parts; ``setting`` are other sizes than the preset's."""
    setting = setting or (FULL if full else Setting())
    return [
        JobCell(
            row=", ".join(map(str, job[1:-1])),
            column=part,
            seed=job[-1],
            files=("../tools/fedbary_common.py", f"../tools/fedbary_{part}.py"),
            measure="fedbary_jobs:measured",
            job=job,
            setting=setting,
        )
        for part in PARTS
        for job in PARTS[part].jobs(setting, seeds)
    ]


def measured(cell: JobCell, root: str) -> Measured:
    """A job's ``result``, and the processor's seconds that it took."""
    be_quiet()
    start = time.process_time()
    result = PARTS[cell.column].run(cell.job, cell.setting, root)
    return {"result": result, "seconds": time.process_time() - start}


def results_of(found: Results, cells: Sequence[JobCell], part: str) -> tuple[dict[Job, Any], float]:
    """A part's results by job, and their seconds."""
    there = [(cell, found[cell.key]) for cell in cells if cell.column == part and cell.key in found]
    return {cell.job: each["result"] for cell, each in there}, sum(each["seconds"] for _, each in there)


def counted(cell: JobCell, short: Mapping[str, Any], root: str) -> Measured:
    """A job at small sizes: what it measured, and how many seconds a GPU would take for torch's part at the cell's own.

    A part says in ``work`` how the sizes enter. The transport programmes are solved on the CPU on any machine, and are
    left out, as are the coalition games of figure 4, which other threads play.
    """
    few, count, part = replace(cell, setting=SHORT), Operators(), PARTS[cell.column]
    with count:
        result = measured(few, root)
    factor = part.work(cell.job, cell.setting) / part.work(cell.job, SHORT)
    return {"result": result, "gpu_seconds": gpu_seconds(count.operators, count.flops, factor, trains(cell.job))}


def trains(job: Job) -> bool:
    """Whether a job is made of federations: then larger sizes are more operators, else they are larger ones."""
    return job[0] == "contributions" or job[1] in ("filter", *fedbary_time.COMPETITORS)


def gpu_seconds(operators: int, flops: int, factor: float, training: bool) -> float:
    """The longer of launching and computing, for ``factor`` times the work.

    Without training the work is the cube of the samples, of which torch does the square: matrices of distances.
    """
    if training:
        return factor * max(operators * SECONDS_PER_OPERATOR, flops / FLOPS_PER_SECOND)
    return max(operators * SECONDS_PER_OPERATOR, flops * factor ** (2 / 3) / FLOPS_PER_SECOND)
