"""Options and configuration files on the command line: parsers, their help, and suggestions for misspelt options."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import lightning as L
from jsonargparse import SUPPRESS, ActionConfigFile, ArgumentParser, DefaultHelpFormatter
from lightning.pytorch.cli import LightningArgumentParser

from flsv.cli.command import TextHelp, number_hint
from flsv.cli.configs import check_file, find_config, is_yaml
from flsv.utilities.errors import check_lightning
from flsv.utilities.plugins import subclasses, why_no_class

#: Options that map names to objects. A later file adds its names to those of earlier files; ``{}`` removes all names.
BY_NAME = ("federation.metrics",)
CONFIG_HELP = (
    "A YAML file, or the name of one that comes with flsv (quickstart); give several: a later one overrides, and adds "
    "to federation.metrics by name. --print_config shows the result."
)


class ConfigFile(ActionConfigFile):
    """Action of the option ``--config``, whose value is a file or the name of a packaged configuration.

    It refuses a file in which a key occurs twice, and merges the metrics of several files.
    """

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        if isinstance(values, str) and not is_yaml(values):
            values = str(find_config(values))
            check_file(Path(values))
        before = {name: cfg.get(name) for name in BY_NAME}
        super().__call__(parser, cfg, values, option_string)
        for name, held in before.items():
            now = cfg.get(name)
            if isinstance(held, dict) and isinstance(now, dict) and now:
                cfg[name] = {**held, **now}


class OptionHelp(TextHelp, DefaultHelpFormatter):
    """Formatter of help that leaves out the options in the usage line, and torch's classes in lists of subclasses."""

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        if prefix is None:  # otherwise the usage becomes the name of a subcommand
            files = any("--config" in action.option_strings for action in actions)
            usage = f"%(prog)s {'[--config CONFIG ...] ' if files else ''}[options]"
        super().add_usage(usage, actions, groups, prefix)

    def _expand_help(self, action: argparse.Action) -> str:
        text, mark, known = super()._expand_help(action).partition(", known subclasses: ")
        names = known.removesuffix(")").split(", ")
        kept = ", ".join(name for name in names if not name.startswith(("torch.", "torchvision.", "torch_geometric.")))
        return f"{text}{mark if kept else ''}{kept}{')' if mark else ''}"


# ---- suggestions for an option that does not exist

#: Messages in which the parser names the option that does not exist.
_WRONG = re.compile(r"unrecognized arguments: --([\w.]+)|[Oo]ption '([\w.]+)' is not accepted")
#: The value where a number was expected.
_NO_NUMBER = re.compile(r"Expected a <class '(?:float|int)'>(?:.|\n)*?G(?:ot|iven) value: ([^\s'\"<(]+?)\.?(?:\s|$)")
_CLASS = re.compile(r"Problem with given class_path '([\w.]+)'")
#: Depth of nested arguments to suggest, such as --model.optimizer.lr.
_DEPTH = 2


class _Suggests:
    """Mixin of parsers that suggests similar options in errors about unknown options."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        if "not correspond to a subclass" in message:
            for package, name in re.findall(r"([\w.]+)\.(\w+)", message):
                check_lightning(getattr(sys.modules.get(package), name, None))
        if why := next(filter(None, map(why_no_class, _CLASS.findall(message))), ""):
            super().error(why.strip(), ex)  # type: ignore[misc]  # the parser it is mixed into
        wrong = _WRONG.search(message)
        given = _CLASS.findall(message[: wrong.start()]) if wrong else []
        if given:
            package, _, name = given[-1].rpartition(".")
            takes = inspect.signature(getattr(importlib.import_module(package), name)).parameters
            names = ("..." if argument.kind is argument.VAR_KEYWORD else key for key, argument in takes.items())
            # mypy: the parser it is mixed into
            super().error(f"{message}. {name} takes {', '.join(names)}.", ex)  # type: ignore[misc]
        number = _NO_NUMBER.search(message) if "Expected a <class" in message else None
        if number:
            hint = number_hint(number[1])  # the parser of a class within has said it before
            super().error(f"{message.replace(hint, '')}{hint}", ex)  # type: ignore[misc]  # the parser it is mixed into
        near = nearest(wrong[1] or wrong[2], set(_options(self))) if wrong else []
        hint = f". Did you mean {' or '.join(f'--{each}' for each in near)}?" if near else ""
        return super().error(f"{message}{hint}", ex)  # type: ignore[misc]  # the parser it is mixed into


class Parser(_Suggests, ArgumentParser):
    """jsonargparse's parser, with suggestions for unknown options."""


