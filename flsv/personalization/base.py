"""Personalizer: the model that every client starts its next round from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from flsv.round import Round
from flsv.strategy import Contributions, Strategy


class Personalizer(Strategy):
    """Base class. A client that was never given a model of its own starts from the global one."""

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
