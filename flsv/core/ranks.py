"""Ranks: the processes of a federation, and the clients of each.

Here is what a process alone needs, which is nothing; ``flsv.engines.ranks`` has the several.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor


class Ranks:
    """A single process.

    Every method that has something to exchange is called by all ranks, in the same order. ``about`` says what it is
    about: ranks that say different things are out of step, which is an error.

    Attributes:
        rank: this process's number, from 0.
        size: how many there are.
        aborted: whether this rank has told the others that it will not meet them again.

    Example:
        >>> ALONE.all_gather(3, "a number"), ALONE.broadcast(0, 3, "a number")
        ([3], 3)
    """

    rank, size = 0, 1
    aborted = False

    def all_gather(self, value: Any, about: str) -> list[Any]:
        """Every rank's value, by rank; this rank's own is not copied."""
        return [value]

    def broadcast(self, source: int, value: Any, about: str) -> Any:
        """The value of rank ``source``."""
        return value

    def broadcast_rows(self, matrix: Tensor, owners: Sequence[int], about: str) -> None:
        """Row i of ``matrix [k, P]`` becomes rank ``owners[i]``'s, everywhere, in place."""

    def abort(self, why: str) -> None:
        """Tell the others that this rank will not meet them again."""


ALONE = Ranks()


def balance_load(costs: Sequence[float], size: int, fixed: Mapping[int, int] | None = None) -> list[int]:
    """Assign pieces of work to workers: the longest first, each to the worker with the least work ("longest processing
    time"; Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM Journal on Applied Mathematics 17(2), 1969: at
    most 4/3 of the best).

    Args:
        costs: of the pieces.
        size: how many there are to do them.
        fixed: pieces that are given away already, and to whom.

    Returns:
        For every piece a number in ``range(size)``.

    Example:
        >>> balance_load([1, 5, 3, 3], 2)
        [0, 0, 1, 1]
        >>> balance_load([1, 5, 3, 3], 2, fixed={0: 0, 1: 1})
        [0, 1, 0, 0]
    """
    given, loads = dict(fixed or {}), [0.0] * size
    for piece, who in given.items():
        loads[who] += costs[piece]
    for piece in sorted(range(len(costs)), key=lambda piece: -costs[piece]):
        if piece not in given:
            given[piece] = loads.index(min(loads))
            loads[given[piece]] += costs[piece]
    return [given[piece] for piece in range(len(costs))]


class ClientPlacement:
    """Which rank every client belongs to.

    A client that keeps something stays where it is; the others are dealt out anew for every cohort, so that all ranks
    are done at about the same time.

    Args:
        ranks: among whom.
        costs: ``n``, how much work every client's training is.

    Attributes:
        conversing: whether the server talks with this rank's clients only, and the others' ranks with theirs.

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
        """Whether this rank trains the client."""
        return self._owners[client] == self.ranks.rank

    def mine(self, clients: Collection[int]) -> list[int]:
        """Those of the clients that are this rank's."""
        return [client for client in clients if self.has(client)]

    @property
    def bound(self) -> frozenset[int]:
        """The clients that keep something."""
        return frozenset(self._bound)

    def bind(self, clients: Collection[int]) -> None:
        """These clients, and no others, keep something."""
        self._bound = set(clients)

    def deal(self, cohort: Sequence[int]) -> None:
        """Share a round's cohort out."""
        fixed = {place: self[client] for place, client in enumerate(cohort) if client in self._bound}
        owners = balance_load([self._costs[client] for client in cohort], self.ranks.size, fixed)
        for client, owner in zip(cohort, owners):
            self._owners[client] = owner
