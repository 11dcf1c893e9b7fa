"""Whose turn it was when a round failed: an error of a client's own code names the client and the round."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def where(client: int | None, round_index: int) -> str:
    """A place in a federation, in words; both counted from 0.

    Example:
        >>> where(2, 5)
        'while client 2 trained in round 5'
    """
    who = "at the server" if client is None else f"while client {client} trained"
    return f"{who} in round {round_index}"


def name_place(error: BaseException, place: str) -> None:
    """Add the place to what an error says; its type stays, for those who catch it."""
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(f"flsv: {place} (both counted from 0)")
    elif len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} ({place})",)


def no_stop_iteration(function: Callable[..., Any], place: Callable[[], str]) -> Callable[..., Any]:
    """``function``, but a StopIteration that leaves it is an error, as from a generator (PEP 479).

    Lightning takes it for the end of the epoch, or of the step, and goes on as if all were done.
    """

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except StopIteration as error:
            raise RuntimeError(f"training_step raised StopIteration {place()}.") from error

    return guarded
