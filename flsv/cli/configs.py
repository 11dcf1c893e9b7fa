"""Configuration files: those that come with flsv, by name, and what cannot be meant by one."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml

from flsv.errors import ConfigurationError

_PACKAGE = Path(__file__).parents[1]
#: In a wheel they lie within the package; in a checkout (an editable install) beside it.
FOLDER = next(folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir())


def packaged_names() -> list[str]:
    """All names, those of algorithms first, then ``natural/...`` and ``scenarios/...``.

    Example:
        >>> names = packaged_names()
        >>> "quickstart" in names, "scenarios/guo_noisy" in names
        (True, True)
    """
    names = [path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml")]
    return sorted(names, key=lambda name: ("/" in name, name))


def find_config(given: str) -> Path:
    """The file that a ``--config`` means.

    A file that is there comes first: the one named, then the one named with ``.yaml`` added, so that a copy made by
    ``flsv init`` is used in its folder in the place of the packaged one. What ends in ``.yaml`` is a path and nothing
    else.

    Args:
        given: a path, or a name of :func:`packaged_names`.

    Raises:
        ConfigurationError: neither; it lists the five nearest names.

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


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice: one of its values would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise ConfigurationError(f"line {line}: the key {name!r} is in line {lines[name]} already. Keep one.")
            lines[name] = line
        return super().construct_mapping(node, deep)


def check_file(path: Path) -> None:
    """Raise if a YAML file is no text, or has a key twice in one mapping.

    Raises:
        ConfigurationError: the file, and what is wrong with it where.
    """
    try:
        yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (ConfigurationError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
    except yaml.YAMLError:
        return  # the parser says what is wrong
