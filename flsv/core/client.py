"""Client, through which the server reaches a participant, and Channel, which counts messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from flsv.core.local_data import LocalData, opened
from flsv.core.ranks import ClientPlacement
from flsv.core.responses import rounded_response
from flsv.utilities.errors import ConfigurationError

Direction = Literal["up", "down"]


class Traffic(NamedTuple):
    """The size of a message: the number of tensor elements, and of bytes."""

    numbers: int = 0
    bytes: float = 0.0

    def __add__(self, other: object) -> Traffic:
        assert isinstance(other, Traffic)
        return Traffic(self.numbers + other.numbers, self.bytes + other.bytes)


class Message(NamedTuple):
    """One counted message: client, direction, name and size."""

    client: int
    direction: Direction
    name: str
    traffic: Traffic


MessageRow = tuple[int, Direction, str, int, float]
"""A message as a checkpoint stores it: client, direction, name, numbers and bytes."""


class Channel:
    """Counter of the messages between server and clients within a round.

    Only tensors are counted, with all their elements, not a message's few plain numbers (ids, sizes, a loss). A message
    is an instruction, an update, a request to a client, or its response (:meth:`flsv.core.Client.request`).

    Example:
        >>> channel = Channel()
        >>> channel.send(3, "down", "start", torch.zeros(10))
        >>> channel.send(3, "up", "update", torch.zeros(10), Traffic(4, 9.0))  # compressed
        >>> channel.numbers([3, 5], "up").tolist(), channel.bytes([3, 5], "down").tolist()
        ([4, 0], [40.0, 0.0])
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._is_muted = False

    def send(
        self,
        client: int,
        direction: Direction,
        name: str,
        content: Any,
        traffic: Traffic | None = None,
    ) -> None:
        """Count a message.

        Args:
            client: the client's id.
            direction: ``"down"`` to the client or ``"up"`` to the server.
            name: the message's name.
            content: a tensor, or nested mappings, sequences and dataclasses of tensors.
            traffic: the message's size in transit, if it is compressed.
        """
        if traffic is None:
            traffic = traffic_of(content)
        if traffic.numbers and not self._is_muted:
            self.messages.append(Message(client, direction, name, traffic))

    def begin_round(self) -> None:
        """Reset the count."""
        self.messages = []

    def pop_since(self, num_earliest: int) -> list[MessageRow]:
        """Remove this round's messages except the ``num_earliest`` earliest. Return them for :meth:`prepend`."""
        messages = self.messages[num_earliest:]
        del self.messages[num_earliest:]
        return [(*message[:3], *message.traffic) for message in messages]

    def prepend(self, rows: Sequence[MessageRow]) -> None:
        """Insert the messages that :meth:`pop_since` returned before this round's other messages."""
        self.messages[:0] = [
            Message(client, direction, name, Traffic(num_entries, num_bytes))
            for client, direction, name, num_entries, num_bytes in rows
        ]

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count no messages within this context, for requests that only a simulation makes."""
        self._is_muted = True
        try:
            yield
        finally:
            self._is_muted = False

    def numbers(self, clients: Sequence[int], direction: Direction) -> Tensor:
        """Return how many tensor elements each of k clients sent (``"up"``) or received, int64 ``[k]``."""
        totals = self._totals(direction)
        numbers = [totals[client].numbers for client in clients]
        return torch.tensor(numbers, dtype=torch.long)

    def bytes(self, clients: Sequence[int], direction: Direction) -> Tensor:
        """Return how many bytes of tensors each of k clients sent (``"up"``) or received, float64 ``[k]``."""
        totals = self._totals(direction)
        sizes = [totals[client].bytes for client in clients]
        return torch.tensor(sizes, dtype=torch.float64)

    def names(self) -> set[tuple[Direction, str]]:
        """Return the set of ``(direction, name)`` of this round's messages."""
        return {(message.direction, message.name) for message in self.messages}

    def _totals(self, direction: Direction) -> dict[int, Traffic]:
        totals = defaultdict[int, Traffic](Traffic)
        for message in self.messages:
            if message.direction == direction:
                totals[message.client] += message.traffic
        return totals


