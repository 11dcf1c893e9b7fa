"""The two messages of a round, the length of a local training, and the federation's state between two rounds."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flsv.core.client import MessageRow, Traffic
from flsv.utilities.host_copies import on_host

if TYPE_CHECKING:
    from flsv.core.round import Round

#: The kind of an incident that changes the contribution values.
OF_VALUES = "values"
#: Name under which the server sends the global model to a client that starts from another model, if an upload needs it.
GLOBAL_MODEL = "global_model"


class LocalWork(NamedTuple):
    """Length of a client's local training in a round: ``epochs``, or optimizer ``steps`` if ``epochs`` is 0."""

    epochs: int
    steps: int = 0

    def epoch_lengths(self, num_batches: int, batches_per_step: int) -> list[int]:
        """Return each local epoch's number of batches."""
        if self.epochs:
            return [num_batches] * self.epochs

        steps_per_epoch = max(math.ceil(num_batches / batches_per_step), 1)
        num_full_epochs, remaining_steps = divmod(self.steps, steps_per_epoch)
        lengths = [num_batches] * num_full_epochs
        if remaining_steps > 0:
            lengths.append(remaining_steps * batches_per_step)
        return lengths


@dataclass(frozen=True)
class Instruction:
    """The server's message to a client of the cohort.

    Args:
        round_index: the round, from 0.
        client_id: the client that receives it.
        seed: the run's seed. The client's random numbers are derived from it, the round and the client's id.
        start: ``[P]``, the model to train from. None if the client continues from its own model.
        tensors: further tensors that strategies send, by the names that they declare in ``Strategy.sends``.
    """

    round_index: int
    client_id: int
    seed: int
    start: Tensor | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientUpdate:
    """A client's message to the server. A private client sends ``client_id``, ``num_samples``, the noised ``vector``,
    ``num_steps`` and ``traffic``, and no other field.

    Args:
        client_id: the client that sends it.
        num_samples: the number of samples that the client trained on.
        vector: ``[P]``, the client's model as it sends it.
        loss: the client's mean training loss. NaN if the module's ``training_step`` returns no loss.
        num_steps: the number of optimizer steps that the client took.
        reports: the values that strategies let the client report, by the names that they declare in
            ``Strategy.reports``.
        traffic: the size of the vector in transit, if it is compressed.
    """

    client_id: int
    num_samples: int
    vector: Tensor
    loss: float = float("nan")
    num_steps: int = 0
    reports: Mapping[str, Tensor] = field(default_factory=dict)
    traffic: Traffic | None = None


def _no_counts() -> Tensor:
    return torch.zeros(0, dtype=torch.long)


