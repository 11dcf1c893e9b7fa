"""Whose turn it was when a round failed: an error of a client's own code names the client and the round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from flsv.data.groups import client_called


def where(client: int | None, round_index: int, names: Sequence[str] = ()) -> str:
    """A place in a federation, in words; both counted from 0.

    Args:
        client: its number; None: none.
        round_index: the round.
        names: of the clients.

    Example:
        >>> where(2, 5)
        'while client 2 trained in round 5'
        >>> where(1, 5, ("Boston", "Lyon"))
        "while client 1 ('Lyon') trained in round 5"
    """
    who = "at the server" if client is None else f"while {client_called(client, names)} trained"
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
