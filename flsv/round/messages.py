"""The two messages of a round: the server's Instruction to a client, and the client's ClientUpdate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from flsv.participants import Traffic


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
