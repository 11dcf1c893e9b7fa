"""``flsv``: which subcommand, and what becomes of an error.

Nothing here is imported before it is needed: the version and the list of subcommands are there in a moment.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import logging
import os
import sys
import warnings
from typing import Any

from flsv import __version__
from flsv.errors import ConfigurationError

#: Subcommands and what they are for.
OF_LIGHTNING = {
    "fit": "train a federation, and measure what every client contributes",
    "validate": "evaluate a checkpoint on the server's validation set",
    "test": "evaluate a checkpoint on the test set",
    "predict": "predict the test set with a checkpoint, and write the predictions",
}
OWN = {
    "compare": "several algorithms on one partition, and what each client gains",
    "repeat": "the same run with other seeds, and what each client is worth on average",
    "data": "what each client has: samples, classes, columns and gaps, before anything is trained",
    "value": "what clients and their samples are worth, before anything is trained",
    "retrain": "what each client is worth by training without it, after the fact",
    "bench": "which contribution metric to trust: all of them against retrained Shapley values",
    "board": "runs in a browser on this machine, while they train",
    "report": "a run's results as a page to hand out, for all or for one client",
    "pay": "a budget, shared out by what each partner has contributed",
    "stress": "what a client gains that cheats the contribution metrics",
    "audit": "whether a site's audit log is whole: what it was asked, and what it has answered",
    "init": "a project to start from",
    "new": "a metric, aggregator, client algorithm or source of one's own, as a package to start from",
}
#: Old names, for one version.
RENAMED = {"settle": "retrain"}
#: Those that fit dozens of times: what Lightning says of each is of no use.
MANY_FITS = ("retrain", "repeat", "bench", "stress")
QUIET = ("-q", "--quiet")
#: No space left, quota exceeded, file too large, an error of the device, read-only.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def main(args: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: the arguments; by default those of the process.

    Returns:
        The exit status: 0, 2 for a configuration that cannot work, or 1 for a disk that takes no more, or for a metric
        that fails in ``flsv bench``.
    """
    # A console script does not look for modules in the working folder, `python -m flsv` does: class paths of the
    # user's own modules shall work in both.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    given = list(sys.argv[1:] if args is None else args)
    try:
        return _run(given)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            print(f"flsv: error: no file can have this name: {str(error.filename)[:60]!r}, ...", file=sys.stderr)
            return 2
        if error.errno not in DISK_ERRORS:
            raise
        print(
            f"flsv: error: {error}. What was saved before is whole: make room, and go on with --ckpt_path last.",
            file=sys.stderr,
        )
        return 1
    except ValueError as error:
        # An error of a nested object's arguments arrives wrapped in the parser's own.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConfigurationError):
            cause = cause.__cause__
        if cause is None:
            raise
        print(f"flsv: error: {cause}", file=sys.stderr)
        return 2


def _run(given: list[str]) -> int:
    quiet = any(word in QUIET for word in given)
    given = [word for word in given if word not in QUIET]
    first = given[0] if given else "--help"
    if first in RENAMED:
        print(
            f"flsv: `flsv {first}` is now `flsv {RENAMED[first]}`; this version still knows the old name.",
            file=sys.stderr,
        )
        first = RENAMED[first]
    if first == "--version":
        print(f"flsv {__version__}")
    elif first in ("-h", "--help"):
        _parser().print_help()
    elif first in OWN:
        from flsv.cli.parsers import check_arguments

        check_arguments(first, given[1:])  # before anything is imported that takes seconds
        if first in ("compare", "data", "value", *MANY_FITS):
            _quieten(quiet or first in MANY_FITS)  # dozens of fits
        main: Any = importlib.import_module(f"flsv.cli.{first}").main
        return int(main(given[1:], quiet) or 0)
    elif first in OF_LIGHTNING:
        from flsv.cli.command import NO_BARS
        from flsv.cli.configs import SECTIONS
        from flsv.cli.names import check_options
        from flsv.cli.values import check_values

        if any(word in ("-h", "--help") for word in given[1:]):
            from flsv.cli.brief_help import brief_help

            print(brief_help(first, OF_LIGHTNING[first]))
            raise SystemExit(0)
        given = ["--help" if word == "--help=all" else word for word in given]
        check_options(given[1:])  # before anything is imported that takes seconds
        check_values(given[1:], SECTIONS)
        _quieten(quiet)
        from flsv.cli.parser import make_cli

        if quiet:
            of_one = {
                "fit": "--federation.reporting.table=false",
                "validate": "--verbose=false",
                "test": "--verbose=false",
            }
            given += [*NO_BARS, *([of_one[first]] if first in of_one else [])]
        make_cli(given, quiet=quiet)
    elif first.startswith("-"):
        # Such as --config before the subcommand.
        _quieten(quiet)
        from flsv.cli.parser import make_cli

        make_cli(given, quiet=quiet)
    else:
        names = [*OF_LIGHTNING, *OWN]
        near = difflib.get_close_matches(first, names, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigurationError(f"there is no subcommand {first!r}. There are {', '.join(names)}.{hint}")
    return 0


def _parser() -> argparse.ArgumentParser:
    """What ``flsv --help`` shows; every subcommand has a parser of its own."""
    parser = argparse.ArgumentParser(
        "flsv",
        usage="flsv [-h] [--version] SUBCOMMAND [--quiet] ...",
        description="Federated learning in which every participant's contribution is measured.",
        epilog="flsv SUBCOMMAND --help lists a subcommand's options. fit, validate, test and predict are "
        "LightningCLI's, with a section federation beside trainer, model and data.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument(*QUIET, action="store_true", help="no progress, no tables: warnings, errors and files only")
    subcommands = parser.add_subparsers(title="subcommands", metavar="")
    for name, about in {**OF_LIGHTNING, **OWN}.items():
        subcommands.add_parser(name, help=about)
    return parser


def _quieten(quiet: bool) -> None:
    """Leave out what Lightning says to everybody and nobody can act on; when quiet, all that is no warning."""
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")  # given: without --quiet
    warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\)")  # Lightning's use of torch
    warnings.filterwarnings("ignore", message="Couldn't infer the batch indices")  # our samples come in order
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip:" not in record.getMessage()
    )
    if quiet:
        importlib.import_module("lightning.pytorch")  # which sets its level
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.WARNING)
