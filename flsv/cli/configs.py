"""Configuration files: those that come with flsv, by name, and what one takes out of those before it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from flsv.errors import ConfigurationError

_PACKAGE = Path(__file__).parents[1]
#: In a wheel they lie within the package; in a checkout (an editable install) beside it.
FOLDER = next(folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir())

#: Sections of a file; a model may be named by its class alone.
SECTIONS = ("trainer", "model", "data", "federation")
_FORMS: dict[str, Any] = dict.fromkeys(SECTIONS, yaml.MappingNode) | {"model": (yaml.MappingNode, yaml.ScalarNode)}
#: Mappings of parts, which come together; every other mapping is one part.
_SECTIONS = ("", "data", "federation", "federation.metrics", "model", "model.init_args", "trainer")


def packaged_names() -> list[str]:
    """All names, those of algorithms first, then ``natural/...`` and ``scenarios/...``.

    Example:
        >>> names = packaged_names()
        >>> "quickstart" in names, "scenarios/guo_noisy" in names
        (True, True)
    """
    names = [path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml")]
    return sorted(names, key=lambda name: ("/" in name, name))


def config_name(path: str | PathLike[str]) -> str:
    """What a configuration file is called: by its name where it comes with flsv, else as it was given.

    Example:
        >>> config_name(FOLDER / "topk.yaml"), config_name("mine.yaml")
        ('topk', 'mine.yaml')
    """
    whole = Path(path).absolute()
    inside = whole.is_relative_to(FOLDER.absolute())
    return whole.relative_to(FOLDER.absolute()).with_suffix("").as_posix() if inside else str(path)


def find_config(given: str) -> Path:
    """The file that a ``--config`` means.

    A file that is there comes first: the one named, then the one named with ``.yaml`` added, so that a copy made by
    ``flsv init`` is used in its folder in the place of the packaged one. What ends in ``.yaml`` is a path and nothing
    else.

    Args:
        given: a path, or a name of :func:`packaged_names`.

    Raises:
        ConfigurationError: neither; it lists the names.

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
    near = [bare] if bare in names else difflib.get_close_matches(bare, names, 1)
    hint = f" Did you mean --config {near[0]}, which comes with flsv?" if near else ""
    raise ConfigurationError(f"there is no configuration file {given}.{hint} By name: {', '.join(names)}.")


def check_file(path: Path) -> None:
    """Raise if a YAML file cannot be meant: no text, no sections, or a key twice in one mapping: one would be lost.

    Raises:
        ConfigurationError: the file, and what is wrong with it where.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path} is no YAML file: it is not text in UTF-8 ({error}). Save it as that."
        ) from error
    except yaml.YAMLError:
        return  # the parser says what is wrong
    if not isinstance(root, yaml.MappingNode):
        raise ConfigurationError(
            f"{path} has no sections: expected trainer:, model:, data:, federation: and what is in them."
        )
    for key, value in root.value:
        empty = isinstance(value, yaml.ScalarNode) and value.tag == "tag:yaml.org,2002:null"
        if key.value in SECTIONS and (empty or not isinstance(value, _FORMS[key.value])):
            found = "nothing" if empty else "no options by name"
            raise ConfigurationError(
                f"{path}, line {key.start_mark.line + 1}: {key.value} has {found}. Give its options, or leave it out."
            )
    _check_keys(path, root)


def _check_keys(path: Path, node: yaml.Node, around: Sequence[yaml.Node] = ()) -> None:
    """Raise where a mapping has a key twice, or an alias stands within what it stands for."""
    if node in around:
        raise ConfigurationError(f"{path}, line {node.start_mark.line + 1}: an alias stands within what it stands for.")
    inner = node.value if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        inner = [value for _, value in node.value]
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise ConfigurationError(
                    f"{path}, line {line}: the key {name!r} is in line {lines[name]} already, and one of them would be "
                    "lost. Keep one."
                )
            lines[name] = line
    for value in inner:
        _check_keys(path, value, (*around, node))


def overridden(files: Iterable[tuple[str, Any]]) -> list[str]:
    """What later files say otherwise than earlier ones, a line each.

    Args:
        files: name and content, in the order in which they are read.

    Example:
        >>> adam = {"federation": {"aggregator": {"class_path": "FedAdam", "init_args": {"lr": 0.1}}}}
        >>> mean = {"federation": {"aggregator": "flsv.aggregation.FedAvg"}}
        >>> overridden([("adam", adam), ("mean", mean)])
        ['federation.aggregator is FedAvg (mean) and no longer FedAdam(lr=0.1) (adam).']
    """
    lines: list[str] = []
    held: list[tuple[str, str, Any]] = []
    for name, content in files:
        for path, value in _parts(content):
            if path.endswith("+"):  # added to the list of the files before, in whose place a later file may put another
                held.append((path[:-1], name, value))
                continue
            for entry in list(held):
                known, of, before = entry
                if known.startswith(f"{path}.") or (known == path and _differ(before, value)):
                    held.remove(entry)
                    lines.append(f"{known} is {_short(value)} ({name}) and no longer {_short(before)} ({of}).")
            held.append((path, name, value))
    return lines


def _parts(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if path in _SECTIONS and isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _parts(inner, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def _differ(before: Any, now: Any) -> bool:
    """Whether something that was said is said otherwise; arguments of one class come together."""
    (kind, theirs), (other, ours) = _object(before), _object(now)
    if not (theirs is None or ours is None):
        both = theirs.keys() & ours.keys()
        return bool(kind and other and kind != other) or any(_differ(theirs[name], ours[name]) for name in both)
    return bool(before != now)


def _object(value: Any) -> tuple[str, dict[str, Any] | None]:
    """Name of a class and the arguments that are said; None in their place for what is no object."""
    if isinstance(value, str) and value.replace(".", "_").isidentifier() and _last(value)[:1].isupper():
        return _last(value), {}
    if isinstance(value, Mapping) and value and value.keys() <= {"class_path", "init_args"}:
        return _last(value.get("class_path", "")), dict(value.get("init_args") or {})
    return "", None


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _short(value: Any) -> str:
    kind, arguments = _object(value)
    if arguments is None:
        return "null" if value is None else str(value)
    said = ", ".join(f"{name}={_short(inner)}" for name, inner in arguments.items())
    return f"{kind}({said})" if said else kind
