"""SeveralRanks: the engine that spreads the clients over processes; each process computes the whole server step."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor

from flsv._lightning.several_processes import Counted, LoggedValues, add, counts_so_far
from flsv.core import ClientPlacement, Instruction, Ranks, Round
from flsv.core.matrix import empty_rows
from flsv.data import FederatedDataModule
from flsv.engines.client_manager import ClientManager
from flsv.engines.cohort import CohortTraining
from flsv.engines.one_process import Instruct, OneProcess
from flsv.engines.ranks.strategy import ranks_of, share_weights
from flsv.training.client_turn import Turn
from flsv.training.cohort_loader import CohortLoader, Run
from flsv.utilities.seeding import global_rngs, restore_global_rngs, restore_torch_rngs, torch_rngs


class RankTraining(CohortTraining):
    """The training of this rank's clients of a cohort; :meth:`exchange` then gathers the updates of all ranks.

    Attributes:
        idle: whether this rank has no client in this round.
    """

    idle = False

    def begin_round(self, loader: CohortLoader, instructions: dict[int, Instruction], num_samples: Tensor) -> None:
        super().begin_round(loader, instructions, num_samples)
        self.idle = not loader.visits
        self._cohort = list(instructions)
        self._trained: dict[int, Tensor] | None = None
        self._begun = counts_so_far(self._trainer)

    @property
    def position(self) -> int:
        """Return the index in the cohort of the client that this rank trains now or has trained last; the cohort's size
        if the rank has no client in the round."""
        if self.idle:
            return len(self._cohort)
        return self._cohort.index(self._visits[min(self._visited, len(self._visits) - 1)].client)

    def train(self, run: Run) -> None:
        if not self.idle:
            super().train(run)
            return
        state = self.turn.state
        state.begin_turns()
        state.enter(self._cohort[0])  # so the federation's schedules do not step on this rank's idle batch
        run(True)
        state.leave(keep=False)

    def trained(self) -> dict[int, Tensor]:
        return super().trained() if self._trained is None else self._trained

    def exchange(self, ranks: Ranks, round_index: int, keep_trained: bool) -> None:
        """Exchange the updates with the other ranks, after all ranks have trained their clients; each rank then holds
        all updates of the cohort.

        Args:
            ranks: the processes.
            round_index: the round's index, from 0.
            keep_trained: whether to exchange also the trained models of clients whose uploads have changed them.
        """
        about, device = f"the updates of round {round_index}", self._matrix.device
        own = counts_so_far(self._trainer) - self._begun
        own = own._replace(stepped=own.stepped + 1)  # Lightning adds the last batch after its hooks
        rows, trained = self._vectors(), super().trained() if keep_trained else {}
        has_last = not self.idle and self._visits[-1].client == self._cohort[-1]
        told = {
            "updates": [replace(update, vector=update.vector.new_empty(0)) for update in self.updates],
            "broken": self.broken,
            "trained": {client: model for client, model in trained.items() if model is not rows[client]},
            "buffers": self.turn.state.next_buffers,
            "counted": Counted() if self.idle else own,
            "last": (*global_rngs()[:2], *torch_rngs(device)) if has_last else None,
        }
        parts = ranks.all_gather(told, about)
        self._take_all(ranks, parts, about)
        if keep_trained:
            self._trained = self._vectors()
            for part in parts:
                self._trained |= part["trained"]
        (last,) = [part["last"] for part in parts if part["last"] is not None]
        restore_global_rngs((*last[:3], None))
        restore_torch_rngs(last[2:], device)
        everywhere = Counted(*(sum(numbers) for numbers in zip(*(part["counted"] for part in parts))))
        add(self._trainer, everywhere - own)

    def _vectors(self) -> dict[int, Tensor]:
        """Return ``{client id: model}``, the models ``[P]`` that this rank's updates hold."""
        return {update.client_id: update.vector for update in self.updates}

    def _take_all(self, ranks: Ranks, parts: Sequence[Mapping[str, Any]], about: str) -> None:
        """Replace this rank's updates by the updates of all ranks, in the order of the cohort.

        Args:
            ranks: the processes.
            parts: for each rank, the mapping that it has sent: its updates without their vectors, and other results.
            about: a description of the exchange, for error messages.
        """
        told = {update.client_id: (rank, update) for rank, part in enumerate(parts) for update in part["updates"]}
        clients = [client for client in self._cohort if client in told]
        owners = [told[client][0] for client in clients]
        matrix = empty_rows(len(clients), self.global_vector, self._trainer.default_root_dir)
        rows = dict(zip(clients, matrix))
        for client, vector in self._vectors().items():
            rows[client].copy_(vector)
        ranks.broadcast_rows(matrix, owners, about)
        self.updates = [replace(told[client][1], vector=row) for client, row in rows.items()]
        self._matrix = matrix
        self.broken = [client for client in self._cohort if any(client in part["broken"] for part in parts)]
        if owners:
            self.turn.state.next_buffers = parts[owners[0]]["buffers"]


