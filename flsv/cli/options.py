"""How the command line reads options and configuration files, and what it says of those that it cannot read."""

from __future__ import annotations

import argparse
import difflib
import importlib
import pkgutil
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ActionConfigFile, ArgumentParser, DefaultHelpFormatter
from lightning.pytorch.cli import LightningArgumentParser

from flsv._lightning.patches import old_class_named
from flsv.arguments import new_name
from flsv.cli.command import TextHelp
from flsv.cli.configs import check_file, find_config
from flsv.cli.names import OWNERS, UNKNOWN, suggestion

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
            check_file(Path(values))
        before = {name: cfg.get(name) for name in BY_NAME}
        super().__call__(parser, cfg, values, option_string)
        for name, held in before.items():
            now = cfg.get(name)
            if isinstance(held, dict) and isinstance(now, dict) and now:
                cfg[name] = {**held, **now}


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
        super().__init__(*arguments, **{"formatter_class": OptionHelp, "allow_abbrev": False, **options})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        said, near = one_line(message), present_name(message)
        if near:
            said, near = near, None
        else:
            near = suggestion(message, sorted(option_names(self))) or class_suggestion(message)
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


#: Where classes are that a configuration names.
_ROOMS = (
    *("torch.optim", "lightning.pytorch.loggers", "lightning.pytorch.callbacks", "flsv.models", "flsv.data"),
    *("flsv.attacks", "flsv.privacy", "flsv.uploads", "flsv.filters", "flsv.sampling", "flsv.clients.algorithms"),
    *("flsv.personalization", "flsv.aggregation", "flsv.metrics", "flsv"),
)


def present_name(message: str) -> str | None:
    """What an option of an earlier version is now, if a message is about one.

    Example:
        >>> present_name("Subcommand 'fit' does not accept option 'federation.norm_cap'")
        'FederatedLoop(norm_cap=...): norm_cap is now filters=[NormCap(...)].'
    """
    found = [match.group(1) for pattern in UNKNOWN if (match := re.search(pattern, message))]
    if group := re.search(r"[Gg]roup '([\w.-]+)' does not accept", message):
        found = [f"{group[1]}.{name}" for name in found]
    section, _, name = (found[0] if found else "").lstrip("-").partition(".")
    return new_name(OWNERS.get(section, ""), name)


def class_suggestion(message: str) -> str | None:
    """The class path nearest to one that leads to nothing; None where none is near.

    Example:
        >>> class_suggestion("module 'flsv.metrics' has no attribute 'ClassSpecificShaply'")
        'flsv.metrics.ClassSpecificShapley'
        >>> class_suggestion("Expected a dot import path string: FedAvgg")
        'flsv.aggregation.FedAvg'
    """
    found = re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message)
    bare = re.search(r"Expected a dot import path string: (\w+)", message)
    if found is not None:
        module, name = found.groups()
        inside = importlib.import_module(module)
        names = {each for each in dir(inside) if not each.startswith("_")}
        names |= {each.name for each in pkgutil.iter_modules(getattr(inside, "__path__", ()))}
        near = difflib.get_close_matches(name, names, 1, 0.8)
        if near:
            return f"{module}.{near[0]}"
    elif bare is not None:
        name = bare[1]
    else:
        return None
    known = {each: f"{module}.{each}" for module in _ROOMS for each in _public(module)}
    near = difflib.get_close_matches(name, known, 1, 0.8)
    return known[near[0]] if near else None


def _public(module: str) -> Sequence[str]:
    return getattr(importlib.import_module(module), "__all__", ())
