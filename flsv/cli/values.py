"""What options are given, checked by the annotations in the source, without importing torch.

A word where a number is expected, a class that there is not, an argument that a class does not have: this is said in a
moment. Whatever the source of flsv and of Lightning's Trainer alone does not decide (a class of another package, a type
that is named elsewhere, a range) passes: the parser has the last word, and takes seconds to import what it needs.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flsv.cli.classes import arguments_of_class, classes, has_fields, is_a, literals, named, no_class
from flsv.cli.command import check_there
from flsv.cli.configs import check_file, find_config
from flsv.cli.names import annotations_of, constructor_of, section_class, unknown_option
from flsv.errors import ConfigurationError

_TRUE_OR_FALSE = ("true", "false", "yes", "no", "on", "off")


@dataclass(frozen=True)
class Wrong:
    """What is wrong with a value.

    Args:
        path: below the option, such as ``("init_args", "lr")``.
        said: what is expected there, or what there is not.
    """

    path: tuple[str, ...]
    said: str

    def below(self, *names: str) -> Wrong:
        return Wrong((*names, *self.path), self.said)


@dataclass
class Chosen:
    """What earlier files and options have put at a place: the class's name, and what is below."""

    kind: str | None = None
    below: dict[str, Chosen] = field(default_factory=dict)

    def put(self, value: Any) -> None:
        """A later value, as YAML has it."""
        if isinstance(value, str):
            self.kind = value.rpartition(".")[2]
        elif isinstance(value, Mapping):
            if isinstance(path := value.get("class_path"), str):
                self.kind = path.rpartition(".")[2]
            inner = value.get("init_args") if "class_path" in value else value
            for name, each in inner.items() if isinstance(inner, Mapping) else ():
                self.at((str(name),)).put(each)

    def at(self, path: Sequence[str]) -> Chosen:
        """What is there, empty where nothing was."""
        here = self
        for name in path:
            if name != "init_args":
                here = here.below.setdefault(name, Chosen())
        return here


def check_values(arguments: Iterable[str], sections: Sequence[str], one: bool = True) -> None:
    """Check what a command line's options, and the files that it names, give the sections of a configuration.

    Args:
        arguments: of the command line.
        sections: that the command has.
        one: whether all files are of one configuration; else each is of one of its own.

    Raises:
        ConfigurationError: a value is none of the annotated type; there is no such class, or it has no such argument.

    Example:
        >>> check_values(["--federation.local_epochs", "abc"], ["federation"])
        Traceback (most recent call last):
        ...
        flsv.errors.ConfigurationError: --federation.local_epochs abc: expected a whole number.
    """
    chosen = Chosen()
    for option, value in _given(arguments):
        section, *path = option.split(".")
        if option in ("config", "base", "c"):
            content = _content(value)
            _check_file(content, value, sections)
            if one:
                chosen.put(content)
        elif option == "ckpt_path":
            check_there(value)
        elif section in sections and path:
            known = chosen.at([section])
            wrong = _of_section(section, path, value, known)
            if wrong is not None:
                place = ".".join((option, *wrong.path[len(path) :])) if len(wrong.path) > len(path) else option
                raise ConfigurationError(f"--{place} {value}: {wrong.said}")
            known.at(path).put(_plain(value))
        elif section == "model" and section in sections:
            chosen.at([section]).put(_plain(value))


def check_class(option: str, value: str, base: str) -> None:
    """Check that a value names a class of flsv, or may name one of another package.

    Raises:
        ConfigurationError: there is none of this name.
    """
    said = no_class(value, base)
    if said is not None:
        raise ConfigurationError(f"{option} {value}: {said}")


