"""What ``--help`` shows: docstrings at the terminal's width, without their marks. Imports nothing heavy."""

from __future__ import annotations

import argparse
import re
import textwrap

_ROLE = re.compile(r":\w+:`~?([^`]*)`")


def plain(text: str) -> str:
    """A docstring's text without roles and double backticks.

    Example:
        >>> plain("``--tests``: see :func:`flsv.functional.wasserstein`")
        '--tests: see flsv.functional.wasserstein'
    """
    return _ROLE.sub(r"\1", text).replace("``", "")


def filled(text: str, width: int) -> str:
    """Paragraphs at a width; what is indented (commands) stays as it is.

    Example:
        >>> print(filled("One two\\nthree.\\n\\n    flsv  fit", 9))
        One two
        three.
        <BLANKLINE>
            flsv  fit
    """
    paragraphs = plain(text).strip("\n").split("\n\n")
    return "\n\n".join(each if each.startswith(" ") else textwrap.fill(each, width) for each in paragraphs)


class TextHelp(argparse.HelpFormatter):
    """Of a command whose description is its module's docstring."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.indent(filled(text, width - len(indent)), indent)

    def _expand_help(self, action: argparse.Action) -> str:
        return plain(super()._expand_help(action))

    def start_section(self, heading: str | None) -> None:
        super().start_section(None if heading is None else filled(heading, self._width - 1))


def command_parser(prog: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """An ``ArgumentParser`` with :class:`TextHelp` that takes no option by its first letters."""
    return argparse.ArgumentParser(
        prog, description=description, epilog=epilog, formatter_class=TextHelp, allow_abbrev=False
    )


def positive(text: str) -> int:
    """A whole number of 1 or more, for ``add_argument(type=...)``.

    Raises:
        argparse.ArgumentTypeError: it is less.
        ValueError: it is none.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected at least 1")
    return number
