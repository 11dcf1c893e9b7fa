"""CohortTraining: the training of a round's cohort in one Trainer, one client after the other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flsv.attacks import Collusion
from flsv.core import ClientUpdate, Instruction, Traffic, opened
from flsv.core.matrix import copied_rows, empty_rows
from flsv.data.groups import client_called
from flsv.engines.client_manager import ClientManager
from flsv.training.client_turn import Turn
from flsv.training.cohort_loader import ClientBatches, CohortLoader, Run


class CohortTraining:
    """The training of a cohort: it trains a Trainer's module for one client after the other, and collects the updates.

    Args:
        turn: the object that begins and ends the training of each client.
        manager: the clients' data.

    Attributes:
        turn: the object that begins and ends the training of each client.
        updates: the clients' updates of the round so far, in the order in which clients trained.
        broken: ids of the clients that sent no update because their trained model was not finite.
        discarded: whether the round was stopped before its end, and is forgotten.
    """

    def __init__(self, turn: Turn, manager: ClientManager) -> None:
        self.turn, self._manager = turn, manager
        self._trainer: Any = turn.trainer
        self.updates: list[ClientUpdate] = []
        self.broken: list[int] = []
        self._visits: list[ClientBatches] = []
        self._matrix = torch.empty(0)
        self._visited, self.discarded = 0, False

    def begin_round(self, loader: CohortLoader, instructions: dict[int, Instruction], num_samples: Tensor) -> None:
        """Begin a round; the module and :attr:`global_vector` must hold the global model.

        Args:
            loader: the round's batches.
            instructions: the server's message to every client of the cohort, by client id.
            num_samples: ``[n]``, the number of training samples of each of the federation's n clients.
        """
        self._loader, self._visits = loader, loader.visits
        self._instructions, self._samples = instructions, num_samples
        self._matrix = empty_rows(len(self._visits), self.global_vector, self._trainer.default_root_dir)
        self.updates, self.broken, self._visited, self.discarded = [], [], 0, False

    @property
    def global_vector(self) -> Tensor:
        """Return the global model ``[P]`` at the start of the round."""
        return self.turn.state.global_vector

    @property
    def complete(self) -> bool:
        """Return whether the cohort's last batch has been trained on."""
        return self._visited == len(self._visits)

    @property
    def heard(self) -> set[int]:
        """Return the ids of the clients that have trained in this round, also of those whose trained model was not
        finite."""
        return {*self.broken, *(update.client_id for update in self.updates)}

    @property
    def client(self) -> int | None:
        """Return the id of the client that trains now; None after the cohort's last client."""
        return self._visits[self._visited].client if self._visited < len(self._visits) else None

    @property
    def place(self) -> str:
        """Return the present client's place in the cohort as text, such as ``"3/10"`` for the third of ten clients."""
        return f"{min(self._visited + 1, len(self._visits))}/{len(self._visits)}"

    @property
    def matrix(self) -> Tensor:
        """Return the models ``[k, P]`` that k clients have sent in this round, in the order of ``updates``."""
        return self._matrix[: len(self.updates)]

    def trained(self) -> dict[int, Tensor]:
        """Return ``{client id: model}``, the models ``[P]`` that clients have trained in this round, before uploads
        change them.

        Clients that the server has excluded from the round have no entry."""
        models = {update.client_id: self._manager.trained(update.client_id) for update in self.updates}
        return {client: model for client, model in models.items() if model is not None}

    def train(self, run: Run) -> None:
        """Train the cohort's clients one after the other, or until the fit is told to stop.

        Args:
            run: a function that runs Lightning's training epoch on one client's batches.
        """
        for visit in self._visits:
            data, samples = self._manager.locals[visit.client], int(self._samples[visit.client])
            self.turn.begin(self._instructions[visit.client], data, samples, visit.batches)
            self._loader.train(visit, run)
            if not self.turn.is_trained:
                return
            self._end_client()

    def _end_client(self) -> None:
        """End the present client's training and store its update, or forget the client if its model is not finite."""
        client = self._visits[self._visited].client
        # A broken client's row is overwritten by the next client's.
        update = self.turn.end(out=self._matrix[len(self.updates)])
        if update is None:
            self.broken.append(client)
            self._manager.forget(client)
        else:
            self.updates.append(update)
        self._visited += 1

    def collude(self, colluders: Sequence[Collusion], num_clients: int, round_index: int) -> None:
        """Replace the updates of colluding clients by those that the attacks compute, one attack after the other.

        Args:
            colluders: the attacks.
            num_clients: the federation's number of clients.
            round_index: the round's index, from 0.
        """
        start = self.global_vector
        cut, ids = self.turn.state.space.num_parameters, [update.client_id for update in self.updates]
        for attack in colluders:
            sent = attack.sent(ids, self.matrix[:, :cut] - start[:cut], num_clients, round_index)
            if not sent:
                continue
            self._matrix = copied_rows(self.matrix)  # the clients' own models are rows of the matrix, and must stay
            for row, update in enumerate(self.updates):
                vector, dense = self._matrix[row], update
                if update.client_id in sent:
                    vector[:cut] = start[:cut] + sent[update.client_id]
                    traffic = Traffic(vector.numel(), float(vector.numel() * vector.element_size()))
                    dense = replace(update, traffic=traffic)
                self.updates[row] = replace(dense, vector=vector)
                with opened(self._manager.locals[update.client_id]) as local:
                    if local.model is not None:  # the client has trained in this process
                        local.set_models(local.start, local.model, vector, local.tell)

    def leave_out(self, clients: Collection[int]) -> None:
        """Forget the models and the changed state of clients whose updates the server has excluded from the round, as
        if they had not taken part."""
        if self.updates and self.updates[0].client_id in clients:
            self.turn.state.next_buffers = None  # the next global model keeps the counters of the round's start
        for client in clients:
            self._manager.forget(client)

    def end_round(self, vector: Tensor) -> None:
        """End the round: write the next global model ``vector [P]`` into the module."""
        self.turn.state.end_round(vector)
        self._forget()

    def discard(self) -> bool:
        """Forget an unfinished round and restore the model from before the round.

        Returns:
            True if the round is discarded now; False if it was discarded before.
        """
        if self.discarded:
            return False
        self.turn.discard()
        self._forget()
        self.discarded = True
        return True

    def _forget(self) -> None:
        for visit in self._visits:
            self._manager.locals[visit.client].set_models(None, None)
        self._matrix, self.updates, self._instructions = self._matrix.new_empty(0), [], {}


def where(client: int | None, round_index: int, names: Sequence[str] = ()) -> str:
    """Describe where an error happened, for an error message; the text counts rounds from 1.

    Args:
        client: the number of the client that was training; None if the error happened at the server.
        round_index: the round's index, from 0.
        names: the clients' names; if empty, clients are named by number only.

    Example:
        >>> where(2, 5)
        'while client 2 trained in round 6'
        >>> where(1, 5, ("Boston", "Lyon"))
        "while client 1 ('Lyon') trained in round 6"
    """
    who = "at the server" if client is None else f"while {client_called(client, names)} trained"
    return f"{who} in round {round_index + 1}"
