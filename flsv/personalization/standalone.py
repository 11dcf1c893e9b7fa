"""Standalone: no collaboration at all. Every client goes on with its own model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flsv.local_data import Client
from flsv.personalization.base import Personalizer
from flsv.round import Exchange, Round
from flsv.strategy import Contributions, Federation


class Standalone(Personalizer):
    """Each client trains on from its own model, as if it were alone: the baseline that collaboration has to beat.

    A client's first round, whenever it comes, starts from the run's initial model. The global model is the aggregate of
    models that know nothing of each other, and says nothing; look at the clients' own accuracies
    (``FederatedLoop(evaluate_clients_every=...)``).

    Example:
        >>> Standalone()
        Standalone()
    """

    def begin(self, federation: Federation) -> None:
        self._initial = federation.global_vector.clone()

    def start(self, client: Client, global_vector: Tensor, models: Mapping[int, Tensor]) -> Tensor:
        return models.get(client.id, self._initial.to(global_vector))

    def personalize(
        self, round: Round, contributions: Contributions, models: Mapping[int, Tensor]
    ) -> Mapping[int, Tensor]:
        return dict(zip(round.client_ids.tolist(), round.client_vectors))

    def exchanged(self, round: Round) -> Exchange:
        return Exchange.of_models(round, up=0, down=0)

    def state_dict(self) -> dict[str, Any]:
        return {"initial": self._initial}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._initial = state["initial"]
