"""SeveralRanks: the engine that spreads the clients over processes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from flsv._lightning.several_processes import Counted, LoggedValues, add, counts_so_far
from flsv.core import ClientPlacement, Round, ranks_of
from flsv.core.matrix import empty_rows
from flsv.data import FederatedDataModule
from flsv.engines.client_manager import ClientManager
from flsv.engines.engine import Engine, Instruct
from flsv.engines.ranks import share_weights
from flsv.training.client_batches import CohortLoader
from flsv.utilities.seeding import global_rngs, restore_global_rngs, restore_torch_rngs, torch_rngs


class SeveralRanks(Engine):
    """Engine of one rank (process), which trains a part of the cohort's clients.

    Each client is trained, evaluated and tested on one rank, which also keeps its state. The evaluation of coalitions
    is spread over all ranks. Every rank does all other work of the server, on the same numbers, and a check at the end
    of every round compares the results.

    Args:
        trainer: the trainer, with its module on its device and its optimizers set up.
        data: the data module, with its samples assigned to clients.
        rest: the further arguments of :class:`flsv.engines.engine.Engine`.
    """

    def __init__(self, trainer: L.Trainer, data: FederatedDataModule, *rest: Any) -> None:
        self._strategy: Any = trainer.strategy
        self.ranks = ranks_of(trainer)
        work = zip(rest[-1].work.values(), data.num_samples.tolist())
        self.owners = ClientPlacement(
            self.ranks, [each.steps or each.epochs * samples for each, samples in work]
        )
        share_weights(trainer.lightning_module, self.ranks)
        super().__init__(trainer, data, *rest)
        self._logged: LoggedValues | None = None
        self._clients: list[int] = []
        self._all_trained: dict[int, Tensor] | None = None

    def begin_training(self, buffers: dict[str, Any] | None) -> None:
        # Every rank has read all clients' states from the checkpoint.
        clients = self.store.clients()
        self.owners.bind(clients)
        self.store.keep(self.owners.mine(clients))
        super().begin_training(buffers)
        self._logged = LoggedValues(self.trainer, self._position, self._exchange_logged, self._idle)
        self._gather()

    def _make_manager(self) -> ClientManager:
        return ClientManager(self.trainer, self.data, self.space, self.store, self.owners)

    def _load(self, clients: list[int]) -> CohortLoader:
        self.owners.deal(clients)
        if mine := self.owners.mine(clients):
            return super()._load(mine)
        # Lightning ends a fit whose loader is empty: an idle rank gets one batch, whose training is discarded.
        seed, index = self._state.seed, self._state.round_index
        idle = CohortLoader(
            self.data, clients[:1], seed=seed, round_index=index, lengths=lambda *_: [1]
        )
        idle.visits = []
        return idle

    def _idle(self) -> bool:
        return not self._visits

    def _position(self) -> int:
        if self._idle():
            return len(self._clients)
        return self._clients.index(self._visits[min(self._visited, len(self._visits) - 1)].client)

    def _train(self, batches: Any) -> None:
        self._strategy.within_round = (
            True  # until the clients are trained; after an error, until the fit is closed
        )
        self._clients, self._all_trained = list(self._instructions), None
        self._counted = counts_so_far(self.trainer)
        if self._idle():
            state = self.local_training.state
            state.begin_clients()
            state.enter(
                self._clients[0]
            )  # so the federation's schedules do not step on this rank's idle batch
            self.loop.train_epoch()
            state.leave(keep=False)
        else:
            super()._train(batches)
        if self.complete:
            self._strategy.within_round = False
            self._exchange()

    def trained(self) -> dict[int, Tensor]:
        return super().trained() if self._all_trained is None else self._all_trained

    def _exchange(self) -> None:
        ranks, keep_trained = self.ranks, self._config.evaluation.keeps
        exchange_name, device = (
            f"the updates of round {self._state.round_index}",
            self._matrix.device,
        )
        own = counts_so_far(self.trainer) - self._counted
        own = own._replace(stepped=own.stepped + 1)  # Lightning adds the last batch after its hooks
        rows, trained = self._vectors(), super().trained() if keep_trained else {}
        has_last = not self._idle() and self._visits[-1].client == self._clients[-1]
        told = {
            "updates": [
                replace(update, vector=update.vector.new_empty(0)) for update in self.updates
            ],
            "broken": self.broken,
            "trained": {
                client: model for client, model in trained.items() if model is not rows[client]
            },
            "buffers": self.local_training.state.next_buffers,
            "counted": Counted() if self._idle() else own,
            "last": (*global_rngs()[:2], *torch_rngs(device)) if has_last else None,
        }
        parts = ranks.all_gather(told, exchange_name)
        self._take_all(parts, exchange_name)
        if keep_trained:
            self._all_trained = self._vectors()
            for part in parts:
                self._all_trained |= part["trained"]
        (last,) = [part["last"] for part in parts if part["last"] is not None]
        restore_global_rngs((*last[:3], None))
        restore_torch_rngs(last[2:], device)
        everywhere = Counted(
            *(sum(numbers) for numbers in zip(*(part["counted"] for part in parts)))
        )
        add(self.trainer, everywhere - own)

    def _vectors(self) -> dict[int, Tensor]:
        return {update.client_id: update.vector for update in self.updates}

    def _take_all(self, parts: Sequence[Mapping[str, Any]], exchange_name: str) -> None:
        told = {
            update.client_id: (rank, update)
            for rank, part in enumerate(parts)
            for update in part["updates"]
        }
        clients = [client for client in self._clients if client in told]
        owners = [told[client][0] for client in clients]
        matrix = empty_rows(len(clients), self.global_vector, self.trainer.default_root_dir)
        rows = dict(zip(clients, matrix))
        for client, vector in self._vectors().items():
            rows[client].copy_(vector)
        self.ranks.broadcast_rows(matrix, owners, exchange_name)
        self.updates = [replace(told[client][1], vector=row) for client, row in rows.items()]
        self._matrix = matrix
        self.broken = [
            client for client in self._clients if any(client in part["broken"] for part in parts)
        ]
        if owners:
            self.local_training.state.next_buffers = parts[owners[0]]["buffers"]

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
        return _together(
            self.ranks.all_gather(super().received(instruct), "the clients' own models")
        )

    def kept(self) -> dict[int, Any]:
        """Return the states of this rank's clients. Rank 0 returns those of all clients, for checkpoints."""
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

    def check_agreement(
        self, round: Round, model: Tensor, contributions: Mapping[str, Tensor]
    ) -> None:
        values = {
            "global model": model,
            "aggregation weights": round.aggregation_weights,
            **{f"metric {name}": value for name, value in contributions.items()},
        }
        checksums = {name: _checksum(value) for name, value in values.items() if value is not None}
        for rank, checksums_of_rank in enumerate(self.ranks.all_gather(checksums, "checksums")):
            for name in {**checksums, **checksums_of_rank}:
                if checksums.get(name) != checksums_of_rank.get(name):
                    self._raise_disagreement(round, rank, name)

    def _raise_disagreement(self, round: Round, rank: int, name: str) -> None:
        lower, higher = sorted((self.ranks.rank, rank))
        raise RuntimeError(
            f"round {round.round_index + 1}: ranks {lower} and {higher} do not agree on the {name}. "
            "Every rank is the whole server and must come to the same numbers: a strategy or metric must draw "
            "from round.generator(name) only, and all ranks need processors of one kind."
        )

    def _mine(self) -> list[int]:
        return self.owners.mine(range(self._state.num_clients))

    def _gather(self) -> None:
        self._kept: dict[int, Any] = super().kept()
        if self.owners.bound:
            parts = self.ranks.all_gather(self._kept, "what clients keep")
            if self.ranks.rank == 0:
                self._kept = _together(parts)

    def _exchange_logged(self, value: Any, exchange_name: str) -> list[Any]:
        # After an epoch that ended early the other ranks do not take part.
        return [value] if self.discarded else self.ranks.all_gather(value, exchange_name)


def _together(parts: Sequence[dict[int, Any]]) -> dict[int, Any]:
    found = {client: kept for part in parts for client, kept in part.items()}
    return {client: found[client] for client in sorted(found)}


def _checksum(value: Tensor) -> int:
    return zlib.crc32(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
