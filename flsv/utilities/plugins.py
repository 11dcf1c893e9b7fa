"""Functions that find the components of other packages."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any

from flsv.utilities.errors import check_lightning


@cache
def installed(group: str, base: type = object) -> tuple[Any, ...]:
    """Return the classes that installed packages register as entry points of ``group``."""
    classes = []
    for entry in entry_points(group=group):
        try:
            classes.append(_load_class(entry, base))
        except Exception as error:  # importing runs another package's code
            package = entry.module if entry.dist is None else entry.dist.name
            warnings.warn(
                f"{package} provides {entry.value} as one of {group}, but it cannot be loaded: {type(error).__name__}: "
                f"{error}. Update the package, or remove it.",
                stacklevel=2,
            )
    return tuple(classes)


def _load_class(entry: EntryPoint, base: type) -> Any:
    loaded_object = entry.load()
    if not isinstance(loaded_object, type) or not issubclass(loaded_object, base):
        raise TypeError(f"expected a subclass of {base.__module__}.{base.__qualname__}")
    return loaded_object


def import_error_text(path: str) -> str:
    """Return a sentence on why the module of the class at ``path`` cannot be imported, or "" if it can.

    Raises:
        ConfigurationError: the class is of the package ``pytorch_lightning`` instead of ``lightning``.
    """
    module_name, _, class_name = path.rpartition(".")
    package, _, _ = module_name.partition(".")
    if not module_name:
        return ""
    try:
        if find_spec(package) is None:
            return ""
        module = import_module(module_name)
    except Exception as error:  # importing runs the user's code
        return f" {module_name} cannot be imported ({type(error).__name__}: {error})."
    if hasattr(module, class_name):
        check_lightning(getattr(module, class_name))  # raises for a class of pytorch_lightning
    return ""
