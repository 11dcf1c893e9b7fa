"""flsv repeat: the same federation with several seeds, and each client's mean
contribution.

    flsv repeat 5 --config quickstart
    flsv repeat 5 --config digits --out runs/digits

Contributions vary with the seed of a run. This command runs the federation N
times, on the same clients with the same data, and writes repeat.csv: for every
metric and client the mean over the runs, the standard deviation, and an
interval of the mean. All runs train the coalitions that the first one has
chosen, so that their values are comparable. Averaging over runs that differ at random is the idea of
FedRandom (arXiv 2602.05693). flsv report of the folder of these runs shows the
means. Finished runs are kept: start a stopped command again to continue.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pandas import DataFrame

from flsv.cli.command import (
    QUIET_FIT_ARGUMENTS,
    command_parser,
    display_path,
    printer,
)
from flsv.cli.parser import make_cli
from flsv.cli.runs_with_seeds import runs_with_seeds, saved_summary
from flsv.configuration.identity import Identity
from flsv.results.basis import preferred_basis, seed_summary
from flsv.results.reading import Run, open_run
from flsv.results.terminal import print_lines, print_table, share_column
from flsv.results.text import format_numbers, with_intervals
from flsv.utilities.atomic_files import FolderLock
from flsv.utilities.errors import ConfigurationError


def repeat(
    runs: int,
    arguments: Sequence[str],
    out: Path = Path("runs/repeat"),
    *,
    shows_bars: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[DataFrame, Path]:
    """Run a federation with several seeds. Return a table of the clients' mean values, and its file."""
    if runs < 1:
        raise ConfigurationError(f"flsv repeat {runs}: expected 1 or more runs.")
    config, identity = _config_and_identity(arguments)
    repetitions = runs_with_seeds(
        config, identity, range(runs), out, shows_bars=shows_bars, say=say
    )
    if not repetitions[0].metrics:
        raise ConfigurationError(
            "the runs have no metric, so there is nothing to average. Name some in the config."
        )
    return saved_summary(out)


def _config_and_identity(arguments: Sequence[str]) -> tuple[dict[str, Any], Identity]:
    # This seed and those below only complete the configuration: each run gets its own.
    template = make_cli(
        [*arguments, "--seed_everything=0", *QUIET_FIT_ARGUMENTS], run=False, quiet=True
    )
    config = yaml.safe_load(template.parser.dump(template.config, skip_none=False))
    return config, template.identity()


def main(args: Sequence[str], quiet: bool = False) -> None:
    """Run ``flsv repeat`` with the command-line arguments ``args``."""
    further = "Further arguments are those of flsv fit, such as --config quickstart."
    parser = command_parser("flsv repeat", __doc__, further)
    options, fit_arguments = parser.parse_known_args(list(args))
    has_bars = sys.stdout.isatty() and not quiet
    with FolderLock(options.out):
        _summary, path = repeat(
            options.runs,
            fit_arguments,
            options.out,
            shows_bars=has_bars,
            say=printer(quiet),
        )
    if not quiet:
        _show(open_run(options.out))
    print(f"Summary: {display_path(path)}")


def _show(run: Run) -> None:
    """Print a table of means for each metric, the one to pay by first, and the verdict on it."""
    basis = preferred_basis(run)
    assert basis is not None  # a repeat has a metric
    for metric in sorted(run.metrics, key=lambda name: name != basis.key):
        summary = seed_summary(run, [metric])
        estimates = summary.rename(columns={"mean": "value"})
        columns = {
            "mean": with_intervals(estimates),
            "std of runs": format_numbers(summary["std"]),
        }
        if metric == basis.key:
            columns |= share_column(basis)

        title = f"{metric}, mean of {run.seeds} runs"
        if run.seeds == 1:
            title = f"{metric}, one run"
        if not run.metric_info(metric)["to_pay_by"]:
            title += ". Do not base payments on these values"
        print_table(title, run.client_names, columns)
    print_lines(basis.lines)
