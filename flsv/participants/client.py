"""Client: a participant as the server sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from flsv.participants.channel import Channel
from flsv.participants.local_data import LocalData, at

T = TypeVar("T")
P = ParamSpec("P")


class Client:
    """A number, and somebody to ask.

    Args:
        id: the client's number.
        data: what it holds.
        channel: counts what crosses; None: nobody counts.

    Example:
        >>> import torch
        >>> data = LocalData("client 3", lambda split: [], torch.tensor([2, 5]), torch.tensor([9, 9]))
        >>> client = Client(3, data)
        >>> client.ask(lambda local: int(local.class_counts.sum()))
        7
        >>> data.class_counts  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        PermissionError: the data of client 3 were asked for outside of it: ...
    """

    def __init__(self, id: int, data: LocalData, channel: Channel | None = None) -> None:
        self.id, self._channel, self.__data = id, channel, data

    def ask(self, question: Callable[Concatenate[LocalData, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``question(local_data, *args, **kwargs)``, answered at the client, whatever it is, on any thread.

        The tensors in the arguments go down, those in the answer go up. What both sides know anyway, such as settings,
        is bound to the question beforehand (``functools.partial``).
        """
        with at(self.__data):
            answer = question(self.__data, *args, **kwargs)
        self._count(question, (args, kwargs), answer)
        return answer

    def _count(self, question: Callable[..., Any], arguments: Any, answer: Any) -> None:
        if self._channel is not None:
            name = getattr(getattr(question, "func", question), "__name__", type(question).__name__)
            self._channel.send(self.id, "down", name, arguments)
            self._channel.send(self.id, "up", name, answer)

    def __repr__(self) -> str:
        return f"Client({self.id})"
