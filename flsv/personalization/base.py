"""Base class of personalizers, the rules that choose the model from which each client starts the next round."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from flsv.core import ClientUpdate, FederationState, Instruction, LocalData, Round
from flsv.core.strategy import Contributions, Strategy

#: Key of a client's own model in ``local.state``.
OWN_MODEL = "own_model"

Starts = Mapping[int, Tensor]
"""``{client id: model}``, the parameters ``[P]`` of the model from which each client starts."""


@dataclass(frozen=True)
class Personalized:
    """Result of personalization.

    Args:
        starts: ``{client id: model}``, the start point ``[P]`` that the server will send, for clients whose start point
            changes.
        peer_values: values ``[k, n]`` of the models of all n clients for the k clients of the round; NaN for models
            that a client did not evaluate. None if clients do not evaluate each other's models.
    """

    starts: Starts = field(default_factory=dict)
    peer_values: Tensor | None = None


class Personalizer(Strategy):
    """Base class of personalizers. A client without a model of its own starts from the global model.

    A client's start point is the model from which it starts a round. It is either sent by the server (then
    :meth:`personalize` returns it) or stored at the client in ``local.state[OWN_MODEL]`` (then :meth:`start` returns
    None).

    Attributes:
        gives_peer_values: whether :meth:`personalize` returns ``peer_values``.
        collaborates: False if real clients would send nothing; the updates then exist only in the simulation and do not
            count as traffic.
    """

    gives_peer_values = False
    collaborates = True

    def start(self, client: int, state: FederationState) -> Tensor | None:
        """Return, at the server, the start point to send to a client.

        It is called at the beginning of each round in which the client takes part, and when the clients' own models are
        evaluated. It must not change the personalizer's state.

        Returns:
            The start point ``[P]``, by default the client's last start point from :meth:`personalize`, else the global
            model. None: the client continues from its own model.
        """
        return state.starts.get(client, state.model())

    def receive(self, local: LocalData, instruction: Instruction) -> Tensor:
        """Return, at the client, its start point ``[P]``; by default the received model or, without one, its own
        model."""
        return local.state[OWN_MODEL] if instruction.start is None else instruction.start

    def own(self, local: LocalData, instruction: Instruction) -> Tensor:
        """Return, at the client, the model ``[P]`` that the client uses and is tested with; by default its start
        point."""
        return self.receive(local, instruction)

    def used(self, client: int, state: FederationState) -> Tensor | None:
        """Return, at the server, the model ``[P]`` that a client uses; by default its start point.

        Returns:
            The model ``[P]``; None if only the client has it.
        """
        return self.start(client, state)

    def keep(self, local: LocalData) -> None:
        """Store, at the client after training, its next start point in ``local.state``; by default nothing is
        stored."""

    def started(self, update: ClientUpdate) -> Tensor | None:
        """Return, at the server, the start point of a client to which none was sent; None: the client has to be
        asked."""
        return None

    @abstractmethod
    def personalize(self, round: Round, contributions: Contributions, models: Starts) -> Starts | Personalized:
        """Compute, at the server, the clients' next start points.

        Args:
            round: the round, after aggregation.
            contributions: the metrics' values, including this round.
            models: ``{client id: model}``, the current start points ``[P]``.

        Returns:
            ``{client id: model}``, the next start points ``[P]`` of the clients whose start point changes, usually the
            clients of the round; or a :class:`Personalized`, which also has peer values.
        """
