"""Who has which client, and conversations that are had where the clients are; on two ranks that are threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from flsv.participants import ALONE, Channel, Client, LocalData, Owners, Ranks, run_protocol
from flsv.participants.ranks import longest_first


class Threads(Ranks):
    """One of several ranks of one process."""

    def __init__(self, rank: int, size: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._table, self._barrier = rank, size, table, barrier

    def everybody(self, value: Any, about: str) -> list[Any]:
        self._table[self.rank] = value
        self._barrier.wait(10)
        found = list(self._table)
        self._barrier.wait(10)
        return found

    def from_rank(self, source: int, value: Any, about: str) -> Any:
        return self.everybody(value, about)[source]


def on_ranks(size: int, function: Callable[[Ranks], Any]) -> list[Any]:
    table: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: function(Threads(rank, size, table, barrier)), range(size)))


def clients_of(ranks: Ranks, n: int = 5) -> tuple[list[Client], Channel, list[int]]:
    """Clients, what counts, and the numbers of those that were asked on this rank."""
    owners, channel = Owners(ranks, [1.0] * n), Channel()
    counts, asked = torch.ones(2, dtype=torch.long), list[int]()

    def client(i: int) -> Client:
        local = LocalData(f"client {i}", lambda split: [], counts * i, counts, state=lambda: {i: asked.append(i)})
        return Client(i, local, channel, owners)

    return [client(i) for i in range(n)], channel, asked


def answer(local: LocalData, factor: torch.Tensor) -> torch.Tensor:
    _ = local.state  # leaves a trace
    return local.class_counts * factor


def test_longest_first_is_never_worse_than_its_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    for size, n in itertools.product((2, 3, 5), range(1, 12)):
        costs = torch.randint(1, 50, (n,), generator=generator).tolist()
        owners = longest_first(costs, size)
        loads = [sum(c for c, owner in zip(costs, owners) if owner == rank) for rank in range(size)]
        best = max(max(costs), sum(costs) / size)  # nothing can be better than this
        assert max(loads) <= best * (4 / 3 - 1 / (3 * size)) + max(costs) / 3
        assert set(owners) <= set(range(size))


def test_clients_that_keep_something_stay() -> None:
    owners = Owners(Threads(0, 2, [], threading.Barrier(1)), [4.0, 3.0, 2.0, 1.0])
    assert [owners[client] for client in range(4)] == [0, 1, 1, 0]
    owners.deal([1, 2])  # nobody keeps anything: one each
    assert owners[1] != owners[2]
    owners.bind([1, 2])
    before = owners[1], owners[2]
    owners.deal([1, 3])
    assert (owners[1], owners[2]) == before
    assert owners[3] != owners[1]
    assert owners.bound == {1, 2}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_answers_and_traffic_are_those_of_one_process(size: int) -> None:
    def ask(ranks: Ranks) -> Any:
        clients, channel, asked = clients_of(ranks)
        first = [client.ask(answer, torch.tensor(3)) for client in clients[:2]]
        second = run_protocol(clients[1:], lambda client: client.ask(answer, torch.tensor(client.id)))
        return torch.stack([*first, *second]), channel.messages, asked

    alone, messages, _ = ask(ALONE)
    results = on_ranks(size, ask)
    for found, crossed, _ in results:
        assert torch.equal(found, alone)
        assert crossed == messages
    assert sorted(client for _, _, asked in results for client in asked) == [0, 1, 1, 2, 3, 4]
