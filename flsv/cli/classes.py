"""The classes of flsv, their bases and their constructors' arguments, read off the source without importing torch."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from flsv.cli.names import PACKAGE, annotations_of, class_in, constructor_of

_INNER = re.compile(r"\([^()]*\)")
_CLASS = re.compile(r"^class (\w+)(?:\(((?:[^()]|\([^()]*\))*)\))?:", re.MULTILINE)
_LITERAL = re.compile(r"^(\w+) = (Literal\[[^\]]*\])$", re.MULTILINE)
_NAME = re.compile(r"^(?:(?:class|(?:async )?def) )?(\w+)(?:[(:\[]| *(?::[^=\n]*)?= )", re.MULTILINE)


@cache
def classes() -> Mapping[str, tuple[Path, tuple[str, ...]]]:
    """Each class of flsv, the file that it is in and its bases; without names that there are twice.

    Example:
        >>> classes()["FedAvg"][1]
        ('Aggregator',)
    """
    found: dict[str, list[tuple[Path, tuple[str, ...]]]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name, given in _CLASS.findall(path.read_text(encoding="utf-8")):
            told = [each for each in _INNER.sub("", given).split(",") if "=" not in each]
            bases = [each.partition("[")[0].strip().rpartition(".")[2] for each in told]
            found.setdefault(name, []).append((path, tuple(filter(None, bases))))
    return {name: places[0] for name, places in found.items() if len(places) == 1}


@cache
def literals() -> Mapping[str, ast.expr]:
    """Names for a few words, such as ``Weighting``, and the words; without names that there are twice.

    Example:
        >>> ast.unparse(literals()["Weighting"])
        "Literal['uniform', 'samples', 'fixed', 'aggregation', 'aggregation-fixed']"
    """
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for name, words in _LITERAL.findall(path.read_text(encoding="utf-8")):
            found.setdefault(name, set()).add(words)
    return {name: ast.parse(words.pop(), mode="eval").body for name, words in found.items() if len(words) == 1}


@cache
def _names() -> frozenset[str]:
    """All that a module of flsv defines: an alias, a function and a name that there is twice lead to something, too."""
    return frozenset(name for path in PACKAGE.rglob("*.py") for name in _NAME.findall(path.read_text(encoding="utf-8")))


def is_a(name: str, base: str) -> bool:
    """Whether a class of flsv is, or inherits from, another.

    Example:
        >>> is_a("CumulativeShapley", "ContributionMetric"), is_a("FedAvg", "ContributionMetric")
        (True, False)
    """
    return name == base or any(is_a(each, base) for each in classes().get(name, (None, ()))[1])


@cache
def has_fields(name: str) -> bool:
    """Whether a class is a data class: an option's value may be its fields alone."""
    return any(
        named(each) == "dataclass" or named(getattr(each, "func", None)) == "dataclass"
        for each in _at(name).decorator_list
    )


def _at(name: str) -> ast.ClassDef:
    found = class_in(classes()[name][0], name)
    assert found is not None
    return found


@cache
def arguments_of_class(name: str) -> tuple[Mapping[str, ast.expr | None], bool]:
    """The arguments of a class's constructor with their annotations, and whether there may be more.

    Example:
        >>> arguments, more = arguments_of_class("FedAvg")
        >>> sorted(arguments), more
        (['server_lr', 'weighting'], False)
    """
    node, bases = _at(name), classes()[name][1]
    inherited = [arguments_of_class(each) for each in bases if each in classes()]
    above = {key: each for arguments, _ in reversed(inherited) for key, each in arguments.items()}
    unknown = any(more for _, more in inherited) or any(each not in (*classes(), "ABC", "Generic") for each in bases)
    made = constructor_of(node)
    if made is not None:
        own = annotations_of(made)
        return ({**above, **own}, unknown or not inherited) if made.args.kwarg else (own, False)
    if has_fields(name):
        fields = {
            each.target.id: each.annotation
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        return {**above, **fields}, unknown
    return above, unknown or not inherited


def no_class(path: str, base: str) -> str | None:
    """What is wrong with the name or the path of a class; None where it may lead to one.

    Example:
        >>> no_class("FedAvgg", "Aggregator"), no_class("my_package.Mine", "Aggregator")
        ('there is no class FedAvgg. Did you mean flsv.aggregation.FedAvg?', None)
        >>> no_class("TopK", "Sampler")
        'TopK is no Sampler.'
    """
    module, _, name = path.rpartition(".")
    if not re.fullmatch(r"[\w.]+", path) or (module and not f"{module}.".startswith("flsv.")):
        return None
    if name in classes():
        if is_a(name, base):
            return None
        said = f"{name} is no {base}."
    elif name in _names() or any(
        name == each.value.rpartition(":")[2] for one in distributions() for each in one.entry_points
    ):
        return None
    else:
        said = f"there is no class {name}."
    known = sorted(
        each for each, (path, _) in classes().items() if is_a(each, base) and _shown(each, path) and each != base
    )
    near = difflib.get_close_matches(name, known, 1)
    hint = f" Did you mean {_public(near[0])}?" if near else f" There are {', '.join(known)}." if known else ""
    return f"{said}{hint}"


def _public(name: str) -> str:
    """The path by which users import a class: of the nearest package that names it."""
    path = classes()[name][0]
    for folder in path.parents:
        if folder == PACKAGE or re.search(rf"\b{name}\b", (folder / "__init__.py").read_text(encoding="utf-8")):
            return ".".join((*folder.relative_to(PACKAGE.parent).parts, name))
    return name


def _shown(name: str, path: Path) -> bool:
    """Whether a class is for users."""
    return not name.startswith("_") and path.relative_to(PACKAGE).parts[0] not in ("benchmark", "testing", "cli")


def named(annotation: ast.expr | None) -> str:
    """The last part of a type's name, without what is in brackets."""
    if isinstance(annotation, ast.Subscript):
        return named(annotation.value)
    if isinstance(annotation, ast.Attribute):
        return annotation.attr
    if isinstance(annotation, ast.Constant):
        return str(annotation.value).rpartition(".")[2]
    return annotation.id if isinstance(annotation, ast.Name) else ""
