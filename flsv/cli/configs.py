"""Functions that find packaged configuration files and check a file's keys."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from flsv.utilities.errors import ConfigurationError, listed, nearest

_PACKAGE = Path(__file__).parents[1]
#: In a wheel the files are within the package. In a checkout (an editable install) they are beside it.
FOLDER = next(
    folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir()
)


def packaged_names() -> list[str]:
    """Return the names of all packaged configurations, algorithms first.

    Example:
        >>> names = packaged_names()
        >>> "quickstart" in names, "scenarios/guo_noisy" in names
        (True, True)
    """
    names = []
    for path in FOLDER.rglob("*.yaml"):
        relative_path = path.relative_to(FOLDER)
        names.append(relative_path.with_suffix("").as_posix())
    return sorted(names, key=lambda name: ("/" in name, name))


def find_config(name: str) -> Path:
    """Return the file that ``--config`` names: a path, with or without ``.yaml``, or a packaged configuration.

    Example:
        >>> find_config("scenarios/guo_noisy").name
        'guo_noisy.yaml'
    """
    for path in (Path(name), Path(f"{name}.yaml")):
        if path.is_file():
            return path
    names = packaged_names()
    if name in names:
        return FOLDER / f"{name}.yaml"

    files_here = [str(path) for path in Path().glob("*.yaml")]
    known_names = [*map(_without_suffix, files_here), *names]
    hint = nearest(_without_suffix(name), known_names)
    if not hint:
        hint_of_folder = " No YAML file is in this folder."
        if files_here:
            hint_of_folder = f" Here are {listed(files_here)}."
        hint = f"{hint_of_folder} With flsv come {listed(names)}, see configs/README.md."
    raise ConfigurationError(f"there is no configuration file {name}.{hint}")


def _without_suffix(file: str) -> str:
    return file.removesuffix(".yaml")


def config_files(words: Sequence[str]) -> list[Path]:
    """Return the configuration files that a command line names, without those that it holds as text.

    Raises:
        ConfigurationError: a file does not exist.
    """
    files = []
    for option, following_word in pairwise([*words, ""]):
        name, equals_sign, value = option.partition("=")
        if name not in ("--config", "-c"):
            continue
        if not equals_sign:
            value = following_word
        is_yaml_text = "{" in value or "\n" in value
        if value and not is_yaml_text:
            files.append(find_config(value))
    return files


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """YAML loader that refuses duplicate keys of a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name = str(key.value)
            line = key.start_mark.line + 1
            if name in lines:
                raise ConfigurationError(
                    f"line {line}: the key {name!r} is in line {lines[name]} already. Remove one of them."
                )
            lines[name] = line
        return super().construct_mapping(node, deep)


def check_file(path: Path) -> Any:
    """Read a YAML file, and refuse one that is not valid, or has a key twice."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (ConfigurationError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}{_explain(error)}.") from None


def _explain(error: yaml.YAMLError) -> str:
    """Return the line of an error in a file, the problem and advice."""
    # A character that YAML forbids has neither a mark nor a problem.
    mark = getattr(error, "problem_mark", None)
    line = "" if mark is None else f", line {mark.line + 1}"
    problem = getattr(error, "problem", None) or " ".join(str(error).split())  # in one line
    return f"{line}: this is not valid YAML: {problem}"
