"""Client: a participant as the server sees it; Channel: counts everything that crosses between them, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from flsv.core.local_data import LocalData, opened
from flsv.core.ranks import ClientPlacement

Direction = Literal["up", "down"]


class Traffic(NamedTuple):
    """The size of a message: entries of tensors, and bytes."""

    numbers: int = 0
    bytes: float = 0.0

    def __add__(self, other: object) -> Traffic:
        assert isinstance(other, Traffic)
        return Traffic(self.numbers + other.numbers, self.bytes + other.bytes)


@dataclass(frozen=True)
class Message:
    """One counted message: client, direction, name and size."""

    client: int
    direction: Direction
    name: str
    traffic: Traffic


class Channel:
    """Counts what crosses within a round.

    Tensors count, with all their entries; a message's few plain numbers (ids, sizes, a loss) do not. What crosses is an
    instruction or an update, or a question or its answer (:meth:`flsv.core.Client.ask`).

    Example:
        >>> channel = Channel()
        >>> channel.send(3, "down", "start", torch.zeros(10))
        >>> channel.send(3, "up", "update", torch.zeros(10), Traffic(4, 9.0))  # compressed
        >>> channel.numbers([3, 5], "up").tolist(), channel.bytes([3, 5], "down").tolist()
        ([4, 0], [40.0, 0.0])
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._muted = False

    def send(self, client: int, direction: Direction, name: str, content: Any, traffic: Traffic | None = None) -> None:
        """Count what crosses.

        Args:
            client: to whom, or from whom.
            direction: ``"down"`` to the client or ``"up"`` to the server.
            name: of what crosses.
            content: a tensor, or whatever holds tensors.
            traffic: how large it is on its way, where that is not the size of its tensors.
        """
        traffic = measured(content) if traffic is None else traffic
        if traffic.numbers and not self._muted:
            self.messages.append(Message(client, direction, name, traffic))

    def begin_round(self) -> None:
        """Forget what has crossed so far."""
        self.messages = []

    def pop_since(self, first: int) -> list[tuple[int, Direction, str, int, float]]:
        """The messages from a place on, as plain values, which count elsewhere: see :meth:`prepend`."""
        plain = [(each.client, each.direction, each.name, *each.traffic) for each in self.messages[first:]]
        del self.messages[first:]
        return plain

    def prepend(self, plain: Sequence[tuple[int, Direction, str, int, float]]) -> None:
        """Messages that have crossed before those of this round, and count to it."""
        self.messages[:0] = [Message(client, way, name, Traffic(n, size)) for client, way, name, n, size in plain]

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within it nothing counts: for what a simulation looks at, and no federation would."""
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    def numbers(self, clients: Sequence[int], direction: Direction) -> Tensor:
        """int64 ``[k]``: entries of tensors that crossed between the server and each of these clients."""
        totals = self._totals(direction)
        return torch.tensor([totals.get(client, Traffic()).numbers for client in clients], dtype=torch.long)

    def bytes(self, clients: Sequence[int], direction: Direction) -> Tensor:
        """float64 ``[k]``: the same in bytes."""
        totals = self._totals(direction)
        return torch.tensor([totals.get(client, Traffic()).bytes for client in clients], dtype=torch.float64)

    def names(self) -> set[tuple[Direction, str]]:
        """The names of all that has crossed in this round."""
        return {(message.direction, message.name) for message in self.messages}

    def _totals(self, direction: Direction) -> dict[int, Traffic]:
        totals: dict[int, Traffic] = {}
        for message in self.messages:
            if message.direction == direction:
                totals[message.client] = totals.get(message.client, Traffic()) + message.traffic
        return totals


def measured(content: Any) -> Traffic:
    """The tensors in something, as they are."""
    total = Traffic()
    for tensor in _tensors(content):
        total += Traffic(tensor.numel(), float(tensor.numel() * tensor.element_size()))
    return total


def _tensors(content: Any) -> Iterator[Tensor]:
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, Mapping):
        for part in content.values():
            yield from _tensors(part)
    elif isinstance(content, (list, tuple)):
        for part in content:
            yield from _tensors(part)
    elif is_dataclass(content) and not isinstance(content, type):
        for field in fields(content):
            yield from _tensors(getattr(content, field.name))


T = TypeVar("T")
P = ParamSpec("P")


class NoAnswer(RuntimeError):
    """A remote client did not answer a question: it is away, late, or failed."""


class Client:
    """A client's number, and a way to ask it questions.

    Args:
        id: the client's number.
        data: what it holds.
        channel: counts what crosses; None: nobody counts.
        owners: which of several processes the client is in; None: there is one.

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

    def __init__(
        self, id: int, data: LocalData, channel: Channel | None = None, owners: ClientPlacement | None = None
    ) -> None:
        self.id, self._channel, self._owners, self.__data = id, channel, owners, data

    def ask(self, question: Callable[Concatenate[LocalData, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``question(local_data, *args, **kwargs)`` at the client and return its answer; from any thread.

        The tensors in the arguments go down, those in the answer go up. What both sides know anyway, such as settings,
        is bound to the question beforehand (``functools.partial``). With clients in several processes the question is
        answered in the client's, and all of them get the answer: then all of them ask, on one thread, or within
        :func:`map_clients`.

        Raises:
            NoAnswer: a client at a site of its own was asked, and is away.
        """
        owners, answer = self._owners, None
        if owners is None or owners.has(self.id):
            with opened(self.__data):
                answer = question(self.__data, *args, **kwargs)
        elif owners.conversing:
            raise RuntimeError(f"client {self.id} was asked {_name(question)!r} within a conversation with another.")
        if owners is not None and not owners.conversing:
            answer = owners.ranks.broadcast(
                owners[self.id], answer, f"client {self.id}'s answer to {_name(question)!r}"
            )
        self._count(question, (args, kwargs), answer)
        return answer  # type: ignore[return-value]

    def take_back(self) -> None:
        """Undo what the last question changed in the client's state, because its answer is discarded.

        For a client at a site of its own, which may have answered what never came. In one process there is nothing that
        comes late, and nothing happens.
        """

    def _count(self, question: Callable[..., Any], arguments: Any, answer: Any) -> None:
        if self._channel is not None:
            name = _name(question)
            self._channel.send(self.id, "down", name, arguments)
            self._channel.send(self.id, "up", name, answer)

    def __repr__(self) -> str:
        return f"Client({self.id})"


def _name(question: Callable[..., Any]) -> str:
    return getattr(getattr(question, "func", question), "__name__", type(question).__name__)


def map_clients(
    clients: Sequence[Client],
    conversation: Callable[[Client], T],
    map: Callable[[Callable[[Client], T], Sequence[Client]], Iterable[T]] = map,
) -> list[T]:
    """``[conversation(client) for client in clients]``: what the server finds out of clients, one by one.

    With clients in several processes, each of these has the conversations with its own clients and tells the others
    what has come of them, so that they cost as much time as the longest share.

    Args:
        clients: all of one federation.
        conversation: asks the client that it is given, and no other; it changes nothing at the server, and its result
            can be pickled.
        map: how the conversations are had; a thread pool's will do. Default: one after the other.

    Example:
        >>> import torch
        >>> count = torch.tensor([2, 5])
        >>> clients = [Client(i, LocalData(f"client {i}", lambda split: [], count + i, count)) for i in range(2)]
        >>> map_clients(clients, lambda client: client.ask(lambda local: int(local.class_counts.sum())))
        [7, 9]
    """
    if not clients:
        return []
    owners, channel = clients[0]._owners, clients[0]._channel
    before = 0 if channel is None else len(channel.messages)
    place = {client.id: i for i, client in enumerate(clients)}

    def counted(messages: Iterable[Message]) -> list[Message]:
        """In the order of the clients, however their conversations went on beside each other."""
        return sorted(messages, key=lambda message: place[message.client])

    if owners is None or owners.conversing:
        had = list(map(conversation, clients))
        if channel is not None:
            channel.messages[before:] = counted(channel.messages[before:])
        return had
    mine = [client for client in clients if owners.has(client.id)]
    owners.conversing = True
    try:
        found = dict(zip([client.id for client in mine], map(conversation, mine)))
    finally:
        owners.conversing = False
    own = [] if channel is None else channel.messages[before:]
    results: dict[int, T] = {}
    messages = []
    for part, crossed in owners.ranks.all_gather((found, own), "conversations"):
        results |= part
        messages += crossed
    if channel is not None:
        channel.messages[before:] = counted(messages)
    return [results[client.id] for client in clients]
