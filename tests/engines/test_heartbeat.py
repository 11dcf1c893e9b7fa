"""The heartbeat, without processes that die."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from unittest.mock import patch

import pytest

from flsv.engines.ranks.group import Gone, Heartbeat

Three = tuple[list[Heartbeat], list[socket.socket]]


@pytest.fixture
def three() -> Three:
    """Three ranks' lifelines, and the ends of the second and third."""
    ends, accepted = [], {}
    for rank in (1, 2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            ends.append(socket.create_connection(server.getsockname()))
            accepted[rank] = server.accept()[0]
    return [Heartbeat(0, 3, accepted), *(Heartbeat(rank, 3, {0: end}) for rank, end in enumerate(ends, start=1))], ends


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_everybody_learns_who_is_gone(three: Three) -> None:
    lifelines, ends = three
    with patch("flsv.engines.ranks.group.os._exit"):
        ends[0].shutdown(socket.SHUT_RDWR)  # as the system does for a process that is gone
        assert eventually(lambda: lifelines[2].failure == "the process of rank 1 is gone")
        assert lifelines[0].failure == "the process of rank 1 is gone"
        with pytest.raises(Gone, match="rank 1 is gone"):
            lifelines[2].check()
        for heartbeat in lifelines:
            heartbeat.leave()


def test_who_leaves_is_not_gone(three: Three) -> None:
    lifelines, ends = three
    lifelines[1].leave()
    assert eventually(lambda: 1 in lifelines[2].left)
    ends[0].shutdown(socket.SHUT_RDWR)
    time.sleep(0.1)
    assert [heartbeat.failure for heartbeat in lifelines] == [None] * 3
    lifelines[2].check()
    for heartbeat in lifelines:
        heartbeat.leave()


def test_who_fails_says_why(three: Three) -> None:
    lifelines, _ = three
    with patch("flsv.engines.ranks.group.os._exit"):
        lifelines[2].fail("rank 2 has given up: out of samples")
        assert eventually(lambda: lifelines[1].failure == "rank 2 has given up: out of samples")
        for heartbeat in lifelines:
            heartbeat.leave()
