"""Entry point of ``flsv``: chooses the subcommand, and prints errors."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

from flsv.__about__ import code_version
from flsv.cli.command import (
    FLSV_COMMANDS,
    NO_BARS,
    QUIET_FIT_ARGUMENTS,
    CommandParser,
    ignore_closed_pipe,
)
from flsv.cli.config_errors import OptionError, explain, naming_options, origin_of
from flsv.cli.configs import check_file, config_files
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.one_lightning import import_as_lightning
from flsv.utilities.stop_signals import terminable

#: ``{subcommand: description}``.
LIGHTNING_COMMANDS = {
    "fit": "train a federation, and measure what every client contributes",
    "validate": "evaluate a checkpoint on the server's validation set",
    "test": "evaluate a checkpoint on the test set",
    "predict": "predict the test set with a checkpoint, and write the predictions",
}
#: Subcommands that fit many times. They hide Lightning's messages, and skip finished work when started again.
COMMANDS_OF_MANY_FITS = ("retrain", "repeat")
QUIET_OPTIONS = ("-q", "--quiet")
#: Arguments that ``--quiet`` stands for in LightningCLI's subcommands.
QUIET_ARGUMENTS = {
    "fit": QUIET_FIT_ARGUMENTS,
    "validate": (*NO_BARS, "--verbose=false"),
    "test": (*NO_BARS, "--verbose=false"),
    "predict": NO_BARS,
}
#: Warnings that users cannot act on.
HIDDEN_WARNINGS = (
    "LightningCLI's args parameter",  # given: without --quiet
    ".*isinstance\\(treespec, LeafSpec\\)",  # Lightning's use of torch
    "Couldn't infer the batch indices",  # our samples come in order
)
#: No space left, quota exceeded, file too large, input/output error, read-only file system.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def main(args: list[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    words = list(sys.argv[1:] if args is None else args)
    is_resumable = bool(words) and words[0] in COMMANDS_OF_MANY_FITS
    return exit_status(_run, words, is_resumable=is_resumable)


def exit_status(run: Callable[[list[str]], int], words: list[str], is_resumable: bool) -> int:
    """Run a program with the words of its command line, print its error, and return the exit status.

    It is 2 for a configuration that cannot work, 130 after Ctrl-C, 143 after SIGTERM.
    """
    _import_from_working_folder()
    try:
        with ignore_closed_pipe(), terminable():
            return run(words)
    except (KeyboardInterrupt, SystemExit) as stopped:
        if isinstance(stopped, SystemExit) and stopped.code != 128 + signal.SIGTERM:
            raise
        return _status_of_stopped(stopped, is_resumable)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        _print_disk_error(error)
        return 1
    except ValueError as error:
        cause = _configuration_error(error)
        if cause is None:
            raise
        message = naming_options(str(cause), words)
        print(f"flsv: error: {_origin(cause, words)}{message}", file=sys.stderr)
        return 2


def _import_from_working_folder() -> None:
    # `python -m flsv` imports modules from the working folder, and a console script does not. The class paths of the
    # user's own modules must work with both.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _status_of_stopped(stopped: BaseException, is_resumable: bool) -> int:
    """Print that the program was stopped, and return its exit status."""
    advice = ""
    if is_resumable:
        advice = ". Finished work is kept: run the same command again to continue."
    print(f"flsv: stopped{advice}", file=sys.stderr)
    if type(stopped) is KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 128 + signal.SIGTERM


def _print_disk_error(error: OSError) -> None:
    print(
        f"flsv: error: {error}. Files that were saved before are complete. Free some space, and run the same "
        "command again.",
        file=sys.stderr,
    )


def _origin(error: ConfigurationError, words: list[str]) -> str:
    names_its_line = re.match(r"\S+, line \d", str(error))  # as in "data.csv, line 3"
    if names_its_line:
        return ""
    try:
        files = config_files(words)
    except ConfigurationError:  # the error is about a file that does not exist
        return ""
    return origin_of(str(error), files, words)


def _configuration_error(error: BaseException | None) -> ConfigurationError | None:
    while error is not None and not isinstance(error, ConfigurationError):
        error = error.__cause__
    return error


def _run(words: list[str]) -> int:
    quiet = any(word in QUIET_OPTIONS for word in words)
    arguments = [word for word in words if word not in QUIET_OPTIONS]
    command = arguments[0] if arguments else "--help"
    if not command.startswith("-") or command in ("-h", "--help", "--version"):
        # The parser exits if the command is --help, --version, or unknown.
        _parser().parse_args([command])

    if command in FLSV_COMMANDS and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigurationError(f"flsv {command} runs in one process. Start it without torchrun.")
    if _needs_pytorch(command):
        if "pytorch_lightning" not in sys.modules:
            import_as_lightning()  # a configuration may name classes of packages that import it
        for path in config_files(arguments):
            check_file(path)
        if not quiet:
            _print_loading(command)
    try:
        if command in FLSV_COMMANDS:
            return _run_flsv_command(command, arguments[1:], quiet)
        return _run_lightning_command(arguments, command, quiet)
    except OptionError as error:
        raise ConfigurationError(explain(error, config_files(arguments), arguments)) from None


def _print_loading(command: str) -> None:
    is_first_rank = int(os.environ.get("RANK", 0)) == 0
    if is_first_rank:
        print(f"flsv {command}: loading PyTorch", file=sys.stderr, flush=True)


def _needs_pytorch(command: str) -> bool:
    """Return whether a subcommand imports PyTorch before it reads its arguments."""
    described = FLSV_COMMANDS.get(command, {})
    return bool(described.get("needs_pytorch", True))


def _run_flsv_command(command: str, args: list[str], quiet: bool) -> int:
    if _needs_pytorch(command):
        hide_messages(quiet or command in COMMANDS_OF_MANY_FITS)
    module = FLSV_COMMANDS[command].get("module", f"flsv.cli.{command}")
    main: Any = importlib.import_module(module).main
    return int(main(args, quiet) or 0)


def _run_lightning_command(args: list[str], command: str, quiet: bool) -> int:
    from flsv.cli.parser import make_cli  # here, since it imports torch

    hide_messages(quiet)
    arguments = list(args)
    if quiet:
        arguments += QUIET_ARGUMENTS.get(command, ())
    cli = make_cli(arguments, quiet=quiet)  # a LightningCLI runs its command when it is made
    if quiet and command == "fit":
        cli.print_where_results_are(max_lines=1)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        "flsv",
        usage="flsv [-h] [--version] SUBCOMMAND [--quiet] ...",
        description="Federated learning in which every participant's contribution is measured.",
        epilog="flsv SUBCOMMAND --help lists a subcommand's options. fit, validate, test and predict are "
        "LightningCLI's, with a section federation beside trainer, model and data.",
    )
    parser.add_argument(
        "--version", action="version", version=f"flsv {code_version()}", help="print the version"
    )
    parser.add_argument(
        *QUIET_OPTIONS,
        action="store_true",
        help="no progress, no tables: warnings, errors and files only",
    )
    subcommands = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND")
    helps = {name: described["help"] for name, described in FLSV_COMMANDS.items()}
    for name, description in {**LIGHTNING_COMMANDS, **helps}.items():
        subcommands.add_parser(name, help=description)
    return parser


def hide_messages(quiet: bool) -> None:
    """Hide messages of Lightning that users cannot act on, or with ``quiet`` all except warnings."""
    importlib.import_module("lightning.pytorch")  # the import sets the loggers' levels
    log_level = logging.WARNING if quiet else logging.INFO
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(log_level)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_no_tip)
    for message in HIDDEN_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    warnings.formatwarning = _format_warning


def _format_warning(
    message: Any, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any
) -> str:
    """Format a warning as one line, without its place in the code if it is a UserWarning."""
    origin = "warning"
    if category is not UserWarning:
        origin = f"{filename}:{lineno}: {category.__name__}"
    return f"{origin}: {message}\n"


def _no_tip(record: logging.LogRecord) -> bool:
    return "Tip:" not in record.getMessage()
