"""Ends all ranks when one ends, and each rank when the process that started it ends.

Ranks are by themselves while their clients train, for seconds or hours, and a rank that waits for one that is gone
would wait for good. So each keeps a connection to rank 0, over which nothing is said but "I have failed" and "I am
done": when a process dies, however it does, its system closes the connection. A machine that dies cannot; there the
systems' own probes (TCP keepalive) notice after some 20 seconds. Before ranks have met, a rank whose parent is killed
would wait for the others, with all that it has imported and read, until the time to meet is over: it watches its
parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

#: Seconds after which a process that has not noticed by itself is ended: in the middle of a batch that takes longer, or
#: of a collective operation that does not come back.
UNNOTICED = 10.0
#: The same where the main thread has noticed and is on its way out, such as saving what it can.
NOTICED = 20.0


class Gone(RuntimeError):
    """Another rank of the federation is gone."""


class Heartbeat:
    """Watches the connections to the other ranks in a thread.

    Args:
        rank: this process's number.
        size: how many there are.
        connections: rank 0: from everybody else, by rank; the others: to rank 0.

    Attributes:
        failure: which rank is gone, and how, in words; None as long as all are there.
        left: ranks that are done and have said so.
        enforced: whether this process cannot go on without the others: while a Trainer runs.
        noticed: whether the main thread knows of the failure.
    """

    def __init__(self, rank: int, size: int, connections: dict[int, socket.socket]) -> None:
        self._rank, self._size, self._connections = rank, size, connections
        self.failure: str | None = None
        self.left: set[int] = set()
        self.enforced = self.noticed = self._closed = False
        self._since = 0.0
        for connection in connections.values():
            _keep_alive(connection)
        self._thread = threading.Thread(target=self._watch, name="flsv-heartbeat", daemon=True)
        self._thread.start()

    def peers(self) -> list[str]:
        """Addresses of the hosts at the other ends."""
        return [connection.getpeername()[0] for connection in self._connections.values()]

    def check(self) -> None:
        """Raise :class:`Gone` where another rank is."""
        if self.failure is not None:
            self.noticed = True
            raise Gone(self.failure)

    def wait_for_failure(self, seconds: float) -> None:
        """Give the word of a failure time to arrive."""
        end = time.monotonic() + seconds
        while self.failure is None and not self.left and time.monotonic() < end:
            time.sleep(0.01)

    def fail(self, why: str) -> None:
        """Tell the others that this rank has failed."""
        self._say({"rank": self._rank, "failed": why})

    def leave(self) -> None:
        """Tell the others that this rank is done, and stop watching."""
        if not self._closed:
            self._say({"rank": self._rank, "left": True})
            self._closed = True

    def _say(self, message: dict[str, Any], but: int | None = None) -> None:
        line = json.dumps(message).encode() + b"\n"
        for rank, connection in list(self._connections.items()):
            if rank != but:
                with contextlib.suppress(OSError):  # gone as well: the watching thread finds out
                    connection.sendall(line)

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        for rank, connection in self._connections.items():
            selector.register(connection, selectors.EVENT_READ, (rank, bytearray()))
        while not self._closed:
            for ready, _ in selector.select(timeout=0.5):
                rank, received = ready.data
                try:
                    data = ready.fileobj.recv(65536)  # type: ignore[union-attr]
                except OSError:
                    data = b""
                if not data:
                    selector.unregister(ready.fileobj)
                    if rank not in self.left:
                        self._gone(rank, f"the process of rank {rank} is gone")
                received += data
                *lines, rest = bytes(received).split(b"\n")
                received[:] = rest
                for line in lines:
                    self._heard(json.loads(line))
            waited = time.monotonic() - self._since
            if self.failure is not None and self.enforced and waited > (NOTICED if self.noticed else UNNOTICED):
                self._end()

    def _heard(self, message: dict[str, Any]) -> None:
        rank = message["rank"]
        if "left" in message:
            self.left.add(rank)
        else:
            self._gone(rank, message["failed"])
        if self._rank == 0:
            self._say(message, but=rank)

    def _gone(self, rank: int, why: str) -> None:
        if self.failure is None and not self._closed:
            self.failure, self._since = why, time.monotonic()
            if self._rank == 0:
                self._say({"rank": rank, "failed": why}, but=rank)

    def _end(self) -> None:
        print(f"rank {self._rank} of {self._size} ends: {self.failure}.", file=sys.stderr, flush=True)
        os._exit(1)


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


_STARTED_BY = "FLSV_STARTED_BY"
#: Seconds between two looks at the parent.
_INTERVAL = 0.5

#: Set when the ranks hold lifelines: who has started some of them is a rank, and may be done before they are.
met = threading.Event()


@contextmanager
def told_to_children() -> Iterator[None]:
    """Processes started within know this process as their parent, even if it has ended before they look."""
    os.environ[_STARTED_BY] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[_STARTED_BY]


@cache
def end_with_parent() -> None:
    """From now on this process ends within a second after the one that has started it as a rank: a rank of a Trainer,
    until they have met, or torchrun's agent, for good. In other processes nothing happens."""
    started_by = os.environ.pop(_STARTED_BY, None)  # not for those that this one starts
    if os.name != "posix":  # elsewhere a process keeps the number of a parent that is gone
        return
    if started_by is not None:
        _watch(int(started_by), met.wait)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        _watch(os.getppid(), threading.Event().wait)


def _watch(parent: int, over: Callable[[float], bool]) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            if over(_INTERVAL):
                return
        print(f"this rank ends: process {parent}, which has started it, is gone.", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, name="flsv-parent", daemon=True).start()
