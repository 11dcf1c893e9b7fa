"""Ranks, the communication among a federation's processes, and ClientPlacement, which assigns clients to processes.

:class:`Ranks` itself is for a single process and exchanges nothing; ``flsv.engines.ranks`` is for several processes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor


class Ranks:
    """Communication among the processes (ranks) of a federation; this base class is for a single process.

    All ranks must call the same methods in the same order. The argument ``about`` is a name of the exchange. If two
    ranks pass different names, they are out of step, and an error is raised.

    Attributes:
        rank: this process's number, from 0.
        size: the number of processes.
        aborted: whether this rank has told the others that it takes part in no further exchange.

    Example:
        >>> ALONE.all_gather(3, "a number"), ALONE.broadcast(0, 3, "a number")
        ([3], 3)
    """

    rank, size = 0, 1
    aborted = False

    def all_gather(self, value: Any, about: str) -> list[Any]:
        """Return the values that all ranks passed, in the order of the ranks; this rank's own value is not copied."""
        return [value]

    def broadcast(self, source: int, value: Any, about: str) -> Any:
        """Return the value that rank ``source`` passed; the other ranks' ``value`` is ignored. ``about`` names it in
        error messages."""
        return value

    def broadcast_rows(self, matrix: Tensor, owners: Sequence[int], about: str) -> None:
        """Overwrite each row i of ``matrix [k, P]``, in place and on all ranks, with row i of the ``matrix`` of rank
        ``owners[i]``."""

    def abort(self, why: str) -> None:
        """Tell the other ranks that this rank takes part in no further exchange; their error message contains
        ``why``."""


ALONE = Ranks()


def balance_load(costs: Sequence[float], size: int, fixed: Mapping[int, int] | None = None) -> list[int]:
    """Assign pieces of work to workers, the longest first, each to the worker with the least work."""
    given, loads = dict(fixed or {}), [0.0] * size
    for piece, who in given.items():
        loads[who] += costs[piece]
    for piece in sorted(range(len(costs)), key=lambda piece: -costs[piece]):
        if piece not in given:
            given[piece] = loads.index(min(loads))
            loads[given[piece]] += costs[piece]
    return [given[piece] for piece in range(len(costs))]


class ClientPlacement:
    """The assignment of clients to ranks (processes).

    A client that keeps state stays on its rank; the other clients are assigned anew for every cohort, so that all ranks
    finish at about the same time.

    Args:
        ranks: the communication among the processes.
        costs: for each of the n clients the work of its training, in any unit.

    Attributes:
        conversing: True within :func:`flsv.core.map_clients`, in which each rank asks only its own clients.

    Example:
        >>> owners = ClientPlacement(ALONE, [3.0, 1.0])
        >>> owners[1], owners.mine([0, 1])
        (0, [0, 1])
    """

    def __init__(self, ranks: Ranks, costs: Sequence[float]) -> None:
        self.ranks, self._costs = ranks, list(costs)
        self._owners = balance_load(self._costs, ranks.size)
        self._bound: set[int] = set()
        self.conversing = False

    def __getitem__(self, client: int) -> int:
        return self._owners[client]

    def has(self, client: int) -> bool:
        """Return whether the client is assigned to this rank."""
        return self._owners[client] == self.ranks.rank

    def mine(self, clients: Collection[int]) -> list[int]:
        """Return those of the given clients that are assigned to this rank."""
        return [client for client in clients if self.has(client)]

    @property
    def bound(self) -> frozenset[int]:
        """Return the numbers of the clients that stay on their rank because they keep state."""
        return frozenset(self._bound)

    def bind(self, clients: Collection[int]) -> None:
        """Set which clients stay on their rank because they keep state."""
        self._bound = set(clients)

    def deal(self, cohort: Sequence[int]) -> None:
        """Assign the clients of a round's cohort to the ranks anew; the clients in :attr:`bound` stay on their rank."""
        fixed = {place: self[client] for place, client in enumerate(cohort) if client in self._bound}
        owners = balance_load([self._costs[client] for client in cohort], self.ranks.size, fixed)
        for client, owner in zip(cohort, owners):
            self._owners[client] = owner