def traffic_of(content: Any) -> Traffic:
    """Return the uncompressed size of all tensors in ``content``."""
    total = Traffic()
    for tensor in _tensors(content):
        numbers = tensor.numel()
        total += Traffic(numbers, float(numbers * tensor.element_size()))
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


class NoResponse(RuntimeError):
    """Error of :meth:`Client.request` if a remote client does not respond."""


class Client:
    """The server's handle of one participant. The method :meth:`request` sends a request: it runs a function on the
    participant's data and returns the result.

    Args:
        id: the client's id.
        data: the client's own data, which can be read only by functions that :meth:`request` runs.
        channel: the channel that counts requests and responses, or None.
        owners: the assignment of all clients to processes (ranks). None: all are in this process.
        is_private: whether the client may send only its noised update. Then :meth:`request` raises an error, except for
            functions that are annotated to return None.

    Example:
        >>> import torch
        >>> data = LocalData("client 3", lambda split: [], torch.tensor([2, 5]), torch.tensor([9, 9]))
        >>> client = Client(3, data)
        >>> client.request(lambda local: int(local.class_counts.sum()))
        7
        >>> data.class_counts  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        PermissionError: the data of client 3 can be read only at the client: ...
    """

    def __init__(
        self,
        id: int,
        data: LocalData,
        channel: Channel | None = None,
        owners: ClientPlacement | None = None,
        is_private: bool = False,
    ) -> None:
        self.id = id
        self.is_private = is_private
        self._channel = channel
        self._owners = owners
        self.__data = data

    def request(
        self, function: Callable[Concatenate[LocalData, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run ``function(local_data, *args, **kwargs)`` at the client and return its result.

        Tensors in the arguments are counted as sent down, those in the result as sent up. Settings that both sides know
        are not messages: bind them to ``function`` with ``functools.partial``, so that they are not counted. In a
        single process any thread may call this. With clients in several processes every process must call it, on one
        thread or within :func:`map_clients`, since all get the result of the client's process.

        Args:
            function: called with the client's :class:`flsv.core.LocalData` and the arguments.
            *args: sent to the client.
            **kwargs: sent to the client.

        Returns:
            The function's result, rounded to three significant digits if it may run at sites
            (:func:`flsv.core.declare_response`).

        Raises:
            NoResponse: the client is at a remote site that is offline, late, or has failed.
            ConfigurationError: the client is private, and the function returns a value.
        """
        # Results computed from a client's samples reach the server only here or in its update.
        if self.is_private and not _returns_no_data(function):
            raise ConfigurationError(
                f"a component requests {_name(function)!r} from client {self.id}, but with GaussianPrivacy a client "
                "sends only its noised update. Remove GaussianPrivacy or this component. A function that is annotated "
                "to return None may run at the client."
            )
        response = self._response(function, args, kwargs)
        if self.is_private:
            response = None  # even if a wrongly annotated function has returned something
        self._count(function, (args, kwargs), response)
        return response  # type: ignore[return-value]  # None if the function returns nothing

    def _response(self, function: Callable[..., T], args: Any, kwargs: Any) -> T | None:
        """Run the function in the process that has the client."""
        placement = self._owners
        is_in_this_process = placement is None or placement.has(self.id)
        response = None  # remains None if another process has the client
        if is_in_this_process:
            response = self._local_response(function, args, kwargs)

        # This process is the only one.
        if placement is None:
            return response

        # Within map_clients each process sends requests only to its own clients.
        if placement.in_map_clients:
            if not is_in_this_process:
                raise RuntimeError(
                    f"{_name(function)!r} was requested from client {self.id} while map_clients runs for another one."
                )
            return response

        # Outside of map_clients all processes call `request`, and get the result of the client's process.
        rank_of_client = placement[self.id]
        description = f"client {self.id}'s response to {_name(function)!r}"
        shared_response: T | None = placement.ranks.broadcast(rank_of_client, response, description)
        return shared_response

    def _local_response(self, function: Callable[..., T], args: Any, kwargs: Any) -> T:
        with opened(self.__data):  # the only place where functions read the data
            result = function(self.__data, *args, **kwargs)
        return rounded_response(function, result)

    def map_conversations(
        self, conversation: Callable[[Client], T], clients: Sequence[Client]
    ) -> Iterable[T]:
        """Call ``conversation(client)`` for this and other clients of the same kind, see :func:`map_clients`."""
        return map(conversation, clients)

    def _count(self, function: Callable[..., Any], arguments: Any, response: Any) -> None:
        if self._channel is not None:
            name = _name(function)
            self._channel.send(self.id, "down", name, arguments)
            self._channel.send(self.id, "up", name, response)

    def __repr__(self) -> str:
        return f"Client({self.id})"


def _name(function: Callable[..., Any]) -> str:
    function = getattr(function, "func", function)
    return getattr(function, "__name__", type(function).__name__)


def _returns_no_data(function: Callable[..., Any]) -> bool:
    function = getattr(function, "func", function)
    annotations = getattr(function, "__annotations__", {})
    if "return" not in annotations:
        return False
    return annotations["return"] in (None, "None")


def map_clients(
    clients: Sequence[Client],
    conversation: Callable[[Client], T],
    map: Callable[[Callable[[Client], T], Sequence[Client]], Iterable[T]] | None = None,
) -> list[T]:
    """Call ``conversation(client)`` at the server for every client.

    With clients in several processes, each process calls the function for its own clients and sends the results to the
    others, so the calls of different processes run at the same time.

    Args:
        clients: clients of one federation.
        conversation: called with one client, the only one to which it may send requests. It must not change anything at
            the server, and its result must be picklable.
        map: applies ``conversation`` to the clients of this process, such as a thread pool's ``map``. Default: one
            client after the other, or all remote sites at the same time.

    Returns:
        ``[conversation(client) for client in clients]``.

    Example:
        >>> import torch
        >>> count = torch.tensor([2, 5])
        >>> clients = [Client(i, LocalData(f"client {i}", lambda split: [], count + i, count)) for i in range(2)]
        >>> map_clients(clients, lambda client: client.request(lambda local: int(local.class_counts.sum())))
        [7, 9]
    """
    if not clients:
        return []
    hold_conversations = map or clients[0].map_conversations
    channel = clients[0]._channel or Channel()  # without one, messages are not counted
    num_earlier_messages = len(channel.messages)
    placement = clients[0]._owners
    if placement is None or placement.in_map_clients:  # all of them respond in this process
        results = _by_id(clients, hold_conversations(conversation, clients))
        messages = channel.messages[num_earlier_messages:]
    else:
        clients_here = [client for client in clients if placement.has(client.id)]
        with _within_map(placement):  # the clients of other processes respond there
            results_here = _by_id(clients_here, hold_conversations(conversation, clients_here))
        messages_here = channel.messages[num_earlier_messages:]
        results, messages = _of_all_ranks(placement, results_here, messages_here)
    channel.messages[num_earlier_messages:] = _in_order_of(clients, messages)
    return [results[client.id] for client in clients]


@contextmanager
def _within_map(placement: ClientPlacement) -> Iterator[None]:
    placement.in_map_clients = True
    try:
        yield
    finally:
        placement.in_map_clients = False


def _of_all_ranks(
    placement: ClientPlacement, results: dict[int, T], messages: list[Message]
) -> tuple[dict[int, T], list[Message]]:
    all_results: dict[int, T] = {}
    all_messages: list[Message] = []
    exchanged = placement.ranks.all_gather((results, messages), "conversations")
    for results_of_rank, messages_of_rank in exchanged:
        all_results |= results_of_rank
        all_messages += messages_of_rank
    return all_results, all_messages


def _by_id(clients: Sequence[Client], results: Iterable[T]) -> dict[int, T]:
    return {client.id: result for client, result in zip(clients, results)}


def _in_order_of(clients: Sequence[Client], messages: Iterable[Message]) -> list[Message]:
    """Sort messages by client, since threads send them in any order."""
    positions = {client.id: position for position, client in enumerate(clients)}
    return sorted(messages, key=lambda message: positions[message.client])
