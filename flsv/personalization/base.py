"""Personalizer: base class of the rules that choose each client's start point of the next round."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from flsv.core import ClientUpdate, FederationState, Instruction, LocalData, Round
from flsv.core.strategy import Contributions, Strategy

#: Where a client keeps a model of its own in its state.
OWN_MODEL = "own_model"

Starts = Mapping[int, Tensor]
"""Client id to the model ``[P]`` that it starts from."""


@dataclass(frozen=True)
class Personalized:
    """The result of personalization.

    Args:
        starts: client id to ``[P]``, the models that the server will send to the clients whose start point changes.
        peer_values: ``[k, n]``, what every client of the round found every client's model to be worth to it; NaN for
            those that it did not look at. None where clients do not judge each other.
    """

    starts: Starts = field(default_factory=dict)
    peer_values: Tensor | None = None


class Personalizer(Strategy):
    """Base class. A client without a model of its own starts from the global model.

    A client's start point is either the server's to send (:meth:`personalize` returns it) or the client's own to keep
    (in ``local.state[OWN_MODEL]``): then :meth:`start` sends None.

    Attributes:
        gives_peer_values: whether :meth:`personalize` tells what clients find each other to be worth.
        collaborates: False where clients would send nothing: what the server sees of them is the simulation's, and does
            not count as crossing.
    """

    gives_peer_values = False
    collaborates = True

    def start(self, client: int, state: FederationState) -> Tensor | None:
        """At the server: the model that a client is sent to start from, at the beginning of each round that it takes
        part in and when the clients' own models are evaluated. It must not change the personalizer's state.

        Returns:
            ``[P]``; None: the client goes on from what it has. By default what :meth:`personalize` gave it last, else
            the global model.
        """
        return state.starts.get(client, state.model())

    def receive(self, local: LocalData, instruction: Instruction) -> Tensor:
        """At the client: the model ``[P]`` that it starts from. By default the received one, else the one that it has
        kept."""
        return local.state[OWN_MODEL] if instruction.start is None else instruction.start

    def own(self, local: LocalData, instruction: Instruction) -> Tensor:
        """At the client: the model ``[P]`` that it uses, and is tested with. By default the one that it starts from."""
        return self.receive(local, instruction)

    def used(self, client: int, state: FederationState) -> Tensor | None:
        """At the server: the model ``[P]`` that a client uses, as far as the server knows it; None: only the client has
        it. By default the one that it starts from."""
        return self.start(client, state)

    def keep(self, local: LocalData) -> None:
        """At the client, after its training: save its next start point in its state, if that stays at the client."""

    def started(self, update: ClientUpdate) -> Tensor | None:
        """At the server: where a client that was sent no start point has started from; None: it has to be asked."""
        return None

    @abstractmethod
    def personalize(self, round: Round, contributions: Contributions, models: Starts) -> Starts | Personalized:
        """At the server: the clients' next start points.

        Args:
            round: the round, after aggregation.
            contributions: the metrics' values, this round's included.
            models: the start points held so far, client id to ``[P]``.

        Returns:
            Client id to ``[P]``, for the clients whose start point changes, usually those of the round; or
            :class:`Personalized`, with what clients found each other to be worth.
        """
