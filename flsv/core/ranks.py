"""Ranks, the communication among processes, and ClientPlacement, which assigns clients to them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import lightning as L
from torch import Tensor


class Ranks:
    """Communication among the processes (ranks) of a federation, here for a single one.

    All ranks must call the same methods in the same order. If two ranks pass a different ``exchange_name``, an error is
    raised.

    Attributes:
        rank: this process's number, from 0.
        size: the number of processes.
        aborted: whether this rank has told the others that it takes part in no further exchange.

    Example:
        >>> ALONE.all_gather(3, "a number"), ALONE.broadcast(0, 3, "a number")
        ([3], 3)
    """

    rank = 0
    size = 1
    aborted = False

    def all_gather(self, value: Any, exchange_name: str) -> list[Any]:
        """Return the list of all ranks' values, this rank's own without a copy."""
        return [value]

    def broadcast(
        self,
        source: int,
        value: Any,
        exchange_name: str,
    ) -> Any:
        """Return the ``value`` of rank ``source`` on every rank."""
        return value

    def broadcast_rows(
        self,
        matrix: Tensor,
        owners: Sequence[int],
        exchange_name: str,
    ) -> None:
        """Overwrite each row i of ``matrix [k, P]`` in place with that of rank ``owners[i]``."""

    def abort(self, why: str) -> None:
        """Tell the other ranks that this rank takes part in no further exchange."""


ALONE = Ranks()


def ranks_of(trainer: L.Trainer) -> Ranks:
    """Return the group of the processes that a trainer runs on."""
    return getattr(trainer.strategy, "ranks", ALONE)


def balance_load(
    costs: Sequence[float], size: int, fixed: Mapping[int, int] | None = None
) -> list[int]:
    """Assign tasks to ``size`` workers, the costliest first, each to the worker with the least load. Return each task's
    worker. ``fixed``: tasks assigned already, ``{task: worker}``."""
    worker_by_task = dict(fixed or {})
    loads = [0.0] * size
    for task, worker in worker_by_task.items():
        loads[worker] += costs[task]

    num_tasks = len(costs)
    costliest_first = sorted(range(num_tasks), key=lambda task: -costs[task])
    for task in costliest_first:
        if task in worker_by_task:
            continue
        least_busy = loads.index(min(loads))
        worker_by_task[task] = least_busy
        loads[least_busy] += costs[task]
    return [worker_by_task[task] for task in range(num_tasks)]


class ClientPlacement:
    """The assignment of clients to ranks (processes).

    A client that keeps state stays on its rank. The others are assigned again for every cohort, so that all ranks
    finish at about the same time.

    Args:
        ranks: the communication among the processes.
        costs: for each of the n clients the work of its training, in any unit.

    Attributes:
        in_map_clients: True within :func:`flsv.core.map_clients`, where each rank sends requests to its own clients.

    Example:
        >>> owners = ClientPlacement(ALONE, [3.0, 1.0])
        >>> owners[1], owners.mine([0, 1])
        (0, [0, 1])
    """

    def __init__(self, ranks: Ranks, costs: Sequence[float]) -> None:
        self.ranks = ranks
        self.in_map_clients = False
        self._costs = list(costs)
        self._owners = balance_load(self._costs, ranks.size)
        self._bound: set[int] = set()

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
        """Return the clients that stay on their rank because they keep state."""
        return frozenset(self._bound)

    def bind(self, clients: Iterable[int]) -> None:
        """Set the clients that stay on their rank because they keep state."""
        self._bound = set(clients)

    def assign(self, cohort: Sequence[int]) -> None:
        """Assign a round's cohort to the ranks, except :attr:`bound` clients."""
        fixed_ranks = {
            position: self[client]
            for position, client in enumerate(cohort)
            if client in self._bound
        }

        costs = [self._costs[client] for client in cohort]
        ranks_of_cohort = balance_load(costs, self.ranks.size, fixed_ranks)
        for client, rank in zip(cohort, ranks_of_cohort):
            self._owners[client] = rank
