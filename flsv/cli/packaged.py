"""Configurations that come with flsv, by name: ``flsv fit --config quickstart``."""

from __future__ import annotations

import difflib
from os import PathLike
from pathlib import Path

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
