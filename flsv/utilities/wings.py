"""Parts that wings bring to the core, which imports none of them.

A wing is a package that only some programs need, such as ``flsv.tables``. It says in its file ``wing.yaml`` what it
brings, by kind and name:

    readers:
      tables: flsv.tables.source

The core asks for a kind and a name. It finds what the wings that are installed bring.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import yaml

from flsv.utilities.errors import ConfigurationError, listed

#: The folder of the package, below which the wings lie.
PACKAGE = Path(__file__).parents[1]


@cache
def brought(kind: str) -> dict[str, Any]:
    """Return what all wings bring of a kind, by name.

    Example:
        >>> brought("readers")
        {'tables': 'flsv.tables.source'}
    """
    objects = {}
    for path in sorted(PACKAGE.glob("*/wing.yaml")):
        declared = yaml.safe_load(path.read_text(encoding="utf-8"))
        objects.update(declared.get(kind, {}))
    return objects


def from_wing(kind: str, name: str) -> Any:
    """Import and return the object that a wing brings.

    Raises:
        ConfigurationError: no wing that is installed brings it.
    """
    paths = brought(kind)
    if name not in paths:
        raise ConfigurationError(
            f"{name}: no part of flsv that is installed brings it. Of its kind, {kind}, there are "
            f"{listed(paths) or 'none'}. Install the whole package again, in its checkout: pip install -e ."
        )
    return resolve_name(paths[name])
