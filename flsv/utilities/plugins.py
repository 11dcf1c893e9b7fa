"""Functions that find the components of other packages."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from flsv.utilities.errors import check_lightning


@cache
def installed(group: str, base: type = object) -> tuple[Any, ...]:
    """Return the classes that installed packages register as entry points of ``group``."""
    classes = []
    for entry in entry_points(group=group):
        try:
            kind = entry.load()
            if not (isinstance(kind, type) and issubclass(kind, base)):
                raise TypeError(f"expected a subclass of {base.__module__}.{base.__qualname__}")
        except Exception as error:  # importing runs another package's code
            package = entry.dist.name if entry.dist is not None else entry.module
            warnings.warn(
                f"{package} brings {entry.value} as one of {group}, and it is left out: {type(error).__name__}: "
                f"{error}. Update the package, or remove it.",
                stacklevel=2,
            )
        else:
            classes.append(kind)
    return tuple(classes)


def why_no_class(path: str) -> str:
    """Describe the error of importing the class at ``path``. Return "" if its module can be imported."""
    module_name, _, name = path.rpartition(".")
    package, _, _ = module_name.partition(".")
    kind = None
    try:
        if module_name and find_spec(package) is not None:
            kind = getattr(import_module(module_name), name, None)
    except Exception as error:  # importing runs the user's code
        return f" {module_name} cannot be imported ({type(error).__name__}: {error})."
    check_lightning(kind)
    return ""
