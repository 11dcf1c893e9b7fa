"""Trains the clients of one rank, and exchanges their updates with the other ranks'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flsv._lightning.several_processes import Counted, add, counted
from flsv.clients.cohort import CohortLoader
from flsv.clients.training import CohortTraining
from flsv.data import FederatedDataModule
from flsv.participants import Ranks, at
from flsv.round import Instruction
from flsv.seeding import global_rngs, restore_global_rngs

#: Bytes from which on a row is a message of its own. 100 messages take some 20 ms.
LONG = 2**20


class IdleLoader(CohortLoader):
    """One batch for a rank without a client, because Lightning ends a fit whose loader is empty. What is trained on it
    is discarded."""

    def __init__(self, data: FederatedDataModule, client: int, seed: int, round_index: int) -> None:
        super().__init__(data, [client], seed=seed, round_index=round_index, limit=1)
        self.visits = []

    def __len__(self) -> int:
        return 1


class RankTraining(CohortTraining):
    """Trains this rank's clients; :meth:`exchange` then gathers the updates of all ranks.

    Attributes:
        idle: whether this rank has no client in this round.
    """

    idle = False

    def begin_round(self, loader: CohortLoader, instructions: Mapping[int, Instruction], num_samples: Tensor) -> None:
        super().begin_round(loader, instructions, num_samples)
        self.idle, self._cohort = not loader.visits, list(instructions)
        self._trained: dict[int, Tensor] | None = None
        self._begun = counted(self._trainer)

    @property
    def _trainer(self) -> Any:
        return self.local.module.trainer

    @property
    def position(self) -> int:
        """The place in the cohort of the client whose turn it is, or was last."""
        if self.idle:
            return len(self._cohort)
        return self._cohort.index(self._visits[min(self._visited, len(self._visits) - 1)].client)

    def begin_batch(self, batch: Any = None) -> bool:
        if not self.idle:
            return super().begin_batch(batch)
        local = self.local
        local.begin_visits()
        # Schedules that are the federation's must not step here.
        local.optimizers.load(self._cohort[0])
        local.optimizers.begin_batch(0)
        local.last_batch = True
        if local.windows.active:
            local.windows.begin_batch(0, 1)
        return False

    def end_batch(self, loss: Tensor | None) -> bool:
        if not self.idle:
            return super().end_batch(loss)
        self.local.optimizers.leave()
        return True

    @property
    def batch_idx(self) -> int:
        return 0 if self.idle else super().batch_idx

    def trained(self) -> dict[int, Tensor]:
        return super().trained() if self._trained is None else self._trained

    def exchange(self, ranks: Ranks, round_index: int, keep_trained: bool) -> None:
        """All ranks have trained their clients: from here on this is the whole cohort's training, on all of them.

        Args:
            ranks: among whom.
            round_index: the round.
            keep_trained: whether what clients have trained is wanted, too, where they send something else.
        """
        about, device = f"the updates of round {round_index}", self._matrix.device
        own = counted(self._trainer) - self._begun
        own = own._replace(stepped=own.stepped + 1)  # Lightning adds the last batch after its hooks
        trained = super().trained() if keep_trained else {}
        others = {c: trained[c] for c, vector in self._vectors().items() if keep_trained and trained[c] is not vector}
        has_last = not self.idle and self._visits[-1].client == self._cohort[-1]
        told = {
            "updates": [replace(update, vector=update.vector.new_empty(0)) for update in self.updates],
            "broken": self.broken,
            "trained": list(others),
            "buffers": self.local.next_buffers,
            "counted": Counted() if self.idle else own,
            "last": _rngs(device) if has_last else None,
        }
        parts = ranks.everybody(told, about)
        self._take_all(ranks, parts, about)
        if keep_trained:
            mine = torch.stack(list(others.values())) if others else self._matrix.new_empty(0, self._matrix.shape[1])
            self._trained = self._vectors()
            for part, block in zip(parts, ranks.blocks(mine, [len(part["trained"]) for part in parts], about)):
                self._trained |= dict(zip(part["trained"], block))
        _restore(next(part["last"] for part in parts if part["last"] is not None), device)
        everywhere = Counted(*(sum(numbers) for numbers in zip(*(part["counted"] for part in parts))))
        add(self._trainer, everywhere - own)

    def _vectors(self) -> dict[int, Tensor]:
        return {update.client_id: update.vector for update in self.updates}

    def _take_all(self, ranks: Ranks, parts: Sequence[Mapping[str, Any]], about: str) -> None:
        """What all ranks have told becomes this one's, in the order of the cohort."""
        place = {client: i for i, client in enumerate(self._cohort)}
        where = sorted(
            (place[update.client_id], rank, row)
            for rank, part in enumerate(parts)
            for row, update in enumerate(part["updates"])
        )
        matrix = _together(ranks, self.matrix, [(rank, row) for _, rank, row in where], about)
        own_rows = self._vectors()
        self.updates = [
            replace(parts[rank]["updates"][row], vector=matrix[i]) for i, (_, rank, row) in enumerate(where)
        ]
        for update in self.updates:
            if update.client_id in own_rows:
                self._move(update.client_id, own_rows[update.client_id], update.vector)
        self._matrix = matrix
        self.broken = sorted((client for part in parts for client in part["broken"]), key=place.__getitem__)
        if where:
            self.local.next_buffers = parts[where[0][1]]["buffers"]

    def _move(self, client: int, row: Tensor, vector: Tensor) -> None:
        """What a client has trained is the row that it sends: one in memory."""
        with at(self._manager.locals[client]) as local:
            if local.sent is row:
                local.visit(local.start, vector if local.model is row else local.model, vector, local.tell)


def _together(ranks: Ranks, mine: Tensor, where: Sequence[tuple[int, int]], about: str) -> Tensor:
    """The cohort's matrix ``[k, P]``, of rows by rank and place in that rank's."""
    matrix = mine.new_empty(len(where), mine.shape[1])
    owners = [rank for rank, _ in where]
    if mine.shape[1] * mine.element_size() >= LONG:
        for i, (rank, row) in enumerate(where):
            if rank == ranks.rank:
                matrix[i] = mine[row]
        ranks.rows(matrix, owners, about)
        return matrix
    for rank, block in enumerate(ranks.blocks(mine, [owners.count(rank) for rank in range(ranks.size)], about)):
        places = [place for place, owner in enumerate(owners) if owner == rank]
        if places:
            matrix[torch.tensor(places, device=matrix.device)] = block[[where[place][1] for place in places]]
    return matrix


def _rngs(device: torch.device) -> tuple[Any, ...]:
    """Of the global generators; of the devices' only this rank's own."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return (*global_rngs()[:3], cuda)


def _restore(rngs: tuple[Any, ...], device: torch.device) -> None:
    restore_global_rngs((*rngs[:3], None))
    if rngs[3] is not None:
        torch.cuda.set_rng_state(rngs[3], device)
