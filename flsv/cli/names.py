"""The names of options, read off the source without importing torch, and a command line checked by them.

Only names are looked at: of an option of ``flsv fit``, and of an argument of its trainer, data or federation. What it
is given, and everything below it, is the parser's to check.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from flsv.arguments import new_name
from flsv.cli.configs import find_config

OWNERS = {"federation": "FederatedLoop", "data": "FederatedDataModule"}
PACKAGE = Path(__file__).parents[1]
#: Section to package, file and class whose constructor's arguments are its options.
_SECTIONS = {
    "trainer": ("lightning", "pytorch/trainer/trainer.py", "Trainer"),
    "data": ("flsv", "data/datamodule.py", "FederatedDataModule"),
    "federation": ("flsv", "loop/federated_loop.py", "FederatedLoop"),
    "value": ("flsv", "valuation/fedbary.py", "FedBary"),
    "model": ("flsv", "models/classifier.py", "ClassifierClient"),
}
#: Those of ``flsv fit``.
_OF_FIT = ("trainer", "data", "federation")
#: Options of LightningCLI and of its four subcommands.
_OPTIONS = (
    *("config", "print_config", "seed_everything", "model", "optimizer", "lr_scheduler", "help", "version"),
    *("ckpt_path", "weights_only", "verbose", "return_predictions"),
)
_CONFIGS = ("--config", "--base")
#: A name or path, and no YAML.
_PLAIN = re.compile(r"[\w./~-]+")
UNKNOWN = (
    r"(?:[Uu]nrecognized arguments|ambiguous option): (--[\w.-]+)",
    r"does not accept (?:option|nested key) '([\w.-]+)'",
    r"[Oo]ption '([\w.-]+)' is not accepted",
    r"[Kk]ey '([\w.-]+)' is not expected",
    r"invalid choice: '([\w.-]+)'",
)


def suggestion(message: str, names: Sequence[str]) -> str | None:
    """The name nearest to the unknown one that a message is about; None where none is near.

    Example:
        >>> suggestion("unrecognized arguments: --federation.locl_epochs 1", ["federation.local_epochs", "data.source"])
        '--federation.local_epochs'
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


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def docstring(module: str) -> str | None:
    """Of a module of flsv that is not imported, such as ``"cli/retrain.py"``."""
    return ast.get_docstring(_tree(PACKAGE / module))


def declared(module: str, name: str) -> tuple[str, ...]:
    """The words that a module of flsv says once: the keys of a dictionary, or what is in a tuple or a ``Literal``.

    Example:
        >>> declared("functional/shapley/few_coalitions.py", "Which")
        ('singles', 'pairs', 'leave-one-out', 'both', 'all')
    """
    for node in _tree(PACKAGE / module).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = node.value  # type: ignore[attr-defined]
            words = value.keys if isinstance(value, ast.Dict) else ast.walk(value)
            return tuple(x.value for x in words if isinstance(x, ast.Constant) and isinstance(x.value, str))
    raise LookupError(f"{module} has no {name}")


@cache
def arguments_of(section: str) -> frozenset[str]:
    """Names of the options of a section, of ``model`` those of the ready-made one; empty where nobody knows them.

    Example:
        >>> "max_epochs" in arguments_of("trainer"), "local_epochs" in arguments_of("federation")
        (True, True)
    """
    found = section_class(section)
    return frozenset() if found is None else frozenset(annotations_of(constructor_of(found)))


def argument_texts(section: str) -> dict[str, str]:
    """Of each option its text in the class's or its constructor's documentation, in that order.

    Example:
        >>> argument_texts("federation")["local_epochs"]
        "passes over a client's data per round."
    """
    found = section_class(section)
    made = None if found is None else constructor_of(found)
    told = "\n".join(ast.get_docstring(each) or "" for each in (found, made) if each is not None)
    texts: dict[str, str] = {}
    for part in re.findall(r"^Args:\n((?:(?: {4}.*)?\n|(?: {4}.*)?$)+)", told, re.MULTILINE):
        for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*|\n(?=\n* {8}))*)", part, re.MULTILINE):
            texts.setdefault(name, " ".join(text.split()))
    return {name: text for name, text in texts.items() if name in arguments_of(section)}


