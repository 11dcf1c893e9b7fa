"""Parsers of command-line options and configuration files, and their help."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import chain
from operator import attrgetter
from typing import Any

import lightning as L
from jsonargparse import (
    SUPPRESS,
    ActionConfigFile,
    ArgumentParser,
    DefaultHelpFormatter,
    Namespace,
)
from jsonargparse._actions import _ActionConfigLoad, _ActionHelpClassPath
from lightning.pytorch.cli import LightningArgumentParser

from flsv.cli.config_errors import OptionError
from flsv.cli.config_texts import keep_texts, read_config, write_config
from flsv.cli.configs import check_file, find_config
from flsv.configuration.federation_config import ROLES
from flsv.utilities.display import plain
from flsv.utilities.errors import ConfigurationError, check_lightning
from flsv.utilities.seeding import kept_global_seed
from flsv.utilities.wings import brought

#: Option that maps names to objects. A later file adds its names to those of earlier files. ``{}`` removes all names.
_METRICS = "federation.metrics"
_LOOPS = ("FederatedLoop", "flsv.FederatedLoop", "flsv.federation.FederatedLoop")
_DATA_MODULES = ("FederatedDataModule", "flsv.FederatedDataModule", "flsv.data.FederatedDataModule")
_OPTIMIZERS = ("optimizer", "lr_scheduler")
_PART_OPTIONS = tuple(f"federation.{role}" for role in ROLES)
CONFIG_HELP = (
    "A YAML file, or the name of one that comes with flsv (quickstart). Of several files, a later one overrides "
    "earlier ones, and adds to federation.metrics by name. --print_config shows the result."
)

#: Options of ``Trainer.fit``, which a run's ``config.yaml`` has, and ``flsv repeat`` has not.
_FIT_OPTIONS = ("ckpt_path", "weights_only")


class ConfigFile(ActionConfigFile):
    """Action of ``--config``, a file or a packaged name. Metrics of several files are merged.

    If a file names another class for an optimizer, a schedule or a part of the federation than an earlier file, the
    earlier options are dropped: the learning rate of SGD does not suit Adam. A file of LightningCLI names the data
    module under ``data``, and the loop among the callbacks.
    """

    def __call__(
        self, parser: Any, cfg: Any, values: Any, option_string: str | None = None
    ) -> None:
        # The value is a file, the name of one that comes with flsv, or the text of a configuration.
        text = values
        is_file = isinstance(values, str) and "{" not in values and "\n" not in values
        if is_file:
            path = find_config(values)
            check_file(path)
            text = path.read_text("utf-8")
            values = str(path)
        config = read_config(text)
        sections = _without_fit_options(parser, with_sections_of_flsv(config))
        if sections != config:
            values = write_config(sections)

        _forget_other_classes(cfg, sections)
        earlier_metrics = cfg.get(_METRICS)
        super().__call__(parser, cfg, values, option_string)
        _check_sections(parser, cfg)
        _add_earlier_metrics(cfg, earlier_metrics)


def _add_earlier_metrics(config: Any, earlier_metrics: Any) -> None:
    metrics = config.get(_METRICS)
    are_both_given = isinstance(earlier_metrics, dict) and isinstance(metrics, dict)
    if are_both_given and metrics:
        config[_METRICS] = {**earlier_metrics, **metrics}


def _without_fit_options(parser: Any, config: Any) -> Any:
    """Return a configuration without the options of a fit, such as the checkpoint from which the fit was resumed, where
    a command has no such options.
    """
    if not isinstance(config, dict):
        return config
    known_names = {action.dest for action in parser._actions}
    removed = [name for name in _FIT_OPTIONS if name not in known_names]
    return {name: section for name, section in config.items() if name not in removed}


def _forget_other_classes(config: Any, sections: Any) -> None:
    """Remove each part of a configuration for which ``sections`` names another class, with its options."""
    for key, section in _parts_in(sections):
        earlier_section = config.get(key)
        if not isinstance(earlier_section, Mapping | Namespace):
            continue
        earlier_class = _class_of(earlier_section)
        if earlier_class not in (None, _class_of(section)):
            config[key] = None


def _check_sections(parser: Any, config: Any) -> None:
    """Let the parser raise an error if a section of a configuration is a single value, or a group in it is null."""
    for action in parser._actions:
        if not isinstance(action, _ActionConfigLoad):
            continue
        section = config.get(action.dest, Namespace())
        is_unused = section is None and "." not in action.dest  # all its options are comments
        if not (is_unused or isinstance(section, Namespace)):
            parser.error(f'Parser key "{action.dest}": Unable to load config "{section}"')


def with_sections_of_flsv(config: Any) -> Any:
    """Return a project's configuration with its data module as source, and the loop as section ``federation``."""
    if not isinstance(config, dict):
        return config
    sections = dict(config)
    data = sections.get("data")
    if isinstance(data, dict) and "class_path" in data:
        sections["data"] = _data_section(data)
    return _with_federation_section(sections)


