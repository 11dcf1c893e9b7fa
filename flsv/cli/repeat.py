"""``flsv repeat``: the same run with other seeds, and what each client is worth on average.

    flsv repeat 5 --config quickstart
    flsv repeat 6 --config digits --aggregator FedAvg \\
      --aggregator GeometricMedian --out runs/both

One run's contributions swing with its seed, and with the aggregator. This runs the federation N times, on the same
clients with the same data, and writes repeat.csv: of every metric and client the mean over the runs, their standard
deviation, and an interval of the mean. Averaging over runs that differ at random is FedRandom's idea (arXiv
2602.05693); with several aggregators they are taken in turn, one a run. flsv report of any of the runs shares a
budget out by the means of all. A run that is done is kept: start again what was stopped.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from flsv.cli.command import NO_BARS, command_parser, printer, shown, write_rows
from flsv.cli.parser import make_cli
from flsv.cli.saved_run import dealt_once
from flsv.errors import ConfigurationError
from flsv.kept import Kept
from flsv.metrics.intervals import LEVEL
from flsv.report import Run, open_run
from flsv.report.folder import FolderLock, run_folder
from flsv.report.repeated import COLUMNS, HEADER, RUNS, SUMMARY, summary
from flsv.report.terminal import print_table

QUIET = (*NO_BARS, "--federation.reporting.table=false")


def repeat(
    runs: int,
    arguments: Sequence[str],
    out: Path = Path("runs/repeat"),
    *,
    first_seed: int = 0,
    aggregators: Sequence[str] = (),
    level: float = LEVEL,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[list[dict[str, Any]], Path]:
    """Run a federation several times.

    Args:
        runs: how many times, 2 or more.
        arguments: of ``flsv fit``.
        out: what the runs write goes below, a folder each.
        first_seed: the seeds are this one and those after it.
        aggregators: as ``--federation.aggregator`` takes them, one a run, in turn; none: the configuration's.
        level: of the intervals of the means, by Student's t over the runs.
        say: is told which run begins.

    Returns:
        A row per metric and client, by the names in :data:`HEADER`, and the file that they were written to. ``runs``
        are those in which the client has a value; ``share`` is that of the means above 0.

    Raises:
        ConfigurationError: fewer than 2 runs; a folder with runs of another configuration or other data; runs that do
            not deal out the same data; a run without metrics.
    """
    if runs < 2:
        raise ConfigurationError(f"flsv repeat {runs}: expected 2 or more runs, whose spread is the result.")
    first = make_cli([*arguments, f"--seed_everything={first_seed}", *QUIET], run=False, quiet=True)
    settings = {**first.identity().flat(), "--aggregator": ", ".join(aggregators)}
    kept = Kept(out / RUNS, COLUMNS, settings)
    with dealt_once(yaml.safe_load(first.parser.dump(first.config, skip_none=False)), first_seed) as file:
        made = _runs(runs, file, first_seed, aggregators, kept, out, say)
    if not made[0].metrics:
        raise ConfigurationError("the runs have no metric, so there is nothing to average. Name some in the config.")
    rows = summary(made, level)
    path = out / SUMMARY
    write_rows(path, HEADER, rows)
    return rows, path


def _runs(
    runs: int,
    arguments: Sequence[str],
    first_seed: int,
    aggregators: Sequence[str],
    kept: Kept,
    out: Path,
    say: Callable[[str], None],
) -> list[Run]:
    done = {row["run"]: out / row["folder"] for row in kept.rows}
    made: list[Run] = []
    for index in range(runs):
        seed = first_seed + index
        aggregator = aggregators[index % len(aggregators)] if aggregators else None
        name = f"seed_{seed}" if aggregator is None else f"seed_{seed}_{index % len(aggregators)}"
        if name in done:
            run = open_run(done[name])
        else:
            say(f"Run {index + 1} of {runs}: seed {seed}" + (f", {aggregator}" if aggregator else ""))
            run = _fit(arguments, seed, aggregator, out / name)
            kept.add([[name, os.path.relpath(run.folder, out)]])
        made.append(run)
        if run.record["hashes"] != made[0].record["hashes"]:
            raise ConfigurationError(
                "the runs do not deal out the same samples to the clients, so their values are not of the same clients."
                " A source that draws samples needs a seed of its own."
            )
    return made


def _fit(arguments: Sequence[str], seed: int, aggregator: str | None, folder: Path) -> Run:
    own = [f"--trainer.default_root_dir={folder}", f"--seed_everything={seed}", f"--federation.seed={seed}", *QUIET]
    own += [] if aggregator is None else [f"--federation.aggregator={aggregator}"]
    run = open_run(run_folder(make_cli(["fit", *arguments, *own], quiet=True).trainer))
    if not run.ended:
        raise ConfigurationError(f"the run in {folder} was stopped before its last round. Start the same again.")
    return run


def _parser() -> ArgumentParser:
    further = "Further arguments are those of flsv fit: --config quickstart --trainer.max_epochs 5"
    parser = command_parser("flsv repeat", __doc__, further)
    parser.add_argument("runs", metavar="N", type=int, help="how many runs; before all other arguments")
    parser.add_argument("--out", type=Path, default=Path("runs/repeat"), help="folder of the runs and the summary")
    parser.add_argument("--first-seed", type=int, default=0, help="the seeds are this one and those after it")
    parser.add_argument("--aggregator", action="append", default=[], help="give several: they take turns, one a run")
    return parser


def main(args: Sequence[str], quiet: bool = False) -> None:
    """The command line, without ``repeat`` itself."""
    options, rest = _parser().parse_known_args(list(args))
    with FolderLock(options.out):
        seeds = {"first_seed": options.first_seed, "aggregators": options.aggregator}
        rows, path = repeat(options.runs, rest, options.out, **seeds, say=printer(quiet))
    if quiet:
        return
    for metric in dict.fromkeys(row["metric"] for row in rows):
        mine = [row for row in rows if row["metric"] == metric]
        columns = {
            "mean": [f"{row['mean']:.4g}" for row in mine],
            "90 % interval": [f"{row['low']:.4g} to {row['high']:.4g}" for row in mine],
            "std of runs": [f"{row['std']:.3g}" for row in mine],
            "share": [f"{100 * row['share']:.1f} %" for row in mine],
        }
        print_table(f"{metric}, {options.runs} runs", [row["client_name"] for row in mine], columns)
    print(f"Summary: {shown(path)}")
