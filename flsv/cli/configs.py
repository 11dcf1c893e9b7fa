"""Configuration files: functions that find the files that come with flsv, and that check files for misspelt names."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import yaml

from flsv.utilities.errors import ConfigurationError

_PACKAGE = Path(__file__).parents[1]
#: In a wheel the files are within the package; in a checkout (an editable install) beside it.
FOLDER = next(folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir())


def packaged_names() -> list[str]:
    """Return the names of all packaged configurations: algorithms first, then ``natural/...`` and ``scenarios/...``.

    Example:
        >>> names = packaged_names()
        >>> "quickstart" in names, "scenarios/guo_noisy" in names
        (True, True)
    """
    names = [path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml")]
    return sorted(names, key=lambda name: ("/" in name, name))


def find_config(given: str) -> Path:
    """Return the file that a ``--config`` refers to.

    An existing file has precedence, first the path ``given``, then ``given`` with ``.yaml`` added. So a copy that
    ``flsv init`` has made is used in place of the packaged file. A text that ends in ``.yaml`` is always a path.

    Args:
        given: a path, or a name of :func:`packaged_names`.

    Raises:
        ConfigurationError: there is neither such a file nor such a name; the message lists the five most similar names.

    Example:
        >>> find_config("scenarios/guo_noisy").name
        'guo_noisy.yaml'
    """
    for path in (Path(given), Path(f"{given}.yaml")):
        if path.is_file():
            return path
    names = packaged_names()
    if given in names:
        return FOLDER / f"{given}.yaml"
    bare = given.removeprefix("configs/").removesuffix(".yaml").removesuffix(".yml")
    near = difflib.get_close_matches(bare, names, 5, cutoff=0)
    likely = difflib.get_close_matches(bare, near, 1)
    hint = f" Did you mean --config {likely[0]}, which comes with flsv?" if likely else ""
    raise ConfigurationError(f"there is no configuration file {given}.{hint} Nearest by name: {', '.join(near)}.")


#: Options of a configuration whose value is an object, a list of objects, or a mapping from names to objects.
_PARTS = re.compile(
    r"(federation\.(aggregator|personalizer|sampler|client_algorithm|(metrics|uploads\+?|filters)\.[^.]+)"
    r"|data\.(partitioner|corruptions\.[^.]+))(\.class_path)?"
)


def check_words(args: Sequence[str]) -> None:
    """Check that configuration files and a checkpoint exist and that classes' names are spelled correctly, before
    PyTorch is imported.

    Args:
        args: a subcommand and its arguments.

    Raises:
        ConfigurationError: a file or a class does not exist; the message suggests similar names of a configuration or
            class.

    Example:
        >>> check_words(["fit", "--config", "quickstart", "--federation.metrics.value", "ShadowShaply"])
        Traceback (most recent call last):
        ...
        flsv.utilities.errors.ConfigurationError: federation.metrics.value: there is no ShadowShaply. Did you mean \
ShadowShapley?
    """
    names = _public_names()
    for option, name in _given(args):
        if option == "ckpt_path" and name not in ("last", "best", "null"):
            check_checkpoint(name)
        package, _, kind = name.rpartition(".")
        if _PARTS.fullmatch(option) and kind.isidentifier() and package.split(".")[0] in ("", "flsv"):
            near = difflib.get_close_matches(kind, names, 1, cutoff=0.75)
            if near and kind not in names:
                raise ConfigurationError(f"{option}: there is no {name}. Did you mean {near[0]}?")


def check_checkpoint(path: str) -> None:
    """Raise ConfigurationError if there is no file or folder ``path``; a text with a colon is a URL and not checked."""
    if ":" not in path and not Path(path).exists():
        raise ConfigurationError(f"there is no checkpoint {path}. Name one that is there, or leave ckpt_path out.")


def is_yaml(given: str) -> bool:
    """Return whether a text that was given as a configuration file is YAML itself, not a path or a name."""
    return "{" in given or ": " in given or "\n" in given


def _given(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield ``(option, value as text)`` for the options of a command line and of the configuration files in it."""
    words = [word for each in args for word in (each.split("=", 1) if each.startswith("--") else [each])]
    for name, value in pairwise(words):
        yield name.removeprefix("--"), value
        if name.startswith("--") and is_yaml(value):
            with suppress(yaml.YAMLError):  # the parser says so
                yield from _leaves(yaml.safe_load(value), name.removeprefix("--"))
    files = [value for name, value in pairwise(words) if name in ("-c", "--config") and not is_yaml(value)]
    files += takewhile(lambda word: not word.startswith("-"), words[1:]) if words[:1] == ["data"] else []
    for file in files:
        yield from _leaves(check_file(find_config(file)), "")


def _leaves(node: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield ``(path, text)`` for each text in a nested configuration, with the dotted path of its option."""
    if isinstance(node, str):
        yield path, node
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in entries:
        yield from _leaves(value, f"{path}.{name}".removeprefix("."))


def _public_names() -> set[str]:
    """Return the names of all classes that options may name, including those of other packages, without imports."""
    groups = [group for group in entry_points().groups if group.startswith("flsv.")]
    names = {entry.attr for group in groups for entry in entry_points(group=group)}
    for file in _PACKAGE.glob("**/__init__.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names.update(ast.literal_eval(node.value))
    return names


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses a key that occurs twice in a mapping, because one of its values would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise ConfigurationError(f"line {line}: the key {name!r} is in line {lines[name]} already. Keep one.")
            lines[name] = line
        return super().construct_mapping(node, deep)


def check_file(path: Path) -> Any:
    """Return the content of a YAML file; None if it is not valid YAML, which the parser reports later.

    Raises:
        ConfigurationError: the file is not UTF-8 text, or a key occurs twice in a mapping; the message names the place.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (ConfigurationError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
    except yaml.YAMLError:
        return None