class FitParser(_Suggests, LightningArgumentParser):
    """LightningCLI's parser, with suggestions for unknown options."""


def nearest(wrong: str, options: set[str]) -> list[str]:
    """Return up to three options whose last word is the same as that of the wrong option, or spelled similarly. If one
    of them differs from the wrong option only in the last word, return only that one.

    Example:
        >>> nearest("alfa", {"data.partitioner.alpha", "federation.seed"})
        ['data.partitioner.alpha']
    """
    before, _, last = wrong.rpartition(".")
    by_word: dict[str, list[str]] = {}
    for each in sorted(options - {wrong}, key=lambda each: (each.split(".")[0], each.count("."), each)):
        by_word.setdefault(each.rpartition(".")[2], []).append(each)
    alike = difflib.get_close_matches(last, by_word, 1)
    found = by_word[alike[0]] if alike else []
    beside = [each for each in found if before and each.rpartition(".")[0] == before]
    return beside or found[:3]


def _options(parser: Any) -> Iterator[str]:
    for action in parser._actions:
        for each in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            yield from _options(each)
        if action.option_strings and not action.dest.endswith("help"):
            yield action.dest
            yield from _arguments(getattr(action, "_typehint", None), action.dest, _DEPTH)


def _arguments(hint: Any, name: str, depth: int) -> Iterator[str]:
    """Yield the dotted names of the options below the option ``name``, whose type hint is ``hint``: the arguments of
    all classes in the hint and of their imported subclasses. ``depth`` is the number of levels of nested arguments."""
    if not depth or hint is None:
        return
    for part in get_args(hint):
        for each in part if isinstance(part, list) else [part]:
            yield from _arguments(each, name, depth)
    if not isinstance(hint, type) or get_args(hint) or hint.__module__ == "builtins":
        return
    for kind in {hint, *subclasses(hint)}:
        try:
            hints = get_type_hints(kind.__init__)  # type: ignore[misc]  # of a class, not an instance
            arguments = inspect.signature(kind).parameters
        except (NameError, TypeError, ValueError):  # another package's class that cannot be inspected
            continue
        for argument in arguments:
            yield f"{name}.{argument}"
            yield from _arguments(hints.get(argument), f"{name}.{argument}", depth - 1)


# ---- parsers

#: Arguments of all parsers that are made here by jsonargparse.
PARSER: dict[str, Any] = {"formatter_class": OptionHelp, "allow_abbrev": False}


def option_parser(prog: str, description: str | None, sections: Mapping[str, type]) -> ArgumentParser:
    """Return a parser for a command that is not one of LightningCLI's.

    Args:
        prog: the command's name.
        description: the docstring of the command's module.
        sections: ``{section of a configuration: class}``, the sections that the command reads, and the class whose
            arguments a section has. Other sections of a file are ignored; on the command line they are refused.
    """
    parser = Parser(prog=prog, description=description, **PARSER)
    parser.add_argument("--config", action=ConfigFile, help=CONFIG_HELP)
    for name, kind in sections.items():
        parser.add_class_arguments(kind, name)
    for name in {"trainer", "federation", "value"} - {*sections}:
        parser.add_argument(f"--{name}", type=_of_a_file, help=SUPPRESS)
    parser.add_argument(
        "--seed_everything", type=int | bool, default=0, help="seed of everything that has no seed of its own"
    )
    for name in ("model", "optimizer", "lr_scheduler", "ckpt_path"):
        parser.add_argument(f"--{name}", type=dict | int | str | None, help=SUPPRESS)
    return parser


def instantiated(parser: ArgumentParser, args: Sequence[str]) -> Any:
    """Return the objects that a command line describes. Objects without a seed of their own use ``--seed_everything``,
    as in a fit."""
    options = parser.parse_args(list(args))
    L.seed_everything(int(options.seed_everything), verbose=False)
    # Before jsonargparse 4.49 the method had the second name.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    return instantiate(options)


def _of_a_file(given: Any) -> Any:
    if isinstance(given, str):
        raise argparse.ArgumentTypeError(
            "this command trains nothing: options of flsv fit may stand in a file, but not on the command line"
        )
    return given
