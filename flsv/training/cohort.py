"""A round's cohort in a Trainer: its batches, and the switching of the one module from client to client."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from torch import Tensor

from flsv.attacks import Collusion
from flsv.core import ClientUpdate, Instruction, Traffic, opened
from flsv.core.matrix import copied_rows, empty_rows
from flsv.data import FederatedDataModule
from flsv.data.groups import client_called
from flsv.functional.distances import distances
from flsv.training.client_manager import ClientManager
from flsv.training.local_steps import limited
from flsv.training.turn import Turn
from flsv.utilities.seeding import isolated_rngs, seed_global_rngs, shuffle_stream


@dataclass(frozen=True)
class ClientBatches:
    """One client's part of a round: ``batches`` batches in all its local epochs, ``epoch`` in each."""

    client: int
    batches: int
    epoch: int


class CohortLoader(Iterable[Any]):
    """The train dataloader of one round.

    What a client sees depends on the seed, the round and the client only, not on who else is in the cohort: every local
    epoch is shuffled by a generator of its own.

    Args:
        data: where the clients' loaders come from.
        cohort: client ids, in the order of their visits.
        seed: the run's seed.
        round_index: the round.
        local_epochs: passes over each client's data.
        limit: Lightning's ``limit_train_batches``, per client and local epoch: a number of batches (int) or a share
            (float).
    """

    def __init__(
        self,
        data: FederatedDataModule,
        cohort: Sequence[int],
        *,
        seed: int,
        round_index: int,
        local_epochs: int = 1,
        limit: float = 1.0,
    ) -> None:
        self.round_index, self._seed, self._local_epochs = round_index, seed, local_epochs
        self._data = data
        self._epochs: list[tuple[int, Any, int]] = []
        self.visits = []
        for client in cohort:
            streams = [shuffle_stream(seed, round_index, client, epoch) for epoch in range(local_epochs)]
            loaders = [data.client_loader(client, "train", generator=stream) for stream in streams]
            batches = limited(len(loaders[0]), limit)
            self._epochs += [(client, loader, batches) for loader in loaders]
            self.visits.append(ClientBatches(client, batches * local_epochs, batches))

    def __len__(self) -> int:
        return sum(batches for _, _, batches in self._epochs)

    def __iter__(self) -> Iterator[Any]:
        for place, (client, loader, batches) in enumerate(self._epochs):
            # Lightning asks for the first batch while the client before still trains: what augmentation draws for it
            # must come from neither that client's random state, nor change it.
            with isolated_rngs(self._seed, "first batch", self.round_index, client, place % self._local_epochs):
                iterator = iter(loader)
                first = list(islice(iterator, 1))
            if place % self._local_epochs == 0:
                # Lightning passes it through the transfer hooks, which may augment it, before the client begins.
                seed_global_rngs(self._seed, "transfer", self.round_index, client)
            given = 0
            for batch in chain(first, islice(iterator, batches - 1)):
                given += 1
                yield batch
            # Else the next client's batches would be taken for this one's.
            self._check_given(client, given, batches)

    def _check_given(self, client: int, given: int, batches: int) -> None:
        if given < batches:
            raise RuntimeError(
                f"{client_called(client, self._data.client_names)} gave {given} of {batches} batches in round "
                f"{self.round_index + 1}: its data set raised StopIteration, or is shorter than its length."
            )


