"""Standalone: no collaboration at all. Every client goes on with its own model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flsv.participants import LocalData
from flsv.personalization.base import OWN_MODEL, Personalizer
from flsv.round import FederationState, Round
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

    collaborates = False

    def __init__(self) -> None:
        self._initial: Tensor | None = None
        self._visited: set[int] = set()

    def begin(self, federation: Federation) -> None:
        self._initial, self._visited = federation.global_vector.clone(), set()

    def start(self, client: int, state: FederationState) -> Tensor | None:
        assert self._initial is not None
        return None if client in self._visited else self._initial.to(state.model())

    def keep(self, local: LocalData) -> None:
        assert local.model is not None
        local.state[OWN_MODEL] = local.model.clone()

    def personalize(
        self, round: Round, contributions: Contributions, models: Mapping[int, Tensor]
    ) -> Mapping[int, Tensor]:
        self._visited.update(round.client_ids.tolist())
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"initial": self._initial, "visited": sorted(self._visited)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._initial, self._visited = state["initial"], set(state["visited"])
