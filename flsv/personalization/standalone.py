"""Standalone: no collaboration at all. Every client goes on with its own model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from flsv.personalization.base import Personalizer
from flsv.round import Exchange, Round
from flsv.strategy import Contributions


class Standalone(Personalizer):
    """Each client trains on from its own model, as if it were alone: the baseline that collaboration has to beat.

    The global model is then the aggregate of models that know nothing of each other, and says nothing; look at the
    clients' own accuracies (``FederatedLoop(evaluate_clients_every=...)``).

    Example:
        >>> Standalone()
        Standalone()
    """

    def personalize(
        self, round: Round, contributions: Contributions, models: Mapping[int, Tensor]
    ) -> Mapping[int, Tensor]:
        return dict(zip(round.client_ids.tolist(), round.client_vectors))

    def exchanged(self, round: Round) -> Exchange:
        return Exchange.of_models(round, up=0, down=0)
