"""Parsers of flsv's own commands, and checks of their arguments. The module imports little, so that errors are shown at
once and not after PyTorch is imported, which takes seconds."""

from __future__ import annotations

import argparse
import ast
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import get_args

from flsv.cli.command import command_parser
from flsv.results.budget import Budget
from flsv.results.files import find_config_of, find_contributions
from flsv.utilities.choices import Judges, Negatives, Participation, Which
from flsv.utilities.errors import ConfigurationError

#: Federations of ``flsv bench --quick``: few clients, no download, one for each kind of difference between clients.
QUICK = ("digits_sizes", "digits_dirichlet", "digits_label_noise", "digits_free_riders")


def report_parser() -> ArgumentParser:
    """Return the parser of ``flsv report``."""
    parser = _parser("report")
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder, also of a killed run")
    parser.add_argument("--client", help="number or name of a client, for the page that this client may see")
    parser.add_argument("--out", type=Path, help="the file, .html; by default report.html in the run's folder")
    terms = parser.add_argument_group("shares of a budget")
    terms.add_argument("--budget", type=float, help="amount to share out, such as 10000")
    terms.add_argument(
        "--by",
        metavar="METRIC",
        help="values to share out by: a metric of the run, or retrained. Default: retrained after "
        "flsv retrain, else the "
        "run's only metric that is suitable for payment",
    )
    terms.add_argument(
        "--rule",
        choices=get_args(Negatives),
        help="how values below 0 are paid. zero (default): they get nothing. shift: all values are counted from the "
        "lowest. softmax: everybody gets something. refuse: an error",
    )
    terms.add_argument(
        "--currency", help="currency of the budget, such as EUR; it determines the decimals of the amounts"
    )
    terms.add_argument(
        "--judged-by-partners",
        action="store_true",
        help="accept values for which the partners judged models themselves; a partner that lies takes others' shares",
    )
    return parser


def budget_of(parser: ArgumentParser, options: argparse.Namespace) -> Budget | None:
    """Return the budget in the options of ``flsv report``; None without ``--budget``. End the command with an error if
    only options of a budget are given, such as ``--rule``."""
    names = ("by", "rule", "currency", "judged_by_partners")
    given = {name: value for name in names if (value := getattr(options, name))}
    if given and options.budget is None:
        parser.error(f"--{' and --'.join(given).replace('_', '-')}: name the budget, too: --budget 10000")
    return None if options.budget is None else Budget(options.budget, **given)


def retrain_parser() -> ArgumentParser:
    """Return the parser of ``flsv retrain``."""
    parser = _parser("retrain", "Further arguments are those of flsv fit and override the run's configuration.")
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument(
        "--trainings",
        dest="which",
        choices=get_args(Which),
        default="both",
        metavar="WHICH",
        help=f"coalitions to train: {', '.join(get_args(Which))}; default: both; singles and leave-one-out only rank",
    )
    performances = "accuracy, balanced_accuracy, negative_loss, auroc, average_precision, f1"
    parser.add_argument(
        "--metric",
        help=f"score of a model: {performances}, or a value that the module logs; default: as in the run's metrics",
    )
    parser.add_argument("--mode", choices=("min", "max"), help="whether less or more of a logged value is better")
    parser.add_argument(
        "--judges",
        choices=get_args(Judges),
        help="whose samples models are scored on: the server's, or those that all clients hold out; "
        "default: as in the run",
    )
    parser.add_argument("--rounds", type=from_1, help="rounds of each training; default: as in the run")
    parser.add_argument("--seeds", type=from_1, help="trainings of each coalition, each with another seed; default: 3")
    parser.add_argument(
        "--participation",
        choices=get_args(Participation),
        default="drawn",
        help="with a sampler: each coalition draws its own cohorts as the run does (default), or all its members train",
    )
    without = "clients to leave out: saves the module of the same run of the others as without_NAME.ckpt; no values"
    parser.add_argument("--without", nargs="+", metavar="NAME", help=without)
    jobs = "fits that run at once, each in a process of its own; default: as many as cores, on an accelerator 1"
    parser.add_argument("--jobs", type=from_1, help=jobs)
    backend = "backend of joblib whose workers train, such as dask; default: processes of this machine"
    parser.add_argument("--backend", metavar="NAME", help=backend)
    return parser


