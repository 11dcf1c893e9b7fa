"""Recognises objects of the package ``pytorch_lightning``, which are no instances of ``lightning``'s classes."""

from __future__ import annotations

import importlib
import re
from typing import Any

from flsv.errors import ConfigurationError

OLD, NEW = "pytorch_lightning", "lightning.pytorch"


def check_package(value: Any, what: str) -> None:
    """Refuse an object whose class comes of the package ``pytorch_lightning``.

    Args:
        value: anything.
        what: it is, for the message, such as ``"the data module"``.

    Raises:
        ConfigurationError: which package is expected, and the line to change.
    """
    base = old_base(type(value))
    if base is not None:
        raise ConfigurationError(f"{what}: {_said(type(value), base)}")


def old_base(kind: type) -> type | None:
    """The class of ``pytorch_lightning`` that a class inherits from, or is; None for one that is of ``lightning``."""
    packages = [base.__module__.partition(".")[0] for base in kind.__mro__]
    if OLD not in packages or NEW.partition(".")[0] in packages:
        return None
    return kind.__mro__[packages.index(OLD)]


def old_class_named(text: str) -> str | None:
    """What to say if a text names a class of ``pytorch_lightning`` by its import path; None if it does not.

    Example:
        >>> old_class_named("callbacks: pytorch_lightning.callbacks.Timer is no subclass of Callback")
        'pytorch_lightning.callbacks.Timer is of another package than flsv: write lightning.pytorch.callbacks.Timer.'
    """
    for path in dict.fromkeys(re.findall(r"[A-Za-z_]\w*(?:\.\w+)+", text)):
        if path.startswith(f"{OLD}."):
            return f"{path} is of another package than flsv: write {NEW}{path.removeprefix(OLD)}."
        module, _, name = path.rpartition(".")
        try:
            kind = getattr(importlib.import_module(module), name)
        except Exception:  # a word with a dot in it, or a module that cannot be imported: there is nothing to say of it
            continue
        base = old_base(kind) if isinstance(kind, type) else None
        if base is not None:
            return _said(kind, base)
    return None


def _said(kind: type, base: type) -> str:
    where = f"where {kind.__name__} is defined" if kind is not base else "where it is made"
    return (
        f"{kind.__name__} is a {base.__module__}.{base.__name__}, of the package {OLD}, and flsv works with the "
        f"package lightning. Write `import {NEW} as pl` {where}, in place of `import {OLD} as pl` (and likewise "
        f"`from {NEW} import ...`)."
    )
