"""The command line of a table: presets, seeds, kept cells; what a full preset would cost on a GPU.

    python tools/run_table.py tools/tables/NAME.yaml
                            the preset for two cores, in half an hour; --all: what it leaves out
    torchrun --nproc_per_node 2 tools/run_table.py tools/tables/NAME.yaml --workers 1
                            the cells shared out to ranks, on one machine or several
    ... --full              the paper's own setting, for a GPU
    ... --full --short      every cell of it for one round and one seed on few images, on the CPU, and an estimate of
                            the hours that the whole takes on a GPU

The estimate: a short run counts, while it trains, torch's operators and the floating-point operations of those that
multiply matrices or convolve. Operators are multiplied by the rounds and by the batches of the local epochs over all
the clients' data, full against short; floating-point operations by the rounds and by the samples (a short run's batches
are not full); operators of coalition games, which are played once a round, by the rounds only. A cell then takes the
longer of two times: 10 microseconds an operator (small networks wait for kernels to be launched), or 20 TFLOP/s. That
is arithmetic and no measurement: whatever else is done once a round is multiplied by the batches too, the reading of
data is left out, and so is all that a GPU does better with many models at once.

What a short run counted is kept beside the table's cells, in ``NAME.short.jsonl``: a killed one goes on.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from common import be_quiet
from table_cells import Kept, Results, finish
from table_runs import WATCHING, Cell, Measured, built, federated_loop, measure
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from flsv.data import FederatedDataModule
from flsv.engines.ranks import ranks_of_environment
from flsv.games import ModelEvaluator
from flsv.participants import ALONE

SECONDS_PER_OPERATOR = 1e-5
FLOPS_PER_SECOND = 2e13
ON_CPU = {"trainer.accelerator": "cpu", "trainer.precision": "32-true"}


@dataclass(frozen=True)
class Preset:
    """What a table's command line needs to know.

    Args:
        name: of the table; its cells are kept in ``runs/tables/NAME.jsonl``.
        cells: from ``full`` and the seeds to the cells.
        report: from the results and the cells to Markdown.
        short: what ``--short`` overrides, beside one round and one seed; or a function of the cell that says it.
        seeds: how many there are by default.
        asked: columns, or beginnings of their names, that run if they are asked for: all fit into half an hour without.
        first_seed: the seeds are this one and those after it.
        alone: columns whose cells run after all others, one at a time: they measure time.
        counted: how a short run is counted, see :func:`counted`, which is the default.
    """

    name: str
    cells: Callable[[bool, Sequence[int]], list[Cell]]
    report: Callable[[Results, Sequence[Cell]], str]
    short: Mapping[str, Any] | Callable[[Cell], Mapping[str, Any]]
    seeds: int = 5
    asked: tuple[str, ...] = ()
    first_seed: int = 0
    alone: tuple[str, ...] = ()
    counted: Callable[[Cell, Mapping[str, Any], str], Measured] | None = None


class Operators(TorchDispatchMode):
    """Counts torch's operators on this thread, and the floating-point operations of those that torch has a formula for.

    Attributes:
        in_games: those of the operators with which coalitions were evaluated.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators, self.flops, self.in_games = 0, 0, 0

    @contextmanager
    def with_games(self) -> Iterator[None]:
        """Coalitions' models are counted."""

        original = ModelEvaluator._one_by_one

        def evaluate(*arguments: Any) -> None:
            before = self.operators
            original(*arguments)
            self.in_games += self.operators - before

        with patch.object(ModelEvaluator, "_one_by_one", evaluate):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operators += 1
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


