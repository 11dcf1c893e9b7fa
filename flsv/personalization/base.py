"""Personalizer: the model that every client starts its next round from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from flsv.local_data import Client
from flsv.round import Exchange, Round
from flsv.strategy import Contributions, Strategy


class Personalizer(Strategy):
    """Base class. A client that was never given a model of its own starts from the global one.

    Attributes:
        gives_client_values: whether :meth:`exchanged` tells what clients find each other to be worth.
    """

    gives_client_values = False

    def start(self, client: Client, global_vector: Tensor, models: Mapping[int, Tensor]) -> Tensor | None:
        """The model that a client starts a round from, asked at the beginning of each round that it takes part in, and
        when the clients' own models are evaluated. It must not change the personaliser's state.

        Args:
            client: the client; ``client.ask`` works something out from its data.
            global_vector: ``[P]``, the global model.
            models: what :meth:`personalize` has given so far, client id to ``[P]``.

        Returns:
            ``[P]``, or None for the global model. By default what :meth:`personalize` gave the client last.
        """
        return models.get(client.id)

    def exchanged(self, round: Round) -> Exchange:
        """What crossed in the round, asked after :meth:`personalize`; by default one model up and one down."""
        return Exchange.of_models(round)

    @abstractmethod
    def personalize(
        self, round: Round, contributions: Contributions, models: Mapping[int, Tensor]
    ) -> Mapping[int, Tensor]:
        """The clients' next start points.

        Args:
            round: the round, after aggregation.
            contributions: the metrics' values, this round's included.
            models: the start points held so far, client id to ``[P]``.

        Returns:
            Client id to ``[P]``, for the clients whose start point changes; usually those of the round.
        """