def _data_section(data: Mapping[str, Any]) -> Mapping[str, Any]:
    if data["class_path"] in _DATA_MODULES:
        return data.get("init_args") or {}
    return {"source": data}


def _with_federation_section(sections: dict[str, Any]) -> dict[str, Any]:
    """Return sections in which the loop is no callback of the Trainer, but the section ``federation``."""
    trainer: Any = sections.get("trainer")
    callbacks: Any = None
    if isinstance(trainer, dict):
        callbacks = trainer.get("callbacks")
    if isinstance(callbacks, dict | str):
        callbacks = [callbacks]
    loops = [callback for callback in callbacks or [] if _is_loop(callback)]
    if not loops:
        return sections
    other_callbacks = [callback for callback in callbacks if not _is_loop(callback)]
    federation = sections.get("federation") or {}
    for loop in loops:
        arguments = loop.get("init_args") if isinstance(loop, dict) else None
        federation = {**(arguments or {}), **federation}  # the section overrides a loop's arguments
    return {
        **sections,
        "federation": federation,
        "trainer": {**trainer, "callbacks": other_callbacks},
    }


def _is_loop(callback: Any) -> bool:
    class_path = callback.get("class_path") if isinstance(callback, dict) else callback
    return class_path in _LOOPS


def with_merged_options(words: Sequence[str]) -> list[str]:
    """Return a command line whose options change a configuration as a later file does.

    ``--federation.metrics {...}`` adds to the metrics of files, and a part of another class drops the earlier options.
    """
    # --federation.sampler=UniformSampler becomes --config {"federation": {"sampler": "UniformSampler"}}.
    merged = []
    remaining_words = list(words)
    while remaining_words:
        word = remaining_words.pop(0)
        option, equals_sign, text = word.partition("=")
        key = option.removeprefix("--").removesuffix(".class_path")
        is_part = _is_part(key)
        is_to_merge = option.startswith("--") and (is_part or option == f"--{_METRICS}")
        if not is_to_merge:
            merged.append(word)
            continue

        if not equals_sign and remaining_words:
            text = remaining_words.pop(0)  # the value is the next word
        section = read_config(text)
        names_class = is_part and _class_of(section) is not None
        if names_class or isinstance(section, Mapping):
            merged += ["--config", _nested(key.split("."), section)]
        else:
            merged += [option, text]
    return merged


def _is_part(key: str) -> bool:
    """Return whether a key is that of an optimizer, a schedule or a part of the federation."""
    return key in _PART_OPTIONS or key.rpartition(".")[2] in _OPTIMIZERS


def _nested(keys: Sequence[str], section: Any) -> str:
    """Return a configuration, as a text, that has only the section of these keys."""
    if keys[0] == "model" and keys[1] != "init_args":  # jsonargparse lets options leave it out
        keys = ["model", "init_args", *keys[1:]]
    for key in reversed(keys):
        section = {key: section}
    return write_config(section)