def _given(arguments: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Options without their dashes, and values."""
    words = [*arguments]
    for word, after in zip(words, [*words[1:], "--"]):
        option, is_one, value = word.partition("=")
        if option.startswith("--") or option == "-c":
            value = value if is_one else after
            if not value.startswith("--"):
                yield option.lstrip("-"), value


def _content(given: str) -> Mapping[str, Any]:
    """Of a configuration file; empty where the parser is to say what is wrong with it, and for YAML itself."""
    try:
        path = find_config(given)
    except (ConfigurationError, OSError):
        return {}
    check_file(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, Mapping) else {}


def _check_file(content: Mapping[str, Any], file: str, sections: Sequence[str]) -> None:
    for section in sections:
        known, inside = Chosen(), content.get(section)
        if section == "model" and isinstance(inside, Mapping) and isinstance(inside.get("init_args"), Mapping):
            known.put({"class_path": inside.get("class_path")})
            inside = inside["init_args"]
        if isinstance(inside, Mapping) and "class_path" not in inside:
            for name, value in inside.items():
                said = unknown_option([f"--{section}.{name}"], (), sections)
                if said is not None and section != "model":
                    raise ConfigurationError(f"{file}: {said}")
                wrong = _of_section(section, [str(name)], value, known)
                if wrong is not None:
                    place = ".".join((section, *wrong.path))
                    raise ConfigurationError(f"{file}: {place}: {wrong.said}")


def _of_section(section: str, path: Sequence[str], value: Any, known: Chosen) -> Wrong | None:
    found = section_class(section)
    if found is None or (section == "model" and known.kind not in (None, found.name)):
        return None  # the user's own module
    name = path[0].rstrip("+")
    annotation = annotations_of(constructor_of(found)).get(name)  # that there is such a name is checked elsewhere
    if annotation is None:
        return None
    if path[0].endswith("+") and not isinstance(_plain(value), list):  # one more of a list, if it can be nothing else
        kinds = [each for each in _members(annotation) if named(each) != "None"]
        only = kinds[0] if len(kinds) == 1 else None
        annotation = only.slice if isinstance(only, ast.Subscript) and named(only) == "list" else None
    wrong = _below(annotation, path[1:], value, known.at([name]))
    return None if wrong is None else wrong.below(path[0])


def _below(annotation: ast.expr | None, path: Sequence[str], value: Any, known: Chosen) -> Wrong | None:
    """What is wrong with a value at a path below an argument of this annotation; None where nothing is, or nobody can
    tell."""
    if not path:
        return _misfit(annotation, value)
    for each in _members(annotation):
        inside = each.slice if isinstance(each, ast.Subscript) else None
        if named(each) in ("dict", "Mapping") and isinstance(inside, ast.Tuple):
            wrong = _below(inside.elts[1], path[1:], value, known.at(path[:1]))
            return None if wrong is None else wrong.below(path[0])
        if named(each) in classes():
            kind = named(each) if has_fields(named(each)) else ""
            if known.kind in classes() and is_a(known.kind or "", named(each)):
                kind = known.kind or ""
            return _of_class(kind, path, value, known)
    return None


def _of_class(kind: str, path: Sequence[str], value: Any, known: Chosen) -> Wrong | None:
    """Likewise below an object of this class of flsv; "": nobody knows of which."""
    if path[0] == "init_args" and len(path) > 1:
        wrong = _of_class(kind, path[1:], value, known)
        return None if wrong is None else wrong.below(path[0])
    if not kind or path[0] in ("class_path", "init_args", "dict_kwargs", "help"):
        return None
    arguments, more = arguments_of_class(kind)
    name = path[0].rstrip("+")
    if name in arguments:
        wrong = _below(arguments[name], path[1:], value, known.at([name]))
        return None if wrong is None else wrong.below(path[0])
    if more:
        return None
    near = difflib.get_close_matches(name, arguments, 1)
    hint = f" Did you mean {near[0]}?" if near else f" It takes {', '.join(arguments) or 'none'}."
    return Wrong((path[0],), f"{kind} has no argument {name}.{hint}")


def _misfit(annotation: ast.expr | None, value: Any) -> Wrong | None:
    """Whether a value, a text of the command line or what a file has, is none of what is annotated."""
    found: list[Wrong] = []
    for each in _members(annotation):
        wrong = _misfit_of_one(each, value)
        if wrong is None:
            return None
        found.append(wrong)
    deepest = max(found, key=lambda wrong: len(wrong.path), default=None)
    if deepest is None or deepest.path:
        return deepest
    told = [wrong for wrong in found if not wrong.said.startswith("expected ")]
    if told:
        return told[0]
    said = dict.fromkeys(wrong.said.removeprefix("expected ") for wrong in found if wrong.said != "expected null")
    return Wrong((), f"expected {' or '.join(said or ['null'])}.")


def _misfit_of_one(annotation: ast.expr, value: Any) -> Wrong | None:
    name, plain = named(annotation), _plain(value)
    if name == "None":
        return None if plain is None else Wrong((), "expected null")
    if plain is None:  # the parser knows whether that will do
        return None
    if name in ("int", "float"):
        number = _number(plain)
        good = number is not None and (name == "float" or number == number // 1)
        return None if good else Wrong((), f"expected a {'whole ' if name == 'int' else ''}number")
    if name == "bool":
        good = isinstance(plain, int) or str(plain).lower() in _TRUE_OR_FALSE
        return None if good else Wrong((), "expected true or false")
    if name == "Literal" and isinstance(annotation, ast.Subscript):
        words = [each.value for each in ast.walk(annotation.slice) if isinstance(each, ast.Constant)]
        good = value in words or plain in words
        return None if good else Wrong((), f"expected one of {', '.join(map(str, words))}")
    if name in ("list", "dict", "Mapping") and isinstance(annotation, ast.Subscript):
        return _misfit_inside(annotation.slice, plain)
    if name in classes():
        return _no_object(name, value, plain)
    return None


def _misfit_inside(element: ast.expr, plain: Any) -> Wrong | None:
    """Of the elements of a list, or the values of a dictionary."""
    of_values = element.elts[1] if isinstance(element, ast.Tuple) else element
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(plain, list) and of_values is element:
        parts = enumerate(plain)
    elif isinstance(plain, Mapping) and of_values is not element:
        parts = plain.items()
    for key, each in parts:
        if not isinstance(each, str) or named(of_values) in classes():
            wrong = _misfit(of_values, each)
            if wrong is not None:
                return wrong.below(str(key))
    return None


def _no_object(base: str, value: Any, plain: Any) -> Wrong | None:
    """Whether a value makes no object of a class of flsv."""
    if isinstance(plain, str):
        said = None if Path(plain).is_file() else no_class(plain, base)
        return None if said is None else Wrong((), said)
    if not isinstance(plain, Mapping):
        return None
    path, inner = plain.get("class_path"), plain.get("init_args")
    if path is None and has_fields(base):
        path, inner = base, plain
    elif not isinstance(path, str):
        return None
    elif (said := no_class(path, base)) is not None:
        return Wrong(("class_path",), said)
    kind = path.rpartition(".")[2]
    for name, each in inner.items() if isinstance(inner, Mapping) and kind in classes() else ():
        known = Chosen()
        known.put(each)
        wrong = _of_class(kind, [str(name)], each, known)
        if wrong is not None:
            return wrong if inner is plain else wrong.below("init_args")
    return None


def _members(annotation: ast.expr | None) -> list[ast.expr]:
    """Of a union, else the annotation itself; none where there is none."""
    if annotation is None:
        return []
    annotation = literals().get(named(annotation), annotation)
    if isinstance(annotation, ast.BinOp):
        return [*_members(annotation.left), *_members(annotation.right)]
    if isinstance(annotation, ast.Subscript) and named(annotation) in ("Optional", "Union"):
        inside = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        return [*(each for part in inside for each in _members(part))] + (
            [ast.Constant(None)] if named(annotation) == "Optional" else []
        )
    return [annotation]


def _plain(value: Any) -> Any:
    """A text of the command line as YAML; all else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value)
    except (ValueError, yaml.YAMLError):  # the former of a date that there is not
        return value


def _number(plain: Any) -> float | None:
    try:
        return float(plain)
    except (TypeError, ValueError):
        return None
