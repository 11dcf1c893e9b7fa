"""Formats of stored files: which of them this version of flsv reads, and by which versions of packages they are."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from flsv.__about__ import code_version
from flsv.utilities.errors import ConfigurationError, VersionWarning

#: The format of a federation's state in a checkpoint. It grows when its entries change.
CHECKPOINT_FORMAT = 4
#: Packages that a run's numbers depend on, besides flsv.
PACKAGES = ("torch", "lightning")
#: The beginning of a setting's name that tells a package's version.
VERSION_PREFIX = "version of "


def package_versions() -> dict[str, str]:
    """Return ``{package: version}`` of what a run's numbers depend on."""
    version_by_package = {"flsv": code_version()}  # the metadata of a checkout are old
    for package in PACKAGES:
        version_by_package[package] = version(package)
    return version_by_package


def check_format(
    title: str,
    stored_format: Any,
    *,
    expected: int,
    written_by: str | None,
) -> None:
    """Check that this version of flsv reads a stored file.

    Args:
        title: what the file is, as the message's subject.
        stored_format: its number. None: it has none.
        expected: the number that this version reads.
        written_by: the version of flsv that has written the file, if it is known.

    Raises:
        ConfigurationError: the format is not read.
    """
    if stored_format == expected:
        return

    writer = "an older flsv" if written_by is None else f"flsv {written_by}"
    is_newer = isinstance(stored_format, int) and stored_format > expected
    if is_newer:
        remedy = f"install {writer} or a newer one"
    else:
        remedy = f"read it with {writer}, or start a new run"
    raise ConfigurationError(
        f"{title} was written by {writer} in format {stored_format}, and this flsv {code_version()} reads format "
        f"{expected}: {remedy}."
    )


def version_settings() -> dict[str, str]:
    """Return ``{"version of ...": version}`` of what a run's numbers depend on."""
    return {f"{VERSION_PREFIX}{name}": number for name, number in package_versions().items()}


def stored_package_versions(settings: Mapping[str, str]) -> dict[str, str]:
    """Return ``{package: version}`` from settings that :func:`version_settings` is among."""
    stored = {}
    for name, value in settings.items():
        if name.startswith(VERSION_PREFIX):
            stored[name.removeprefix(VERSION_PREFIX)] = value
    return stored


def version_changes(stored_versions: Mapping[str, str]) -> list[str]:
    """Describe the packages whose version is another one than the stored."""
    changes = []
    for name, present in package_versions().items():
        stored = stored_versions.get(name)
        if stored is not None and stored != present:
            changes.append(f"{name} is {present} and was {stored}")
    return changes


def warn_of_versions(title: str, stored_versions: Mapping[str, str]) -> None:
    """Warn of packages whose version is another one than that of the file's writer, since numbers may change."""
    changes = version_changes(stored_versions)
    if not changes:
        return
    message = (
        f"{title} is of other versions ({', '.join(changes)}): from here on numbers may be others than those of a "
        "run with these. For the same numbers go on with the versions that it was."
    )
    warnings.warn(message, VersionWarning, stacklevel=2)
