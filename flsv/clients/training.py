"""Trains a round's cohort within a Trainer, whose one module is each client in turn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any

from torch import Tensor

from flsv.clients.client_manager import ClientManager
from flsv.clients.cohort import CohortLoader
from flsv.clients.train_client import LocalTraining
from flsv.data.groups import client_called
from flsv.round import ClientUpdate, Instruction


class CohortTraining:
    """Switches a Trainer's module from client to client and collects their updates.

    Args:
        local: how a client trains.
        manager: the clients as holders of data.

    Attributes:
        updates: what the clients of the round have sent so far.
        broken: ids of the clients whose model was not finite: they have sent nothing.
        active: whether a round has begun and not ended.
    """

    def __init__(self, local: LocalTraining, manager: ClientManager) -> None:
        self.local, self._manager = local, manager
        self.updates: list[ClientUpdate] = []
        self.broken: list[int] = []
        self.active = False

    def begin_round(self, loader: CohortLoader, instructions: Mapping[int, Instruction], num_samples: Tensor) -> None:
        """The module holds the global model, as :attr:`LocalTraining.global_vector` does.

        Args:
            loader: the round's batches.
            instructions: what the server says to every client of the cohort.
            num_samples: ``[n]`` training samples of every client.
        """
        self._visits, self._instructions, self._samples = loader.visits, instructions, num_samples
        self._matrix = self.local.global_vector.new_empty(len(self._visits), len(self.local.global_vector))
        self.updates, self.broken, self._visited, self.active, self._discarded = [], [], 0, True, False

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
        return self.local.position % self._visits[self._visited].epoch

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
        first = self.local.local is None
        if first:
            visit = self._visits[self._visited]
            data, samples = self._manager.locals[visit.client], int(self._samples[visit.client])
            self.local.begin(self._instructions[visit.client], data, samples, visit.batches)
        self.local.begin_batch(batch)
        return first

    def end_batch(self, loss: Tensor | None) -> bool:
        """After every batch, with its training loss if there is one. Whether it was the cohort's last."""
        if self.local.end_batch(loss):
            self._end_client()
        return self._visited == len(self._visits)

    def _end_client(self) -> None:
        """The client whose turn it is has trained."""
        client = self._visits[self._visited].client
        # The rows of the clients that are kept lie together.
        update = self.local.end(out=self._matrix[len(self.updates)])
        if update is None:
            self.broken.append(client)
            self._manager.forget(client)
        else:
            self.updates.append(update)
        self._visited += 1

    def leave_out(self, clients: Collection[int]) -> None:
        """The server has left out what these clients sent: it is as if they had not taken part."""
        if self.updates and self.updates[0].client_id in clients:
            self.local.next_buffers = None  # counters of the first client: they stay as they were before the round
        for client in clients:
            self._manager.forget(client)
            self.local.optimizers.forget(client)

    def end_round(self, vector: Tensor) -> None:
        """The round is complete: the module becomes the next global model."""
        self.local.end_round(vector)
        self._forget()
        self.active = False

    def discard(self) -> bool:
        """Forget an unfinished round: the module is the global model of its start again. Whether there was one."""
        if not self.active or self._discarded:
            return False
        self.local.discard()
        self._forget()
        # `active` stays: a checkpoint saved from here on is still one of the round's start.
        self._discarded = True
        return True

    def _forget(self) -> None:
        for visit in self._visits:
            self._manager.locals[visit.client].visit(None, None)
        self._matrix, self.updates = self.local.global_vector.new_empty(0), []


def where(client: int | None, round_index: int, names: Sequence[str] = ()) -> str:
    """A place in a federation, in words; both counted from 0.

    Args:
        client: its number; None: none.
        round_index: the round.
        names: of the clients.

    Example:
        >>> where(2, 5)
        'while client 2 trained in round 5'
        >>> where(1, 5, ("Boston", "Lyon"))
        "while client 1 ('Lyon') trained in round 5"
    """
    who = "at the server" if client is None else f"while {client_called(client, names)} trained"
    return f"{who} in round {round_index}"


def name_place(error: BaseException, place: str) -> None:
    """Add the place to what an error says; its type stays, for those who catch it."""
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(f"flsv: {place} (both counted from 0)")
    elif len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} ({place})",)


def no_stop_iteration(function: Callable[..., Any], place: Callable[[], str]) -> Callable[..., Any]:
    """``function``, but a StopIteration that leaves it is an error, as from a generator (PEP 479).

    Lightning takes it for the end of the epoch, or of the step, and goes on as if all were done.
    """

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except StopIteration as error:
            raise RuntimeError(f"training_step raised StopIteration {place()}.") from error

    return guarded
