"""Conversations: with several sites at the same time, so that a question waits for its slowest site and not for all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

import torch

from flsv.engines.remote.messages import Packet
from flsv.engines.remote.waiting import Reply
from flsv.participants import Client

T = TypeVar("T")


class Conversations:
    """Each conversation runs in a thread of its own that stops where it asks its site. When all have stopped or ended,
    their questions go out in one exchange, and all go on with the replies. So what comes of them does not depend on
    which thread is faster.

    Args:
        exchange: sends packets to sites, by their numbers, and gives the reply of each.

    Example:
        >>> sent = []
        >>> def exchange(packets):
        ...     sent.append(sorted(packets))
        ...     return {site: Packet("answer", {"twice": 2 * site}) for site in packets}
        >>> conversations = Conversations(exchange)
        >>> def ask(client):
        ...     return conversations.exchange(client.id, Packet("ask")).plain["twice"]
        >>> conversations.map(ask, [Client(i, None) for i in range(3)]), sent
        ([0, 2, 4], [[0, 1, 2]])
    """

    def __init__(self, exchange: Callable[[Mapping[int, Packet]], Mapping[int, Reply]]) -> None:
        self._exchange, self._changed, self._own = exchange, threading.Condition(), threading.local()
        self._asked: dict[int, Packet] = {}
        self._replies: dict[int, Reply | BaseException] = {}
        self._talking = 0

    def exchange(self, site: int, packet: Packet) -> Reply:
        """A site's reply, within a conversation or outside of one."""
        if not self._within:
            return self._exchange({site: packet})[site]
        with self._changed:
            self._asked[site] = packet
            self._talking -= 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: site in self._replies)
            reply = self._replies.pop(site)
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def map(self, conversation: Callable[[Client], T], clients: Sequence[Client]) -> list[T]:
        """``[conversation(client) for client in clients]``; the first error, once all have ended."""
        if self._within or len(clients) < 2:
            return [conversation(client) for client in clients]
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        with ThreadPoolExecutor(len(clients)) as pool:
            self._talking = len(clients)
            ends = [pool.submit(copy_context().run, self._have, conversation, client, modes) for client in clients]
            while asked := self._next():
                replies: Mapping[int, Reply | BaseException]
                try:
                    replies = self._exchange(asked)
                except BaseException as error:  # else those who wait for a reply would wait for ever
                    replies = dict.fromkeys(asked, error)
                with self._changed:
                    self._replies |= replies
                    self._talking = len(asked)
                    self._changed.notify_all()
        return [end.result() for end in ends]

    @property
    def _within(self) -> bool:
        return getattr(self._own, "within", False)

    def _next(self) -> dict[int, Packet]:
        """What is asked when nobody talks; nothing when all have ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._talking)
            asked, self._asked = self._asked, {}
        return asked

    def _have(self, conversation: Callable[[Client], T], client: Client, modes: tuple[bool, bool]) -> T:
        self._own.within = True
        try:
            with torch.inference_mode(modes[0]), torch.set_grad_enabled(modes[1]):
                return conversation(client)
        finally:
            self._own.within = False
            with self._changed:
                self._talking -= 1
                self._changed.notify_all()