class CohortTraining:
    """Switches a Trainer's module from client to client and collects their updates.

    Args:
        turn: of each client.
        manager: the clients as holders of data.

    Attributes:
        turn: as given.
        updates: what the clients of the round have sent so far.
        broken: ids of the clients whose model was not finite: they have sent nothing.
        active: whether a round has begun and not ended.
    """

    def __init__(self, turn: Turn, manager: ClientManager) -> None:
        self.turn, self._manager = turn, manager
        self._trainer: Any = turn.trainer
        self.updates: list[ClientUpdate] = []
        self.broken: list[int] = []
        self.active = False

    def begin_round(self, loader: CohortLoader, instructions: dict[int, Instruction], num_samples: Tensor) -> None:
        """The module holds the global model, as :attr:`global_vector` does.

        Args:
            loader: the round's batches.
            instructions: what the server says to every client of the cohort.
            num_samples: ``[n]`` training samples of every client.
        """
        self._visits, self._instructions, self._samples = loader.visits, instructions, num_samples
        self._matrix = empty_rows(len(self._visits), self.global_vector, self._trainer.default_root_dir)
        self.updates, self.broken, self._visited, self.active, self._discarded = [], [], 0, True, False

    @property
    def global_vector(self) -> Tensor:
        """``[P]``, the global model at the start of the round."""
        return self.turn.shared.global_vector

    @property
    def client(self) -> int | None:
        """The client whose turn it is; None after the cohort's last."""
        return self._visits[self._visited].client if self._visited < len(self._visits) else None

    @property
    def place(self) -> str:
        """``"3/10"``: the third of ten clients."""
        return f"{self._visited + 1}/{len(self._visits)}"

    @property
    def batch_idx(self) -> int:
        """The place of the current batch in its client's local epoch."""
        return self.turn.position % self._visits[self._visited].epoch

    @property
    def matrix(self) -> Tensor:
        """``[k, P]``: the models that have been sent, in the order of ``updates``."""
        return self._matrix[: len(self.updates)]

    def trained(self) -> dict[int, Tensor]:
        """Client id to the model ``[P]`` that it has trained in this round; its upload may be another. Without those
        who have been left out, whose round is forgotten."""
        models = {update.client_id: self._manager.trained(update.client_id) for update in self.updates}
        return {client: model for client, model in models.items() if model is not None}

    def begin_batch(self, batch: Any = None) -> bool:
        """Before every batch, as the module gets it. Whether it is a client's first."""
        first = self.turn.context is None
        if first:
            visit = self._visits[self._visited]
            data, samples = self._manager.locals[visit.client], int(self._samples[visit.client])
            self.turn.begin(self._instructions[visit.client], data, samples, visit.batches)
        self.turn.begin_batch(batch)
        return first

    def end_batch(self, loss: Tensor | None) -> bool:
        """After every batch, with its training loss if there is one. Whether it was the cohort's last."""
        if self.turn.end_batch(loss):
            self._end_client()
        return self._visited == len(self._visits)

    def _end_client(self) -> None:
        """The client whose turn it is has trained."""
        client = self._visits[self._visited].client
        # The rows of the clients that are kept lie together.
        update = self.turn.end(out=self._matrix[len(self.updates)])
        if update is None:
            self.broken.append(client)
            self._manager.forget(client)
        else:
            self.updates.append(update)
        self._visited += 1

    def collude(self, colluders: Sequence[Collusion], num_clients: int, round_index: int) -> None:
        """Those of the cohort who have an agreement send what they have agreed on, each after the one before.

        Args:
            colluders: the attacks.
            num_clients: clients of the federation.
            round_index: the round.
        """
        start = self.global_vector
        cut, ids = self.turn.shared.space.num_parameters, [update.client_id for update in self.updates]
        for attack in colluders:
            sent = attack.sent(ids, self.matrix[:, :cut] - start[:cut], num_clients, round_index)
            if not sent:
                continue
            self._matrix = copied_rows(self.matrix)  # a client's own model is the row that it would have sent
            for row, update in enumerate(self.updates):
                vector, dense = self._matrix[row], update
                if update.client_id in sent:
                    vector[:cut] = start[:cut] + sent[update.client_id]
                    norm = distances(vector[None, :cut], start[:cut]).item()
                    traffic = Traffic(vector.numel(), float(vector.numel() * vector.element_size()))
                    dense = replace(update, norm=norm, traffic=traffic)
                self.updates[row] = replace(dense, vector=vector)
                with opened(self._manager.locals[update.client_id]) as local:
                    if local.model is not None:  # it has trained in this process
                        local.set_models(local.start, local.model, vector, local.tell)

    def leave_out(self, clients: Collection[int]) -> None:
        """The server has left out what these clients sent: it is as if they had not taken part."""
        if self.updates and self.updates[0].client_id in clients:
            self.turn.shared.next_buffers = None  # counters of the first client: they stay as before the round
        for client in clients:
            self._manager.forget(client)

    def end_round(self, vector: Tensor) -> None:
        """The round is complete: the module becomes the next global model."""
        self.turn.shared.end_round(vector)
        self._forget()
        self.active = False

    def discard(self) -> bool:
        """Forget an unfinished round: the module is the global model of its start again. Whether there was one."""
        if not self.active or self._discarded:
            return False
        self.turn.discard()
        self._forget()
        # `active` stays: a checkpoint saved from here on is still one of the round's start.
        self._discarded = True
        return True

    def _forget(self) -> None:
        for visit in self._visits:
            self._manager.locals[visit.client].set_models(None, None)
        self._matrix, self.updates, self._instructions = self.global_vector.new_empty(0), [], {}


def where(client: int | None, round_index: int, names: Sequence[str] = ()) -> str:
    """A place in a federation, in words; the round counted from 1, as everywhere that people read.

    Args:
        client: its number; None: none.
        round_index: the round.
        names: of the clients.

    Example:
        >>> where(2, 5)
        'while client 2 trained in round 6'
        >>> where(1, 5, ("Boston", "Lyon"))
        "while client 1 ('Lyon') trained in round 6"
    """
    who = "at the server" if client is None else f"while {client_called(client, names)} trained"
    return f"{who} in round {round_index + 1}"
