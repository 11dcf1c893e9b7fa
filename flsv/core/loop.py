"""Search for the FederatedLoop among a trainer's callbacks, for packages that cannot import its class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flsv.utilities.errors import ConfigurationError


def is_loop(callback: object) -> bool:
    """Return whether a callback is a FederatedLoop, recognized by a method of its class.

    Example:
        >>> from flsv import FederatedLoop
        >>> is_loop(FederatedLoop()), is_loop("another callback")
        (True, False)
    """
    method = getattr(type(callback), "without_files", None)
    return callable(method)


def find_loop(callbacks: Iterable[object]) -> Any:
    """Return the FederatedLoop among a trainer's callbacks.

    Raises:
        ConfigurationError: no callback is a FederatedLoop.

    Example:
        >>> from flsv import FederatedLoop
        >>> find_loop(["another callback", FederatedLoop(seed=3)]).seed
        3
        >>> find_loop([])
        Traceback (most recent call last):
        ...
        flsv.utilities.errors.ConfigurationError: the Trainer has no FederatedLoop: add one to its callbacks.
    """
    for callback in callbacks:
        if is_loop(callback):
            return callback
    raise ConfigurationError("the Trainer has no FederatedLoop: add one to its callbacks.")
