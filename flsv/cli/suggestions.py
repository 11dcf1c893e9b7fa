"""What an option that there is not was meant to be."""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

from flsv.plugins import subclasses

#: How the parser says which there is not.
_WRONG = re.compile(r"unrecognized arguments: --([\w.]+)|[Oo]ption '([\w.]+)' is not accepted")
#: Options of classes' arguments' arguments: --model.optimizer.lr.
_DEPTH = 2
#: Sections, those first whose options are meant more often than others of the same name.
_ORDER = ("data", "model")


class _Suggests:
    """Errors of unknown options name those that they may be, of the parser's own."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        wrong = _WRONG.search(message)
        near = nearest(wrong[1] or wrong[2], set(_options(self))) if wrong else []
        hint = f". Did you mean {' or '.join(f'--{each}' for each in near)}?" if near else ""
        return super().error(f"{message}{hint}", ex)  # type: ignore[misc]


class Parser(_Suggests, ArgumentParser):
    """jsonargparse's."""


class FitParser(_Suggests, LightningArgumentParser):
    """LightningCLI's."""


def nearest(wrong: str, options: set[str]) -> list[str]:
    """Up to three options whose last word is the same, or spelled alike.

    Example:
        >>> nearest("alfa", {"data.partitioner.alpha", "federation.seed"})
        ['data.partitioner.alpha']
    """
    before, _, last = wrong.rpartition(".")
    by_word: dict[str, list[str]] = {}
    for each in sorted(options - {wrong}, key=_usual):
        by_word.setdefault(each.rpartition(".")[2], []).append(each)
    alike = difflib.get_close_matches(last, by_word, 1)
    found = by_word[alike[0]] if alike else []
    beside = [each for each in found if before and each.rpartition(".")[0] == before]
    return beside or found[:3]


def _usual(option: str) -> tuple[int, int, str]:
    section = option.split(".")[0]
    return _ORDER.index(section) if section in _ORDER else len(_ORDER), option.count("."), option


def _options(parser: Any) -> Iterator[str]:
    for action in parser._actions:
        for each in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            yield from _options(each)
        if action.option_strings and not action.dest.endswith("help"):
            yield action.dest
            yield from _arguments(getattr(action, "_typehint", None), action.dest, _DEPTH)


def _arguments(hint: Any, name: str, depth: int) -> Iterator[str]:
    """Of the classes that an annotation names, and of their subclasses that are imported."""
    if not depth or hint is None:
        return
    for part in get_args(hint):
        for each in part if isinstance(part, list) else [part]:
            yield from _arguments(each, name, depth)
    if not isinstance(hint, type) or get_args(hint) or hint.__module__ == "builtins":
        return
    for kind in {hint, *subclasses(hint)}:
        try:
            hints = get_type_hints(kind.__init__)  # type: ignore[misc]
            arguments = inspect.signature(kind).parameters
        except (NameError, TypeError, ValueError):  # a stranger's
            continue
        for argument in arguments:
            yield f"{name}.{argument}"
            yield from _arguments(hints.get(argument), f"{name}.{argument}", depth - 1)
