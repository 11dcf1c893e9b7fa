"""Attributes of other objects, changed for the length of a fit and then put back."""

from __future__ import annotations

import inspect
from typing import Any

_CLASS = object()


class PatchedAttributes:
    """Sets attributes, and remembers what they were.

    Example:
        >>> from types import SimpleNamespace
        >>> trainer = SimpleNamespace(limit=5)
        >>> patched = PatchedAttributes([(trainer, "limit", 1)])
        >>> trainer.limit
        1
        >>> patched.give_back()
        >>> trainer.limit
        5
    """

    def __init__(self, changes: list[tuple[Any, str, Any]] | None = None) -> None:
        # A method is its class's: given to the instance instead, it would be copied and pickled with it.
        self._before = [
            (owner, name, _CLASS if inspect.isroutine(before) and name not in vars(owner) else before)
            for owner, name, before in ((owner, name, getattr(owner, name)) for owner, name, _ in changes or [])
        ]
        for owner, name, value in changes or []:
            setattr(owner, name, value)

    def give_back(self) -> None:
        """Put everything back; a second call does nothing."""
        for owner, name, value in self._before:
            if value is _CLASS:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._before = []
