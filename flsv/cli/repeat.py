"""flsv repeat: the same federation with several seeds, and each client's mean
contribution.

    flsv repeat 5 --config quickstart
    flsv repeat 5 --config digits --out runs/digits

Contributions vary with the seed of a run. This command runs the federation N
times, on the same clients with the same data, and writes repeat.csv: for every
metric and client the mean over the runs, the standard deviation, and an
interval of the mean. Averaging over runs that differ at random is the idea of
FedRandom (arXiv 2602.05693). flsv report of any of the runs uses these means
to share a budget out. Finished runs are kept: start a stopped command again to
continue.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from pandas import DataFrame

from flsv.cli.command import NO_BARS, command_parser, display_path, printer
from flsv.cli.parser import make_cli
from flsv.cli.saved_run import dealt_once
from flsv.functional.intervals import BRACKETS
from flsv.report import Run, open_run
from flsv.report.reading import COLUMNS, SUMMARY, seed_summary
from flsv.results.folder import RUNS, FolderLock, run_folder
from flsv.results.terminal import print_table
from flsv.results.text import numbers, percent, with_intervals
from flsv.utilities.csv_files import save_table
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.result_file import ResultFile

QUIET = (*NO_BARS, "--federation.reporting.table=false")


def repeat(
    runs: int,
    arguments: Sequence[str],
    out: Path = Path("runs/repeat"),
    *,
    bars: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[DataFrame, Path]:
    """Run a federation with several seeds. Return a table of the clients' mean values, and its file."""
    if runs < 2:
        raise ConfigurationError(f"flsv repeat {runs}: expected 2 or more runs.")
    first = make_cli([*arguments, "--seed_everything=0", *QUIET], run=False, quiet=True)
    kept = ResultFile(out / RUNS, COLUMNS, first.identity().flat())
    with dealt_once(
        yaml.safe_load(first.parser.dump(first.config, skip_none=False)), 0, out
    ) as file:
        made = _runs(range(runs), file, kept, out, bars, say)
    if not made[0].metrics:
        raise ConfigurationError(
            "the runs have no metric, so there is nothing to average. Name some in the config."
        )
    rows = seed_summary(made)
    save_table(out / SUMMARY, rows)
    return rows, out / SUMMARY


def _runs(
    seeds: Sequence[int],
    arguments: Sequence[str],
    kept: ResultFile,
    out: Path,
    bars: bool,
    say: Callable[[str], None],
) -> list[Run]:
    done = {row["run"]: out / row["folder"] for row in kept.rows}
    made: list[Run] = []
    for seed in seeds:
        name = f"seed_{seed}"
        if name in done:
            run = open_run(done[name])
        else:
            say(f"Run {len(made) + 1} of {len(seeds)}: seed {seed}")
            run = _fit(arguments, seed, out / name, bars)
            kept.add([[name, os.path.relpath(run.folder, out)]])
        made.append(run)
        if run.record["hashes"] != made[0].record["hashes"]:
            raise ConfigurationError(
                "the clients do not have the same samples in all runs, so that their values cannot be averaged. A "
                "source that draws samples needs a seed of its own."
            )
    return made


def _fit(arguments: Sequence[str], seed: int, folder: Path, bars: bool) -> Run:
    own = [
        f"--trainer.default_root_dir={folder}",
        f"--seed_everything={seed}",
        f"--federation.seed={seed}",
        *QUIET,
    ]
    own.append(f"--trainer.enable_progress_bar={str(bars).lower()}")
    run = open_run(run_folder(make_cli(["fit", *arguments, *own], quiet=True).trainer))
    if not run.ended:
        raise ConfigurationError(
            f"the run in {folder} was stopped before its last round. Run the same command again."
        )
    return run


def main(args: Sequence[str], quiet: bool = False) -> None:
    """Run ``flsv repeat`` with the command-line arguments ``args``."""
    further = "Further arguments are those of flsv fit: --config quickstart --trainer.max_epochs 5"
    parser = command_parser("flsv repeat", __doc__, further)
    parser.add_argument(
        "runs", metavar="N", type=int, help="number of runs. It comes before all other arguments"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/repeat"), help="folder of the runs and the summary"
    )
    options, rest = parser.parse_known_args(list(args))
    bars, say = sys.stdout.isatty() and not quiet, printer(quiet)
    with FolderLock(options.out):
        rows, path = repeat(options.runs, rest, options.out, bars=bars, say=say)
    if not quiet:
        _show(rows, options.runs)
    print(f"Summary: {display_path(path)}")


def _show(rows: DataFrame, runs: int) -> None:
    """Print a table for each metric, first for metrics that are suitable for payment."""
    for paid in (True, False):
        for metric, mine in rows.groupby("metric", sort=False):
            if mine["share"].notna().any() != paid:
                continue
            ends = (mine[name].tolist() for name in ("mean", "low", "high"))
            columns = {"mean": with_intervals(*ends), "std of runs": numbers(mine["std"].tolist())}
            if paid:
                columns["share"] = mine["share"].map(percent).tolist()
            advice = "" if paid else ". Do not base payments on these values"
            print_table(
                f"{metric}, mean of {runs} runs{advice}", mine["client_name"].tolist(), columns
            )
    print(BRACKETS)