@dataclass
class FederationState:
    """The state of a federation between two rounds. n = clients, P = length of the vector.

    Args:
        num_clients: n.
        seed: the seed from which every random choice derives.
        round_index: the number of completed rounds, which is the index of the current or next round.
        global_vector: ``[P]``, the global model. None before the first round begins.
        cohort: the clients of the current or next round.
        starts: ``{client id: model [P]}``, the initial models of the clients that will not start from the global model.
        trained: ``{client id: model [P]}``, the model that this client trained last, if the loop keeps it.
        weights: ``[n]``, the clients' weights in the last aggregation, NaN outside its cohort. None before the first
            aggregation.
        is_aggregate_finite: whether the last aggregate was finite. If not, the global model did not change.
        client_scores: the last evaluation of the clients' own models, ``{score: values [n]}`` for ``"accuracy"``,
            ``"balanced_accuracy"`` and ``"auroc"``, NaN where the score is not defined. Empty before the first
            evaluation.
        participations: int64 ``[n]``, the number of rounds that each client's update was part of.
        updates_received: int64 ``[n]``, the number of rounds in which each client has sent an update, including updates
            that were excluded.
        untrained_scores: ``{metric: score}``, the untrained model's score by the metric's performance measure, see
            :mod:`flsv.federation.reports`.
        run: the run's random name, set when the run begins if remote clients keep their states themselves, else empty.
        counted: ``{client id: name}``, for each remote client the name of its last training whose result the server has
            used. The client continues from the state after this training.
        incidents: failures at the clients, see :meth:`note`.
        non_finite_names: names of parameters and buffers that the vector does not hold because they were not finite
            when the run began. A later validation may have made them finite.
        failed: ids of the clients of the last rounds if these had no update. Empty after a round with an update.
        pending_traffic: the messages that were exchanged to draw the current or next cohort, each
            ``(client, direction, name, numbers, bytes)``.
    """

    num_clients: int = 0
    seed: int = 0
    round_index: int = 0
    global_vector: Tensor | None = None
    cohort: list[int] = field(default_factory=list)
    starts: dict[int, Tensor] = field(default_factory=dict)
    trained: dict[int, Tensor] = field(default_factory=dict)
    weights: Tensor | None = None
    is_aggregate_finite: bool = True
    client_scores: dict[str, Tensor] = field(default_factory=dict)
    participations: Tensor = field(default_factory=_no_counts)
    updates_received: Tensor = field(default_factory=_no_counts)
    untrained_scores: dict[str, float | None] = field(default_factory=dict)
    run: str = ""
    counted: dict[int, str] = field(default_factory=dict)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    non_finite_names: list[str] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    pending_traffic: list[MessageRow] = field(default_factory=list)

    def model(self) -> Tensor:
        """Return the global model, a vector of parameters and buffers."""
        if self.global_vector is None:
            raise RuntimeError("there is no global model before the first round begins.")
        return self.global_vector

    def for_strategies(self) -> FederationState:
        """Return the state without ``trained`` and ``client_scores``, which only the loop itself may read."""
        return replace(self, trained={}, client_scores={})

    def complete(self, round: Round, senders: Sequence[int]) -> None:
        """Store the next global model, the weights, and the clients that took part or sent an update."""
        assert round.aggregation_weights is not None
        ids = torch.tensor(on_host(round.client_ids))
        weights = torch.full((self.num_clients,), float("nan"))
        aggregation_weights = on_host(round.aggregation_weights)
        weights[ids] = torch.tensor(aggregation_weights, dtype=weights.dtype)

        self.weights = weights
        self.participations[ids] += 1
        self.updates_received[list(senders)] += 1
        self.global_vector = round.server_vector
        self.failed = []

    def note(self, client: int | None, failure: str, kind: str | None = None) -> None:
        """Record a failure of a client, or of all (None), in this round. Repeated failures are counted.

        Example:
            >>> state = FederationState(round_index=3)
            >>> state.note(1, "it is away")
            >>> state.note(1, "it is away")
            >>> state.incidents
            [{'client': 1, 'what': 'it is away', 'first': 3, 'last': 3, 'times': 2, 'kind': None}]
        """
        for incident in self.incidents:
            if incident["client"] == client and incident["what"] == failure:
                incident["last"] = self.round_index
                incident["times"] += 1
                return

        self.incidents.append(
            {
                "client": client,
                "what": failure,
                "first": self.round_index,
                "last": self.round_index,
                "times": 1,
                "kind": kind,
            }
        )

    def to(self, device: torch.device) -> None:
        """Move the models in ``starts`` and ``trained`` to a device."""
        self.starts = _moved(self.starts, device)
        self.trained = _moved(self.trained, device)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all fields that a checkpoint does not store elsewhere."""
        return {key: _copied(getattr(self, name)) for name, key in self._saved().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, key in self._saved().items():
            setattr(self, name, _copied(state[key]))

    def _saved(self) -> dict[str, str]:
        """Return the key in checkpoints of each field that they store."""
        names = [field_of_state.name for field_of_state in fields(self)]
        keys = {name: name for name in names if name not in ("num_clients", "global_vector")}
        keys["untrained_scores"] = "start"
        return keys


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return dict(value)
    return copy.deepcopy(value)


def _moved(models: Mapping[int, Tensor], device: torch.device) -> dict[int, Tensor]:
    return {client: model.to(device) for client, model in models.items()}