class SeveralRanks(OneProcess):
    """The engine of one rank among several, each of which trains a part of the cohort's clients.

    Each client is trained, evaluated and tested on one rank, which also keeps its state. The evaluation of coalitions
    is spread over all ranks. Every rank does all other work of the server, on the same numbers; a check at the end of
    every round compares the results.

    Args:
        trainer: the trainer, with its module on its device and its optimizers set up.
        data: the data module, with its samples assigned to clients.
        rest: the further arguments of :class:`flsv.engines.one_process.OneProcess`.
    """

    def __init__(self, trainer: L.Trainer, data: FederatedDataModule, *rest: Any) -> None:
        self._strategy: Any = trainer.strategy
        self.ranks = ranks_of(trainer)
        self.owners = ClientPlacement(self.ranks, data.num_samples.tolist())
        share_weights(trainer.lightning_module, self.ranks)
        super().__init__(trainer, data, *rest)
        self._logged: LoggedValues | None = None

    @property
    def cohort(self) -> RankTraining:
        return cast(RankTraining, super().cohort)

    def begin_training(self, buffers: dict[str, Any] | None) -> None:
        # Every rank has read all clients' states from the checkpoint.
        clients = self.store.clients()
        self.owners.bind(clients)
        self.store.keep(self.owners.mine(clients))
        super().begin_training(buffers)
        of = self.cohort
        self._logged = LoggedValues(self.trainer, lambda: of.position, self._exchange_logged, lambda: of.idle)
        self._gather()

    def _make_manager(self) -> ClientManager:
        return ClientManager(self.trainer, self.data, self.space, self.store, self.owners)

    def _make_cohort(self, turn: Turn) -> RankTraining:
        return RankTraining(turn, self.manager)

    def _load(self, clients: list[int]) -> CohortLoader:
        self.owners.deal(clients)
        if mine := self.owners.mine(clients):
            return super()._load(mine)
        # Lightning ends a fit whose loader is empty: an idle rank gets one batch, whose training is discarded.
        idle = CohortLoader(self.data, clients[:1], seed=self._state.seed, round_index=self._state.round_index, limit=1)
        idle.visits = []
        return idle

    def _train(self, cohort: CohortTraining) -> None:
        self._strategy.within_round = True  # until the clients are trained; after an error, until the fit is closed
        super()._train(cohort)
        if cohort.complete:
            self._strategy.within_round = False
            self.cohort.exchange(self.ranks, self._state.round_index, self._config.evaluation.keeps)

    def settle(self) -> None:
        # All ranks learn which clients have a state; these clients stay on their rank.
        parts = self.ranks.all_gather(sorted(self.store.clients()), "clients that keep something")
        self.owners.bind([client for part in parts for client in part])
        self._gather()

    def discard(self) -> bool:
        # The other ranks would wait for this rank at the end of the round.
        self.ranks.abort(f"its round {self._state.round_index + 1} ended before the last batch")
        return super().discard()

    def received(self, instruct: Instruct) -> dict[int, Tensor]:
        return _together(self.ranks.all_gather(self._received(instruct), "the clients' own models"))

    def kept(self) -> dict[int, Any]:
        """Return ``{client id: state}``, the states that this rank's clients keep between rounds. Rank 0, which writes
        checkpoints, returns the states of all clients."""
        return self._kept

    def close(self) -> None:
        self._strategy.within_round = False
        if self._logged is not None:
            self._logged.remove()
        super().close()

    def own_scores(self, instruct: Instruct) -> dict[str, Tensor]:
        own = super().own_scores(instruct)
        result = {name: torch.full((self._state.num_clients,), float("nan")) for name in own}
        for clients, scores in self.ranks.all_gather((self._mine(), own), "the clients' tests"):
            for name, values in scores.items():
                result[name][clients] = values
        return result

    def _mine(self) -> list[int]:
        return self.owners.mine(range(self._state.num_clients))

    def _gather(self) -> None:
        """Send the states that clients keep between rounds from all ranks to rank 0."""
        self._kept: dict[int, Any] = super().kept()
        if self.owners.bound:
            parts = self.ranks.all_gather(self._kept, "what clients keep")
            if self.ranks.rank == 0:
                self._kept = _together(parts)

    def _exchange_logged(self, value: Any, about: str) -> list[Any]:
        # After an epoch that ended early the other ranks do not take part.
        return [value] if self.cohort.discarded else self.ranks.all_gather(value, about)


def check_agreement(ranks: Ranks, round: Round, model: Tensor, contributions: Mapping[str, Tensor]) -> None:
    """Check that all ranks have computed the same global model, weights and metrics; with one process do nothing.

    Args:
        ranks: the processes.
        round: the round.
        model: ``[P]``, the next global model.
        contributions: the metrics' values by name.

    Raises:
        RuntimeError: two ranks differ.
    """
    if ranks.size == 1:
        return
    values = {"global model": model, "aggregation weights": round.aggregation_weights}
    values |= {f"metric {name}": value for name, value in contributions.items()}
    sums = {name: _checksum(value) for name, value in values.items() if value is not None}
    for rank, theirs in enumerate(ranks.all_gather(sums, "checksums")):
        if differ := [name for name in {**sums, **theirs} if sums.get(name) != theirs.get(name)]:
            first, second = sorted((ranks.rank, rank))
            raise RuntimeError(
                f"round {round.round_index + 1}: ranks {first} and {second} do not agree on the {differ[0]}. "
                "Every rank is the whole server and must come to the same numbers: a strategy or metric must draw "
                "from round.generator(name) only, and all ranks need processors of one kind."
            )


def _together(parts: Sequence[dict[int, Any]]) -> dict[int, Any]:
    """Merge the ranks' dictionaries, whose keys are client ids, into one that is sorted by id."""
    found = {client: kept for part in parts for client, kept in part.items()}
    return {client: found[client] for client in sorted(found)}


def _checksum(value: Tensor) -> int:
    """Return a checksum of a tensor's bytes."""
    return zlib.crc32(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
