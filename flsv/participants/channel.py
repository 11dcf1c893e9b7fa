"""Channel: counts everything that crosses between the server and the clients, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

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
    instruction or an update, or a question or its answer (:meth:`flsv.participants.Client.ask`).

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
