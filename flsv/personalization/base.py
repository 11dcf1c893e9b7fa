"""Personalizer: base class of the rules that choose each client's start point of the next round."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from flsv.core import ClientUpdate, FederationState, Instruction, LocalData, Round
from flsv.core.strategy import Contributions, Strategy

#: Key of a client's own model in its state.
OWN_MODEL = "own_model"

Starts = Mapping[int, Tensor]
"""Client id to the model ``[P]`` that it starts from."""


@dataclass(frozen=True)
class Personalized:
    """Result of personalization.

    Args:
        starts: client id to the start point ``[P]`` that the server will send, for the clients whose start point
            changes.
        peer_values: values ``[k, n]`` of every client's model to every client of the round; NaN for models that a
            client did not evaluate. None where clients do not evaluate each other's models.
    """

    starts: Starts = field(default_factory=dict)
    peer_values: Tensor | None = None


class Personalizer(Strategy):
    """Base class of personalizers. A client without a model of its own starts from the global model.

    A client's start point is either sent by the server (:meth:`personalize` returns it) or kept by the client (in
    ``local.state[OWN_MODEL]``): then :meth:`start` returns None.

    Attributes:
        gives_peer_values: whether :meth:`personalize` returns ``peer_values``.
        collaborates: False if real clients would send nothing: the updates that the server sees are the simulation's,
            and do not count as traffic.
    """

    gives_peer_values = False
    collaborates = True

    def start(self, client: int, state: FederationState) -> Tensor | None:
        """Return, at the server, the start point to send to a client.

        It is called at the beginning of each round in which the client takes part, and when the clients' own models are
        evaluated. It must not change the personalizer's state.

        Returns:
            The start point ``[P]``, by default the last one from :meth:`personalize`, else the global model. None: the
            client continues from its own model.
        """
        return state.starts.get(client, state.model())

    def receive(self, local: LocalData, instruction: Instruction) -> Tensor:
        """Return, at the client, its start point ``[P]``; by default the received model, else its own."""
        return local.state[OWN_MODEL] if instruction.start is None else instruction.start

    def own(self, local: LocalData, instruction: Instruction) -> Tensor:
        """Return, at the client, the model ``[P]`` that it uses and is tested with; by default its start point."""
        return self.receive(local, instruction)

    def used(self, client: int, state: FederationState) -> Tensor | None:
        """Return, at the server, the model ``[P]`` that a client uses; by default its start point.

        Returns:
            ``[P]``; None if only the client has this model.
        """
        return self.start(client, state)

    def keep(self, local: LocalData) -> None:
        """Save, at the client after training, its next start point in its state, if it stays at the client."""

    def started(self, update: ClientUpdate) -> Tensor | None:
        """Return, at the server, the start point of a client that was sent none; None: the client has to be asked."""
        return None

    @abstractmethod
    def personalize(self, round: Round, contributions: Contributions, models: Starts) -> Starts | Personalized:
        """Compute, at the server, the clients' next start points.

        Args:
            round: the round, after aggregation.
            contributions: the metrics' values, this round's included.
            models: the current start points, client id to ``[P]``.

        Returns:
            Client id to ``[P]``, for the clients whose start point changes, usually those of the round; or a
            :class:`Personalized`, which also has the peer values.
        """
