"""Standalone: every client trains alone, the baseline for collaboration."""

from __future__ import annotations

from torch import Tensor

from flsv.core import FederationState, LocalData, Round
from flsv.core.strategy import Contributions, FederationInfo
from flsv.personalization.base import OWN_MODEL, Personalizer, Starts


class Standalone(Personalizer):
    """Personalizer with which each client continues from its own model: the baseline for collaboration.

    A client's first round, whenever it comes, starts from the run's initial model. The global model is an aggregate of
    unrelated models, and meaningless; look at the clients' own accuracies (``ClientEvaluation(every=...)``).

    Example:
        >>> Standalone()
        Standalone()
    """

    collaborates = False
    saved = ("_initial", "_visited")

    def __init__(self) -> None:
        self._initial: Tensor | None = None
        self._visited: list[int] = []

    def begin(self, federation: FederationInfo) -> None:
        self._initial, self._visited = federation.global_vector.clone(), []

    def start(self, client: int, state: FederationState) -> Tensor | None:
        assert self._initial is not None
        return None if client in self._visited else self._initial.to(state.model())

    def keep(self, local: LocalData) -> None:
        assert local.model is not None
        local.state[OWN_MODEL] = local.model.clone()

    def personalize(self, round: Round, contributions: Contributions, models: Starts) -> Starts:
        self._visited = sorted({*self._visited, *round.client_ids.tolist()})
        return {}
