"""Functions that check arguments, such as names that are safe in paths."""
# Constructors declare the checks of their arguments in annotations, see flsv.utilities.declared.

from __future__ import annotations

import inspect
import math
import re
import reprlib
from collections.abc import Sequence
from typing import Any

from flsv.utilities.errors import ConfigurationError, listed

_PLAIN_NAME = re.compile(r"(?![. ])[^/\\:\x00-\x1f\x7f]{1,100}")


def client_number(client: object, names: Sequence[str]) -> int:
    """Return the id of a client that the user calls by its name or id."""
    text = str(client)
    ids = [number for number, name in enumerate(names) if name == text]
    if len(ids) > 1:
        raise ConfigurationError(
            f"client={client!r}: clients {ids} have this name. Give the number."
        )
    if ids:
        return ids[0]
    if text.isdigit() and int(text) < len(names):
        return int(text)
    raise ConfigurationError(
        f"client={client!r}: the run has no such client. It has {listed(names, 10)}."
    )


def attribute_of(
    part: Any,
    name: str,
    default: Any = None,
) -> Any:
    """Return the attribute ``name`` of an object, or ``default`` if it has none."""
    declaration = inspect.getattr_static(type(part), name, None)
    if isinstance(declaration, property) and declaration.fget is not None:
        return declaration.fget(part)
    return getattr(part, name, default)


def rounded_up(number: float) -> str:
    """Format a positive number with three digits, rounded up, for messages."""
    magnitude = math.floor(math.log10(number))
    step = 10.0 ** (magnitude - 2)  # of the third digit
    rounded = math.ceil(number / step) * step
    if rounded >= 100:
        return f"{rounded:.0f}"
    return f"{rounded:.3g}"


def plain_name(name: str, kind: str = "name") -> str:
    """Return the name, or raise ConfigurationError unless it is a plain file name."""
    if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
        raise ConfigurationError(
            f"{kind} {name!r}: expected a plain name, up to 100 characters without / \\ : and no dot first."
        )
    return name


class ReadOnlyArguments:
    """Mixin that makes the attributes in ``_read_only`` read-only.

    Example:
        >>> class Loop(ReadOnlyArguments):
        ...     _remedy_template = "Use loop.replace({0})."
        ...     def __init__(self, seed):
        ...         self.seed = seed
        ...         self._read_only = frozenset({"seed"})
        >>> Loop(1).seed = 2  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        flsv.utilities.errors.ConfigurationError: Loop.seed = 2 comes too late: ... Use loop.replace(seed=2).
    """

    _read_only: frozenset[str] = frozenset()
    #: The remedy for the error message, in which ``{0}`` stands for the argument and its value.
    _remedy_template: str

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._read_only:
            class_name = type(self).__name__
            value_text = reprlib.repr(value)
            remedy = self._remedy_template.format(f"{name}={value_text}")
            raise ConfigurationError(
                f"{class_name}.{name} = {value_text} comes too late: it is read when a {class_name} is made. {remedy}"
            )
        super().__setattr__(name, value)
