"""How the command line reads options and configuration files, and what it says of those that it cannot read."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, DefaultHelpFormatter
from lightning.pytorch.cli import LightningArgumentParser

from flsv._lightning.old_package import old_class_named
from flsv.cli.help import TextHelp
from flsv.cli.packaged import find_config
from flsv.errors import ConfigurationError

#: Dictionaries by name: a file adds to those of the files before it, name by name, and ``{}`` drops them.
BY_NAME = ("federation.metrics",)
CONFIG_HELP = (
    "A YAML file, or the name of one that comes with flsv (quickstart); give several: a later one overrides, which is "
    "said, and adds to federation.metrics by name."
)


class ConfigFile(ActionConfigFile):
    """``--config``: a file, or the name of one that comes with flsv.

    Refuses a key that is there twice; metrics of several files come together.
    """

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        if isinstance(values, str) and not ("{" in values or ": " in values or "\n" in values):  # that is YAML itself
            values = str(find_config(values))
            check_keys(Path(values))
        before = {name: cfg.get(name) for name in BY_NAME}
        super().__call__(parser, cfg, values, option_string)
        for name, held in before.items():
            now = cfg.get(name)
            if isinstance(held, dict) and isinstance(now, dict) and now:
                cfg[name] = {**held, **now}


def check_keys(path: Path) -> None:
    """Raise if a YAML file has a key twice in one mapping: all but the last would be lost.

    Raises:
        ConfigurationError: the file, the key and both lines.
    """
    try:
        nodes = [yaml.compose(path.read_text(encoding="utf-8"))]
    except (yaml.YAMLError, UnicodeDecodeError):
        return  # the parser says what is wrong
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                if key.value in lines and isinstance(key, yaml.ScalarNode):
                    raise ConfigurationError(
                        f"{path}, line {line}: the key {key.value!r} is in line {lines[key.value]} already, and one of "
                        "them would be lost. Keep one."
                    )
                if isinstance(key, yaml.ScalarNode):
                    lines[key.value] = line
                nodes.append(value)


class OptionHelp(TextHelp, DefaultHelpFormatter):
    """Neither all options in the usage, nor torch's own classes among those that an option takes: screens of them."""

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        if prefix is None:  # else it is the name of a subcommand that is made of it
            files = any("--config" in action.option_strings for action in actions)
            usage = f"%(prog)s {'[--config CONFIG ...] ' if files else ''}[options]"
        super().add_usage(usage, actions, groups, prefix)

    def _expand_help(self, action: argparse.Action) -> str:
        text, mark, known = super()._expand_help(action).partition(", known subclasses: ")
        if not mark:
            return text
        names = known.removesuffix(")").split(", ")
        kept = [name for name in names if not name.startswith(("torch.", "torchvision.", "torch_geometric."))]
        return f"{text}{mark}{', '.join(kept)})" if kept else f"{text})"


class _OneLine(ArgumentParser):
    """Says in one line what is wrong, where jsonargparse prints all options first."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": OptionHelp, **options})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        said = one_line(message)
        near = suggestion(message, sorted(option_names(self)))
        other = old_class_named(said)
        if other:  # all that jsonargparse says follows from it
            said, near = f"{said.partition(': ')[0]}: {other}", None
        print(f"flsv: error: {said}{f' Did you mean {near}?' if near else ''}", file=sys.stderr)
        self.exit(2)
        raise AssertionError("exit returns")


class OptionParser(_OneLine, LightningArgumentParser):
    """Of flsv fit, validate, test and predict."""


class PlainParser(_OneLine):
    """Of the other commands."""


def one_line(message: str) -> str:
    """jsonargparse's message without its list of all that was tried.

    Example:
        >>> one_line('Parser key "a.b":\\n  Subtypes: [int]\\n  Errors:\\n    - Not a number')
        '"a.b": Not a number.'
    """
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    noise = ("Does not validate against", "Subtypes:", "Errors:", "Expected a <class 'NoneType'>", "Given value type:")
    kept = [line for line in lines if line and not line.startswith(noise)]
    return " ".join(kept).removeprefix("Parser key ").rstrip(".") + "."


def option_names(parser: argparse.ArgumentParser) -> set[str]:
    """Names of a parser's options and of its subcommands', without dashes."""
    names: set[str] = set()
    for action in parser._actions:
        names |= {option.lstrip("-") for option in action.option_strings}
        if isinstance(action, argparse._SubParsersAction):
            names |= set(action.choices)
            for sub in action.choices.values():
                names |= option_names(sub)
    return names


UNKNOWN = (
    r"[Uu]nrecognized arguments: (--[\w.-]+)",
    r"does not accept (?:option|nested key) '([\w.-]+)'",
    r"[Oo]ption '([\w.-]+)' is not accepted",
    r"[Kk]ey '([\w.-]+)' is not expected",
    r"invalid choice: '([\w.-]+)'",
)


def suggestion(message: str, names: Sequence[str]) -> str | None:
    """The name nearest to the unknown one that a message is about; None where none is near.

    Example:
        >>> suggestion("unrecognized arguments: --federation.sever_lr 1", ["federation.server_lr", "data.source"])
        '--federation.server_lr'
    """
    found = [match.group(1) for pattern in UNKNOWN if (match := re.search(pattern, message))]
    if not found:
        return None
    given = found[0].lstrip("-")
    of_class = [name for path in re.findall(r"class_path '([\w.]+)'", message) for name in _arguments(path)]
    section, _, last = given.rpartition(".")
    # Within the section first: what all its options begin with makes any two of them alike.
    beside = [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == section]
    for word, known, start, cutoff in (
        (last, of_class or beside, f"{section}." if section else "", 0.6),
        (given, names, "", 0.8),
    ):
        near = difflib.get_close_matches(word, known, 1, cutoff)
        if near:
            dashes = "--" if found[0].startswith("--") or "." in given else ""
            return f"{dashes}{start}{near[0]}"
    return None


def _arguments(class_path: str) -> Iterator[str]:
    module, _, name = class_path.rpartition(".")
    try:
        yield from inspect.signature(getattr(importlib.import_module(module), name)).parameters
    except (ImportError, AttributeError, TypeError, ValueError):
        return
