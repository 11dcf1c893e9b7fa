"""The two messages of a round, Instruction and ClientUpdate, and the state of a federation between two rounds."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flsv.core.client import Direction, Traffic

if TYPE_CHECKING:
    from flsv.core.round import Round

#: Under this name the global model goes down beside another start point, where uploads refer to it.
GLOBAL_MODEL = "global_model"


@dataclass(frozen=True)
class Instruction:
    """The server's message to a client of the cohort.

    Args:
        round_index: the round, from 0.
        client_id: whom it is for.
        seed: the run's; what the client draws follows from it, the round and its number.
        start: ``[P]``, the model to train from; None where the client goes on from what it has.
        tensors: what strategies send beside it, by the names that they declare in ``Strategy.sends``.
    """

    round_index: int
    client_id: int
    seed: int
    start: Tensor | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientUpdate:
    """A client's message to the server.

    Args:
        client_id: whose it is.
        num_samples: how many samples it trained on.
        vector: ``[P]``, its model as it leaves the client.
        loss: its mean training loss, NaN where the module's ``training_step`` gives none.
        num_steps: optimizer steps that it took.
        norm: how far the vector is from where the client started, over the parameters, in float64.
        reports: what strategies let it report, by the names that they declare in ``Strategy.reports``.
        traffic: how large the vector was on its way; None: as it is.
    """

    client_id: int
    num_samples: int
    vector: Tensor
    loss: float = float("nan")
    num_steps: int = 0
    norm: float = float("nan")
    reports: Mapping[str, Tensor] = field(default_factory=dict)
    traffic: Traffic | None = None


@dataclass
class FederationState:
    """The state of a federation between two rounds. n = clients, P = length of the vector.

    Args:
        num_clients: n.
        seed: what every random choice derives from.
        round_index: the number of completed rounds, so the index of the current or next one.
        global_vector: ``[P]``, the global model; None before the first round begins.
        cohort: the clients of the current or next round.
        starts: client id to the model ``[P]`` that the server will send it to start from, where that is not the global
            one.
        trained: client id to the model ``[P]`` that it trained last, where it is kept.
        weights: ``[n]`` weights of the last aggregation, NaN outside its cohort.
        client_scores: the last evaluation of the clients' own models: ``"accuracy"``, ``"balanced_accuracy"`` and
            ``"auroc"`` to ``[n]``, NaN where it cannot be told; empty before the first.
        participations: int64 ``[n]``, the number of rounds that each client's update was part of.
        heard: int64 ``[n]``, in how many rounds each client has sent an update, whatever became of it.
        start: by metric what its game shares out, of the model before the first round, see
            :mod:`flsv.federation.learned`.
        run: the run's name, where the clients keep their states themselves: it is drawn when the run begins.
        counted: likewise client id to the name of the last visit that has counted, from which the client goes on.
        incidents: likewise what went wrong at the clients, see :meth:`note`.
        crossed: what has crossed to draw the current or next cohort: client, direction, name, numbers and bytes of each
            message.
    """

    num_clients: int = 0
    seed: int = 0
    round_index: int = 0
    global_vector: Tensor | None = None
    cohort: list[int] = field(default_factory=list)
    starts: dict[int, Tensor] = field(default_factory=dict)
    trained: dict[int, Tensor] = field(default_factory=dict)
    weights: Tensor | None = None
    client_scores: dict[str, Tensor] = field(default_factory=dict)
    participations: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    heard: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    start: dict[str, float | None] = field(default_factory=dict)
    run: str = ""
    counted: dict[int, str] = field(default_factory=dict)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    crossed: list[tuple[int, Direction, str, int, float]] = field(default_factory=list)

    def model(self) -> Tensor:
        """The global model.

        Raises:
            RuntimeError: no round has begun.
        """
        if self.global_vector is None:
            raise RuntimeError("there is no global model before the first round begins.")
        return self.global_vector

    def complete(self, round: Round, senders: Sequence[int]) -> None:
        """Take over what a round has come to.

        Args:
            round: with its next global model.
            senders: ids of the clients that have sent an update, whatever became of it.
        """
        assert round.aggregation_weights is not None
        ids = round.client_ids.cpu()
        self.weights = torch.full((self.num_clients,), float("nan"))
        self.weights[ids] = round.aggregation_weights.detach().float().cpu()
        self.participations[ids] += 1
        self.heard[list(senders)] += 1
        self.global_vector = round.server_vector

    def note(self, client: int, what: str) -> None:
        """Something went wrong at a client in this round: kept once, with the first and the last round and how often.

        Example:
            >>> state = FederationState(round_index=3)
            >>> state.note(1, "it is away")
            >>> state.note(1, "it is away")
            >>> state.incidents
            [{'client': 1, 'what': 'it is away', 'first': 3, 'last': 3, 'times': 2}]
        """
        for known in self.incidents:
            if (known["client"], known["what"]) == (client, what):
                known.update(last=self.round_index, times=known["times"] + 1)
                return
        index = self.round_index
        self.incidents.append({"client": client, "what": what, "first": index, "last": index, "times": 1})

    def to(self, device: torch.device) -> None:
        """Move the models."""
        self.starts = {client: model.to(device) for client, model in self.starts.items()}
        self.trained = {client: model.to(device) for client, model in self.trained.items()}

    def state_dict(self) -> dict[str, Any]:
        """All but the global model, which is the module's, and what the fit says anyway."""
        return {name: _copied(getattr(self, name)) for name in self._saved()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update({name: _copied(state[name]) for name in self._saved()})

    def _saved(self) -> list[str]:
        return [each.name for each in fields(self) if each.name not in ("num_clients", "global_vector")]


def _copied(value: Any) -> Any:
    """Models by client are the same tensors: they are replaced, never changed."""
    if isinstance(value, Tensor):
        return value.clone()
    return dict(value) if isinstance(value, dict) else copy.deepcopy(value)
