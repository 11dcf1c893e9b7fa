"""Functions for parsers and output that all commands use."""
# The module imports little, so that commands start fast.

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn, get_args

import yaml

from flsv.utilities.display import display_path as display_path
from flsv.utilities.errors import nearest
from flsv.utilities.wings import brought

#: Arguments of ``flsv fit`` that hide progress bars and the model's summary.
NO_BARS = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")

#: Arguments of a fit without bars and the closing table.
QUIET_FIT_ARGUMENTS = (*NO_BARS, "--federation.reporting.table=false")


class DiscardableOutput(io.FileIO):
    """Standard output that is discarded once its reader, such as ``head``, has closed the pipe."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            null_device = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_device, self.fileno())
            os.close(null_device)
            return len(data)


@contextmanager
def ignore_closed_pipe() -> Iterator[None]:
    """Let a command continue within this context after the reader of its output has closed the pipe."""
    if sys.stdout is not sys.__stdout__:  # it was replaced, as by a notebook
        yield
        return
    usual_output: Any = sys.stdout
    # This object writes to the same file, and raises no error after the pipe is closed.
    output_file = DiscardableOutput(usual_output.fileno(), "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(output_file),
        encoding=usual_output.encoding,
        errors=usual_output.errors,
        line_buffering=usual_output.line_buffering,
    )
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = usual_output


class CommandParser(argparse.ArgumentParser):
    """Parser that accepts each option only once, and writes errors in one line with the nearest choice."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        options = [word.partition("=")[0] for word in words]
        for option, action in self._option_string_actions.items():
            # Otherwise all values but the last would be ignored.
            if isinstance(action, argparse._StoreAction) and options.count(option) > 1:
                self.error(f"{option} is given {options.count(option)} times. Give it once")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        invalid_choice = re.search(
            r"invalid choice: '?(?P<word>[^' ]+)'? \(choose from (?P<choices>.+)\)", message
        )
        unrecognized = re.search(r"unrecognized arguments: (?P<word>[^ =]+)", message)
        hint = ""
        if invalid_choice is not None:
            choices = re.findall(r"[\w+-]+", invalid_choice["choices"])
            hint = nearest(invalid_choice["word"], choices)
        elif unrecognized is not None:
            hint = nearest(unrecognized["word"], self._option_string_actions)
        self.exit(2, f"{self.prog}: error: {message}.{hint}\n")


_OWN_COMMANDS = yaml.safe_load(Path(__file__).with_name("commands.yaml").read_text("utf-8"))
#: flsv's own subcommands, of this package and of wings, by name: ``help``, ``module``, ``options``, ``needs_pytorch``.
FLSV_COMMANDS: Mapping[str, Mapping[str, Any]] = {**_OWN_COMMANDS, **brought("commands")}

#: The types of options by their names in ``commands.yaml``.
TYPES: Mapping[str, Callable[[str], Any]] = {
    "path": Path,
    "int": int,
    "float": float,
}


def command_parser(
    prog: str, description: str | None, epilog: str | None = None
) -> argparse.ArgumentParser:
    """Return a parser with the options of one of :data:`FLSV_COMMANDS`, if it is one.

    It prints its description unchanged and accepts no abbreviated options.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = CommandParser(
        prog, description=description, epilog=epilog, formatter_class=raw, allow_abbrev=False
    )
    command = FLSV_COMMANDS.get(prog.removeprefix("flsv "), {})
    for name, description_of_option in command.get("options", {}).items():
        arguments = dict(description_of_option)
        if "type" in arguments:
            arguments["type"] = TYPES[arguments["type"]]
        choices = arguments.get("choices")
        if isinstance(choices, str):  # the path of a Literal that has them
            arguments["choices"] = get_args(resolve_name(choices))
        parser.add_argument(name, **arguments)
    return parser


def printer(quiet: bool) -> Callable[[str], None]:
    """Return a function that prints a text at once, or with ``quiet`` does nothing."""
    if quiet:
        return lambda text: None
    return partial(print, flush=True)
