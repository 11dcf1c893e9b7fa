"""``flsv``: which subcommand, and what becomes of an error."""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings

from flsv.cli.bench import main as bench
from flsv.cli.compare import main as compare
from flsv.cli.init import main as init
from flsv.cli.parser import make_cli
from flsv.cli.value import main as value
from flsv.errors import ConfigurationError

#: No space left, quota exceeded, file too large, an error of the device, read-only.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def main(args: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: the arguments; by default those of the process.

    Returns:
        The exit status: 0, 2 for a configuration that cannot work, or 1 for a disk that takes no more.
    """
    # A console script does not look for modules in the working folder, `python -m flsv` does: class paths of the
    # user's own modules shall work in both.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    _quieten()
    given = sys.argv[1:] if args is None else args
    try:
        if given[:1] == ["compare"]:
            compare(given[1:])
        elif given[:1] == ["value"]:
            value(given[1:])
        elif given[:1] == ["bench"]:
            bench(given[1:])
        elif given[:1] == ["init"]:
            init(given[1:])
        else:
            make_cli(args)
    except OSError as error:
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
    return 0


def _quieten() -> None:
    """Leave out what Lightning says to everybody and nobody can act on."""
    warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\)")  # Lightning's use of torch
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip:" not in record.getMessage()
    )