def section_class(section: str) -> ast.ClassDef | None:
    """The class whose constructor's arguments are a section's options; None where its file is not found."""
    package, file, kind = _SECTIONS[section]
    spec = importlib.util.find_spec(package)
    paths = [Path(folder, file) for folder in ((spec.submodule_search_locations if spec else None) or ())]
    return next((class_in(path, kind) for path in paths if path.is_file()), None)


def class_in(file: Path, name: str) -> ast.ClassDef | None:
    """A class of a file, as it is written."""
    found = (node for node in ast.walk(_tree(file)) if isinstance(node, ast.ClassDef) and node.name == name)
    return next(found, None)


def constructor_of(found: ast.ClassDef) -> ast.FunctionDef | None:
    """Its own; None where it has none."""
    made = (each for each in found.body if isinstance(each, ast.FunctionDef) and each.name == "__init__")
    return next(made, None)


def annotations_of(made: ast.FunctionDef | None) -> dict[str, ast.expr | None]:
    """The arguments of a constructor but ``self``, and their annotations."""
    given = [] if made is None else [*made.args.posonlyargs, *made.args.args, *made.args.kwonlyargs]
    return {each.arg: each.annotation for each in given if each.arg != "self"}


def check_options(arguments: Iterable[str], own: Iterable[str] = (), sections: Sequence[str] = _OF_FIT) -> None:
    """Refuse an option that a command does not have, and a configuration that there is not.

    Args:
        arguments: of the command line.
        own: options of the command beside those of ``flsv fit``, with their dashes.
        sections: of the configuration that it takes options of.

    Raises:
        SystemExit: 2, as a parser does, when it has said the option, and the nearest that there is.
        ConfigurationError: there is no such configuration.

    Example:
        >>> check_options(["--trainer.max_epochs", "3", "--model.network=mlp"])
        >>> unknown_option(["--trainer.max_epoch", "3"])
        'unrecognized arguments: --trainer.max_epoch 3. Did you mean --trainer.max_epochs?'
    """
    given = [*arguments]
    said = unknown_option(given, own, sections)
    if said is not None:
        print(f"flsv: error: {said}", file=sys.stderr)
        raise SystemExit(2)
    for word, after in zip(given, [*given[1:], ""]):
        option, is_one, value = word.partition("=")
        if option in ("-c", *_CONFIGS) and _PLAIN.fullmatch(value if is_one else after):  # else it is YAML itself
            find_config(value if is_one else after)


def unknown_option(arguments: Sequence[str], own: Iterable[str] = (), sections: Sequence[str] = _OF_FIT) -> str | None:
    """What is wrong with the first option that there is not, in words; None where there are all."""
    known = [f"{section}.{name}" for section in sections for name in sorted(arguments_of(section))]
    others = {*(_OPTIONS if sections == _OF_FIT else ("config", "help")), *(each.lstrip("-") for each in own)}
    for word, after in zip(arguments, [*arguments[1:], "--"]):
        if not word.startswith("--") or word == "--":
            continue
        name = word[2:].partition("=")[0]
        section, _, rest = name.partition(".")
        argument = rest.partition(".")[0].rstrip("+")
        if section in others or name in others or (section in sections and _is_argument(section, argument)):
            continue
        said = f"unrecognized arguments: {word}" + ("" if after.startswith("--") or "=" in word else f" {after}")
        near = suggestion(said, [*known, *sections, *sorted(others)])
        now = new_name(OWNERS.get(section, ""), argument)
        return now or f"{said}.{f' Did you mean {near}?' if near else ''}"
    return None


def _is_argument(section: str, name: str) -> bool:
    """Whether a section of the configuration has it, as far as that is known."""
    names = arguments_of(section)
    return not name or not names or name in names or name == "help"
