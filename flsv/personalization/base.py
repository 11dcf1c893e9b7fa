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
    """Result of :meth:`Personalizer.personalize` if clients also value each other's models.

    Args:
        starts: ``{client id: model}``, the start point ``[P]`` that the server will send, for clients whose start point
            changes.
        peer_values: ``[k, n]``. Element (i, j) is the value that the i-th of the round's k clients gives the model of
            client j, NaN if it did not evaluate this model. None if clients do not evaluate each other's models.
    """

    starts: Starts = field(default_factory=dict)
    peer_values: Tensor | None = None


class Personalizer(Strategy):
    """Base class of personalizers, which choose each client's start point.

    A start point is the model from which a client trains in a round. It is either computed at the server by
    :meth:`personalize`, which is called at the end of each round, and sent to the client, or the client itself stores
    it in ``local.state[OWN_MODEL]``, and :meth:`start` returns None. A client that has neither starts from the global
    model.

    Attributes:
        gives_peer_values: whether :meth:`personalize` returns ``peer_values``.
        collaborates: False if real clients would send nothing. The updates then exist only in the simulation and do not
            count as traffic.
    """

    gives_peer_values = False
    collaborates = True

    def start(self, client: int, state: FederationState) -> Tensor | None:
        """Return, at the server, the start point to send to a client.

        It is called at the beginning of each round in which the client takes part, and when the clients' own models are
        evaluated. It must not change the personalizer's state.

        Returns:
            The start point ``[P]``, by default the last one that :meth:`personalize` computed for the client, or the
            global model if there is none. None if the client continues from its own model.
        """
        return state.starts.get(client, state.model())

    def receive(self, local: LocalData, instruction: Instruction) -> Tensor:
        """Return, at the client, its start point ``[P]``. By default the model in ``instruction`` or, if there is none,
        the model that the client itself stores."""
        if instruction.start is None:
            return local.state[OWN_MODEL]
        return instruction.start

    def keep(self, local: LocalData) -> None:
        """Store, at the client after training, its next start point in ``local.state``. By default nothing is
        stored."""

    def started(self, update: ClientUpdate) -> Tensor | None:
        """Return the start point ``[P]`` of a client to which the server sent none. None if only the client knows
        it. Called at the server when the client's ``update`` has arrived."""
        return None

    @abstractmethod
    def personalize(
        self, round: Round, contributions: Contributions, models: Starts
    ) -> Starts | Personalized:
        """Compute, at the server, the clients' next start points.

        Args:
            round: the round, after aggregation.
            contributions: the metrics' values, including this round.
            models: ``{client id: model}``, the start points ``[P]`` that earlier calls returned.

        Returns:
            ``{client id: model}``, the next start points ``[P]`` of the clients whose start point changes, usually the
            clients of the round, or a :class:`Personalized`, which also has peer values.
        """