def _parts_in(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(key, section)`` of a configuration's sections that name a class."""
    if not isinstance(config, Mapping):
        return
    for name, section in config.items():
        key = f"{path}.{name}".lstrip(".")  # no path before the first name
        is_part = key in _PART_OPTIONS or name in _OPTIMIZERS
        if is_part and _class_of(section) is not None:
            yield key, section
        else:
            yield from _parts_in(section, key)


def _class_of(section: Any) -> str | None:
    """Return the name of the class in a section of a configuration, without its package."""
    if isinstance(section, Mapping | Namespace):
        class_path = section.get("class_path")
    else:
        class_path = section
    if not isinstance(class_path, str):
        return None
    return class_path.rpartition(".")[2]


class OptionHelp(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Help formatter that shows descriptions unchanged, docstrings without markup, and public classes only.

    It leaves out the options ``--NAME.help`` and those that read a section from a file, which every section has.
    """

    def add_argument(self, action: argparse.Action) -> None:
        if not isinstance(action, _ActionHelpClassPath | _ActionConfigLoad):
            super().add_argument(action)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, _, paths = super()._get_help_string(action).partition(", known subclasses: ")
        if not paths:
            return text
        classes = []
        for path in paths.rstrip(")").split(", "):
            name = path.rpartition(".")[2]
            if name in _public_names():
                classes.append(name)
            elif path.partition(".")[0] not in _LIBRARIES:
                classes.append(path)
        return f"{text}, classes: {', '.join(classes)})" if classes else f"{text})"

    def start_section(self, heading: str | None) -> None:
        super().start_section(textwrap.fill(plain(heading or ""), self._width - 1))

    def _expand_help(self, action: argparse.Action) -> str:
        return plain(super()._expand_help(action))


class OptionParser(ArgumentParser):
    """Parser whose errors are raised, so that they can be explained."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        keep_texts()  # only who makes such a parser has jsonargparse changed
        super().__init__(*arguments, **options)

    def error(self, message: str, ex: Exception | None = None) -> Any:
        # jsonargparse parses a part of a value, and handles the error itself.
        is_on_trial = not self.exit_on_error
        if is_on_trial:
            return super().error(message, ex)
        if message.startswith(f"unrecognized arguments: --{_METRICS}+"):
            raise ConfigurationError(
                f"--{_METRICS}+: metrics have names. Add one with --{_METRICS}.NAME, as in --{_METRICS}.loo "
                "LeaveOneOut."
            ) from ex
        known_names = list(_public_names())
        default_classes = {}
        for parser in [self, *subparsers_of(self)]:
            for name, value in parser.get_defaults(skip_validation=True).items():
                known_names.append(name)
                if name.endswith(".class_path"):
                    default_classes[name.removesuffix(".class_path")] = value
        raise OptionError(message, known_names, default_classes) from ex


def subparsers_of(parser: ArgumentParser) -> list[ArgumentParser]:
    """Return the parsers of a parser's subcommands."""
    parsers: list[ArgumentParser] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers += action.choices.values()
    return parsers


class FitParser(OptionParser, LightningArgumentParser):
    """LightningCLI's parser, with the federation first in its help, and errors for ``pytorch_lightning``."""

    def format_help(self, *arguments: Any) -> str:
        groups_by_section: dict[str, list[Any]] = {section: [] for section in SECTION_TITLES}
        for group in filter(attrgetter("_group_actions"), self._action_groups):
            section = group._group_actions[0].dest.partition(".")[0]
            groups_by_section.setdefault(section, []).append(group)
        for section, title in SECTION_TITLES.items():
            for group in groups_by_section[section][
                :1
            ]:  # argparse's other groups have titles already
                group.title = title
        self._action_groups = [*chain.from_iterable(groups_by_section.values())]
        return super().format_help(*arguments)

    def dump(self, *arguments: Any, **options: Any) -> str:
        """Write a value whose class jsonargparse cannot write, such as a device, as its text alone."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"\s*Unable to serialize instance")
            text = super().dump(*arguments, **options)
        return re.sub(r"Unable\s+to\s+serialize\s+instance\s+", "", text)

    def error(self, message: str, ex: Exception | None = None) -> Any:
        if "correspond to a subclass" in message:
            for module_name, class_name in re.findall(r"([\w.]+)\.(\w+)", message):
                module = sys.modules.get(module_name)
                wrong_class = getattr(module, class_name, None)
                # This raises a better error if the class is of the other Lightning package.
                check_lightning(wrong_class)
        return super().error(message, ex)


#: Packages whose classes a configuration may name without their packages.
PACKAGES = (
    "flsv",
    "flsv.aggregation",
    "flsv.data",
    "flsv.filters",
    "flsv.metrics",
    "flsv.models",
    "flsv.personalization",
    "flsv.privacy",
    "flsv.sampling",
    "flsv.training.algorithms",
    "flsv.uploads",
    *brought("parts"),
)


#: Packages of which the help shows only public classes.
_LIBRARIES = ("flsv", "lightning", "torch", "torchmetrics", "torchvision")
#: Packages of Lightning and torch whose classes a configuration often names.
PACKAGES_OF_OTHERS = (
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "torch.optim",
    "torch.optim.lr_scheduler",
)


def import_parts() -> None:
    """Import the classes of :data:`PACKAGES`: jsonargparse finds an imported class by its name alone."""
    for package in PACKAGES:
        for name in _names_in(package):
            # A package imports a class when the class's name is first read.
            getattr(sys.modules[package], name)


def _names_in(package: str) -> Sequence[str]:
    """Import a package, and return its public names."""
    return getattr(import_module(package), "__all__", ())


@cache
def _public_names() -> tuple[str, ...]:
    names = chain.from_iterable(map(_names_in, (*PACKAGES, *PACKAGES_OF_OTHERS)))
    return tuple(name for name in names if name[0].isupper())  # classes, not functions and packages


#: Arguments of all jsonargparse parsers in this module.
PARSER_OPTIONS: dict[str, Any] = {"formatter_class": OptionHelp, "allow_abbrev": False}
#: Sections of the configuration files of all commands.
ALL_SECTIONS = ("trainer", "federation", "model", "optimizer", "lr_scheduler", "ckpt_path", "value")
#: The titles of the sections in the help of ``flsv fit``, in the order in which a user needs them.
SECTION_TITLES = {
    "help": "General options",
    "federation": "Federation",
    "data": "Data and clients",
    "model": "Model, a LightningModule",
    "optimizer": "Optimizer, for a model that configures none",
    "lr_scheduler": "Learning rate schedule, for a model that configures no optimizer",
    "trainer": "Lightning's Trainer. One epoch is one round",
    "ckpt_path": "Checkpoint",
}
#: The first line of their help, instead of a list of all options.
USAGE = "%(prog)s [--config CONFIG ...] [options]"


def option_parser(
    prog: str, description: str | None, sections: Mapping[str, type]
) -> ArgumentParser:
    """Return a parser for a command's options, ``{section: class}``. It ignores other sections in files."""
    import_parts()
    parser = OptionParser(prog=prog, description=description, usage=USAGE, **PARSER_OPTIONS)
    parser.add_argument("--config", action=ConfigFile, help=CONFIG_HELP)
    for name, kind in sections.items():
        parser.add_class_arguments(kind, name)
    parser.add_argument(
        "--seed_everything",
        type=int | bool,
        default=0,
        help="seed of everything that has no seed of its own",
    )
    ignored_sections = set(ALL_SECTIONS) - set(sections)
    for name in ignored_sections:
        parser.add_argument(f"--{name}", type=dict | int | str | None, help=SUPPRESS)
    return parser


def instantiated(parser: ArgumentParser, args: Sequence[str]) -> Any:
    """Seed everything as a fit does, and build the objects that a command line describes."""
    options = parser.parse_args(list(args))
    L.seed_everything(int(options.seed_everything), verbose=False)
    # Before jsonargparse 4.49 the method had the second name.
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    with kept_global_seed():
        return instantiate(options)