def repeat_parser() -> ArgumentParser:
    """Return the parser of ``flsv repeat``."""
    parser = _parser("repeat", "Further arguments are those of flsv fit: --config quickstart --trainer.max_epochs 5")
    parser.add_argument("runs", metavar="N", type=int, help="number of runs; comes before all other arguments")
    parser.add_argument("--out", type=Path, default=Path("runs/repeat"), help="folder of the runs and the summary")
    parser.add_argument(
        "--first-seed", type=int, default=0, help="seed of the first run; the next runs have the next seeds"
    )
    return parser


def bench_parser() -> ArgumentParser:
    """Return the parser of ``flsv bench``."""
    out = Path("runs/benchmark")
    parser = _parser("bench")
    parser.add_argument(
        "--metric",
        action="append",
        help="a name of `flsv bench --list`, or the path of a class, perhaps with arguments: "
        "'my_package.MyMetric(momentum=0.5)'; give several. Default: all of --list",
    )
    parser.add_argument(
        "--federations",
        nargs="+",
        help="names of `flsv bench --list`, sets (tuning, held_out, fresh), or YAML files. Default: all",
    )
    parser.add_argument("--out", type=Path, default=out, help=f"folder of values and tables. Default: {out}")
    parser.add_argument("--root", help="folder of the data. Default: $FLSV_DATA_ROOT")
    parser.add_argument("--list", action="store_true", help="list the metrics and federations")
    parser.add_argument("--seeds", type=from_1, help="number of runs of every federation. Default: 3")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"one run of each of {', '.join(QUICK)}, unless --federations or --seeds are given; without costs",
    )
    parser.add_argument("--truth-seeds", type=from_1, help="number of trainings of every coalition")
    return parser


#: ``{command: function that returns its parser}``.
PARSERS: Mapping[str, Callable[[], ArgumentParser]] = {
    "report": report_parser,
    "retrain": retrain_parser,
    "repeat": repeat_parser,
    "bench": bench_parser,
}
#: Commands that do not take arguments of ``flsv fit``.
_ALONE = ("report", "bench")


def check_arguments(command: str, args: Sequence[str]) -> None:
    """Check the options of one of flsv's own commands, and whether the run's folder and the budget that they name can
    be used.

    Args:
        command: the command; arguments of commands that are not in :data:`PARSERS` are not checked.
        args: its arguments.

    Raises:
        ConfigurationError: there is no run in the folder, or the budget is wrong.
        SystemExit: an option is wrong, or help is asked for.
    """
    if command not in PARSERS:
        return
    parser = PARSERS[command]()
    options = parser.parse_args(args) if command in _ALONE else parser.parse_known_args(args)[0]
    if command == "report":
        budget_of(parser, options)
        find_contributions(options.run)
    if command == "retrain":
        find_config_of(options.run)
    if command == "repeat":
        check_runs(options.runs)


def check_runs(runs: int) -> None:
    """Raise ConfigurationError unless ``flsv repeat`` is asked for 2 or more runs."""
    if runs < 2:
        raise ConfigurationError(f"flsv repeat {runs}: expected 2 or more runs.")


def from_1(text: str) -> int:
    """Parse a whole number from 1 on; raise ValueError or ``ArgumentTypeError`` for any other text."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 1")
    return int(text)


def _parser(command: str, further: str | None = None) -> ArgumentParser:
    """Return a parser without options for a command. In its help, the docstring of the command's module comes before
    the options, and the text ``further`` after them."""
    source = Path(__file__).with_name(f"{command}.py").read_text(encoding="utf-8")
    return command_parser(f"flsv {command}", ast.get_docstring(ast.parse(source)), further)
