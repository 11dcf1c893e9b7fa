"""SeveralRanks: a federation whose clients are spread over processes, each of which computes the whole server step."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from flsv._lightning.several_processes import Counted, LoggedValues, add, counted
from flsv.clients.client_manager import ClientManager
from flsv.clients.cohort import CohortLoader, CohortTraining
from flsv.clients.train_client import LocalTraining
from flsv.data import FederatedDataModule
from flsv.engines.one_process import OneProcess
from flsv.engines.ranks.strategy import FederatedStrategy, in_a_line, share_weights
from flsv.participants import ClientStates, Owners, Ranks, at
from flsv.round import FederationState, Instruction, Round
from flsv.round.matrix import empty_rows
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

    def begin_round(self, loader: CohortLoader, instructions: dict[int, Instruction], num_samples: Tensor) -> None:
        super().begin_round(loader, instructions, num_samples)
        self.idle, self._cohort = not loader.visits, list(instructions)
        self._trained: dict[int, Tensor] | None = None
        self._begun = counted(self._trainer)

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
        places, folder = [(rank, row) for _, rank, row in where], self._trainer.default_root_dir
        matrix = _gathered_rows(ranks, self.matrix, places, about, self.local.global_vector, folder)
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


def _gathered_rows(
    ranks: Ranks, mine: Tensor, where: Sequence[tuple[int, int]], about: str, like: Tensor, folder: str
) -> Tensor:
    """The cohort's matrix ``[k, P]``, of rows by rank and place in that rank's."""
    matrix = empty_rows(len(where), like, folder)
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


class SeveralRanks(OneProcess):
    """One rank's part of a federation.

    Clients are trained, asked and tested on the rank that they belong to, and what they keep stays there; coalitions
    are evaluated on all ranks; everything else of the server's every rank does alike, on the same numbers. That it does
    is checked at the end of every round.
    """

    training: RankTraining | None

    def __init__(
        self,
        trainer: L.Trainer,
        data: FederatedDataModule,
        state: FederationState,
        states: ClientStates,
        *rest: Any,
    ) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, FederatedStrategy)
        self._strategy, self.ranks = strategy, strategy.ranks
        self.owners = Owners(self.ranks, data.num_samples.tolist())
        share_weights(trainer.lightning_module, strategy)
        super().__init__(trainer, data, state, states, *rest)
        self._saved: tuple[dict[int, Any], dict[str, Any]] | None = None
        self._logged: LoggedValues | None = None

    def begin_training(self, optimizer_state: dict[str, Any] | None, buffers: dict[str, Any] | None) -> None:
        owners, states = self.owners, self._states
        # Every rank has read everybody's from the checkpoint.
        held = optimizer_state or {"states": {}, "paces": {}}
        owners.bind(states.clients() | set(held["states"]) | set(held["paces"]))
        states.keep(owners.mine(states.clients()))
        if optimizer_state is not None:
            mine = {part: {c: s for c, s in held[part].items() if owners.has(c)} for part in ("states", "paces")}
            optimizer_state = {**optimizer_state, **mine}
        super().begin_training(optimizer_state, buffers)
        training = self.clients
        assert isinstance(training, RankTraining)
        self._logged = LoggedValues(
            self._trainer, lambda: training.position, self._exchange_logged, lambda: training.idle
        )
        self._save()

    def _make_manager(self) -> ClientManager:
        return ClientManager(self._trainer, self._data, self.space, self._states, self.owners)

    def _make_training(self, local: LocalTraining) -> RankTraining:
        return RankTraining(local, self.manager)

    def loader(self, limit: float) -> CohortLoader:
        """The train dataloader of this rank's part of the current round."""
        state = self._state
        if self._loader is None or self._loader.round_index != state.round_index:
            self.owners.deal(self._cohort())
            mine = self.owners.mine(state.cohort)
            if mine:
                self._loader = self._load(mine, limit)
            else:
                self._loader = IdleLoader(self._data, state.cohort[0], state.seed, state.round_index)
        return self._loader

    def begin_round(self, loader: CohortLoader) -> None:
        super().begin_round(loader)
        self._strategy.within_round = True

    def end_round(self, evaluate: Callable[[], bool]) -> Round:
        self._strategy.within_round = False
        training = self.clients
        assert isinstance(training, RankTraining)
        training.exchange(self.ranks, self._state.round_index, self._config.evaluation.keeps)
        with warnings.catch_warnings():
            if self.ranks.rank:
                warnings.simplefilter("ignore")  # rank 0 says it
            round = super().end_round(evaluate)
        self._check(round)
        return round

    def advance(self, last: bool) -> None:
        super().advance(last)
        # Everybody learns who keeps something, and so must stay where it is.
        own = self._states.clients() | self.clients.local.optimizers.clients()
        parts = self.ranks.everybody(sorted(own), "clients that keep something")
        self.owners.bind([client for part in parts for client in part])
        self._save()

    def failed(self, exception: BaseException, place: str) -> None:
        # Before anything else is done about it: the others wait, and whatever saves a checkpoint now must not.
        self.ranks.give_up(f"{in_a_line(exception)} ({place})")

    def discard(self) -> bool:
        # The others would wait for this rank at the end of the round.
        self.ranks.give_up(f"its round {self._state.round_index} ended before the last batch")
        return super().discard()

    def received(self) -> dict[int, Tensor]:
        return _together(self.ranks.everybody(self._received(), "the clients' own models"))

    def kept(self) -> tuple[dict[int, Any], dict[str, Any]]:
        """The state of clients and their optimizers, for a checkpoint: of all clients on rank 0, which writes it.

        Raises:
            RuntimeError: within a round, where that is on other ranks.
        """
        training = self.clients
        if not (self._strategy.within_round or self.ranks.given_up):
            return self._gathered()
        if self._saved is not None:
            return self._saved
        if not self.owners.bound:
            return super().kept()
        raise RuntimeError(
            f"a checkpoint in the middle of a round (round {self._state.round_index}, client {training.client}) would "
            "lack what the clients of other ranks keep. Save between two rounds, or let a ModelCheckpoint do it."
        )

    def close(self) -> None:
        self._strategy.within_round = False
        if self._logged is not None:
            self._logged.remove()
        super().close()

    def _own_scores(self) -> dict[str, Tensor]:
        own = super()._own_scores()
        result = {name: torch.full((self._state.num_clients,), float("nan")) for name in own}
        for clients, scores in self.ranks.everybody((self._mine(), own), "the clients' tests"):
            for name, values in scores.items():
                result[name][clients] = values
        return result

    def _mine(self) -> list[int]:
        return self.owners.mine(range(self._state.num_clients))

    def _gathered(self) -> tuple[dict[int, Any], dict[str, Any]]:
        states, optimizers = super().kept()
        kept = states, optimizers["states"], optimizers["paces"]
        parts = self.ranks.at_first(kept, "what clients keep")
        if parts is not None:
            states, of_optimizers, paces = (_together([part[i] for part in parts]) for i in range(3))
            optimizers = {**optimizers, "states": of_optimizers, "paces": paces}
        return states, optimizers

    def _save(self) -> None:
        """Between two rounds: for checkpoints that will be asked for in the next."""
        callbacks = [c for c in self._trainer.callbacks if isinstance(c, Checkpoint)]  # type: ignore[attr-defined]
        if self.owners.bound and any(saves_within_rounds(callback) for callback in callbacks):
            self._saved = self._gathered()

    def _exchange_logged(self, value: Any, about: str) -> list[Any]:
        # After an epoch that ended early the others are elsewhere.
        return [value] if self.clients.active else self.ranks.everybody(value, about)

    def _check(self, round: Round) -> None:
        """All ranks must have come to the same.

        Raises:
            RuntimeError: one has not.
        """
        values = {"global model": self._state.model(), "aggregation weights": round.aggregation_weights}
        values |= {f"metric {name}": value for name, value in self.server.board.contributions.items()}
        sums = {name: _checksum(value) for name, value in values.items() if value is not None}
        for rank, theirs in enumerate(self.ranks.everybody(sums, "checksums")):
            differ = [name for name in {**sums, **theirs} if sums.get(name) != theirs.get(name)]
            if differ:
                # In one order, whoever says it first: the other may only hear of it.
                first, second = sorted((self.ranks.rank, rank))
                raise RuntimeError(
                    f"round {round.round_index}: ranks {first} and {second} do not agree on the {differ[0]}. "
                    "Every rank is the whole server and must come to the same numbers: a strategy or metric of your "
                    "own must draw from round.generator(name) only, and all ranks need processors of one kind."
                )


def _together(parts: list[dict[int, Any]]) -> dict[int, Any]:
    found = {client: kept for part in parts for client, kept in part.items()}
    return {client: found[client] for client in sorted(found)}


def saves_within_rounds(callback: Checkpoint) -> bool:
    """Whether a checkpoint callback may save in the middle of a round; yes if unknown."""
    if not hasattr(callback, "_every_n_train_steps"):
        return True
    names = ("_every_n_train_steps", "_train_time_interval", "save_on_exception")
    return any(getattr(callback, name, None) for name in names)


def _checksum(value: Tensor) -> int:
    return zlib.crc32(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