@dataclass(frozen=True)
class Work:
    """What a run trains.

    Args:
        rounds: how many.
        batches: of the local epochs over all clients' training samples, in a round.
        samples: the same in samples.
    """

    rounds: int
    batches: int
    samples: int

    @classmethod
    def of(cls, trainer: L.Trainer, data: FederatedDataModule) -> Work:
        """Of a trainer with a federated loop, and data that are set up."""
        size, epochs = data.batch_size or 32, federated_loop(trainer).local_epochs
        sizes = [int(n) for n in data.num_samples]
        batches = sum(-(-n // size) for n in sizes)
        return cls(int(trainer.max_epochs or 1), epochs * batches, epochs * sum(sizes))


class WhileTraining(L.Callback):
    """Counts from the first round to the last: no data set's reading, and no test."""

    def __init__(self, count: Operators) -> None:
        self.count = count
        self.work: Work | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.work = Work.of(trainer, trainer.datamodule)  # type: ignore[attr-defined]
        self.count.__enter__()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.count.__exit__(None, None, None)


def shortened(cell: Cell, short: Mapping[str, Any]) -> Cell:
    """One round on few images, counted."""
    return replace(cell, overrides={**cell.overrides, **ON_CPU, "trainer.max_epochs": 1, **short})


def counted(cell: Cell, short: Mapping[str, Any], root: str) -> Measured:
    """A cell's short run: what it measured, and the seconds that the whole is estimated to take on a GPU."""
    be_quiet()
    few = shortened(cell, short)
    watch = WhileTraining(Operators())
    WATCHING.append(watch)
    try:
        with watch.count.with_games():
            result = measure(few, root)
    finally:
        WATCHING.clear()
        gc.collect()  # a trainer and its data refer to each other, and are large
    assert watch.work is not None
    count, seconds = watch.count, gpu_seconds(watch.count, watch.work, work_of(cell, root))
    counts = {"operators": count.operators, "in_games": count.in_games, "flops": count.flops}
    return {"result": result, **counts, "gpu_seconds": seconds}


def gpu_seconds(count: Operators, short: Work, whole: Work) -> float:
    """The longer of launching and computing, for the whole in the place of the short run."""
    training = (count.operators - count.in_games) * whole.batches / short.batches
    launching = (training + count.in_games) * SECONDS_PER_OPERATOR
    computing = count.flops / FLOPS_PER_SECOND * whole.samples / short.samples
    return max(launching, computing) * whole.rounds / short.rounds


def work_of(cell: Cell, root: str) -> Work:
    """What a cell trains."""
    with built(cell, root, **ON_CPU) as cli:
        cli.datamodule.setup("fit")
        return Work.of(cli.trainer, cli.datamodule)


def main(preset: Preset, description: str | None, arguments: Sequence[str] | None = None) -> None:
    """Parse, run what is not kept, and print the report."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=os.environ.get("FLSV_DATA_ROOT", "data"), help="folder of the data sets")
    parser.add_argument("--full", action="store_true", help="the paper's own setting, for a GPU")
    parser.add_argument("--short", action="store_true", help="one round, one seed, few images; with --full an estimate")
    parser.add_argument("--list", action="store_true", help="print every cell's command and end")
    parser.add_argument("--seeds", type=int, default=preset.seeds, help="how many")
    parser.add_argument("--first-seed", type=int, default=preset.first_seed)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--columns", nargs="+", help="columns of these names, or whose names begin so: asked for")
    parser.add_argument("--rows", nargs="+", help="only these rows")
    parser.add_argument("--all", action="store_true", help="those columns, too, that do not fit into half an hour")
    parser.add_argument("--kept", type=Path, default=Path(f"runs/tables/{preset.name}.jsonl"), help="finished cells")
    parser.add_argument("--any-version", action="store_true", help="cells kept by other versions of the sources count")
    parser.add_argument("--finished", action="store_true", help="report the finished cells, and run nothing")
    parser.add_argument("--out", type=Path, help="write the report there, too")
    options = parser.parse_args(arguments)
    ranks = ranks_of_environment()
    if ranks.rank and (options.list or options.short or options.finished):
        return
    seeds = range(options.first_seed, options.first_seed + (1 if options.short else options.seeds))
    cells = preset.cells(options.full, seeds)
    cells = [cell for cell in cells if not options.rows or cell.row in options.rows]
    if options.columns:
        cells = [cell for cell in cells if cell.column in _columns(cells, options.columns)]
    left_out: list[str] = []
    if not (options.columns or options.all or options.full or options.finished or options.list):
        left_out = list(dict.fromkeys(cell.column for cell in cells if cell.column.startswith(preset.asked)))
        cells = [cell for cell in cells if cell.column not in left_out]
    asking = f"Left out, until --columns names them or --all is said: {'; '.join(left_out)}." if left_out else ""
    if not cells:
        parser.error(f"no cell has these rows and columns. {asking}".strip())
    if options.list:
        print("\n".join(f"# {cell.column}, {cell.row}\n{cell.command}" for cell in cells))
        return
    start, kept = time.perf_counter(), Kept(options.kept, options.any_version, options.root)
    if options.short:
        text = _short(cells, preset, options)
    elif options.finished:
        found = {cell.key: result for cell in cells if (result := kept.find(cell)) is not None}
        text = f"{preset.report(found, cells)}\n\n{len(found)} of {len(cells)} cells are finished."
    else:
        shared = [cell for cell in cells if cell.column not in preset.alone]
        alone = [cell for cell in cells if cell.column in preset.alone]
        found = finish(shared, kept, options.root, options.workers, ranks) if shared else {}
        if ranks.rank:
            return
        found |= finish(alone, kept, options.root, workers=1, ranks=ALONE) if alone else {}
        text, workers = preset.report(found, cells), options.workers * ranks.size if shared else 1
        text += f"\n\n{time.perf_counter() - start:.0f} s with {workers} workers, torch {torch.__version__}."
    text += f"\n\n{asking}" if asking else ""
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


def _columns(cells: Sequence[Cell], names: Sequence[str]) -> set[str]:
    """The columns of a name; where there is none, those whose names begin with it."""
    there = {cell.column for cell in cells}
    return {c for name in names for c in there if c == name or (name not in there and c.startswith(name))}


def _short(cells: Sequence[Cell], preset: Preset, options: argparse.Namespace) -> str:
    """Every cell for a round, if it is not kept; the report of what came of it, and the estimate for all seeds."""
    kept, found, start = (
        Kept(options.kept.with_suffix(".short.jsonl"), options.any_version, options.root),
        {},
        time.process_time(),
    )
    for done, cell in enumerate(cells, 1):
        short = preset.short(cell) if callable(preset.short) else preset.short
        named = replace(cell, overrides={**cell.overrides, "short": dict(short)})  # the estimate is of both
        if (counts := kept.find(named)) is None:
            counts = (preset.counted or counted)(cell, short, options.root)
            kept.keep(named, counts)
        found[cell.key] = counts
        print(f"{done}/{len(cells)} {cell.column}, {cell.row}", flush=True)
    spent = (time.process_time() - start) / 60
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # kilobytes on Linux
    text = preset.report({key: each["result"] for key, each in found.items()}, cells)
    hours = options.seeds * sum(each["gpu_seconds"] for each in found.values()) / 3600
    rates = f"{1e6 * SECONDS_PER_OPERATOR:.0f} microseconds an operator or {FLOPS_PER_SECOND / 1e12:.0f} TFLOP/s"
    return (
        f"{text}\n\nOne round of each of {len(cells)} cells. All rounds and {options.seeds} seeds: about {hours:.1f} "
        f"hours on one GPU, at {rates}, whichever is longer; estimated by counting, not measured. What was not kept "
        f"took {spent:.1f} minutes of CPU time, and this process at most {most:.1f} GiB of memory."
    )
