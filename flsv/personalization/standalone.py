"""Standalone: every client trains alone, as a baseline without collaboration."""

from __future__ import annotations

from torch import Tensor

from flsv.core import FederationState, LocalData, Round
from flsv.core.strategy import Contributions, FederationInfo
from flsv.personalization.base import OWN_MODEL, Personalizer, Starts
from flsv.utilities.host_copies import on_host


class Standalone(Personalizer):
    """Personalizer in which each client continues from its own model: the baseline without collaboration.

    In its first round a client starts from the initial model of the run. The global model is an aggregate of unrelated
    models and meaningless. Evaluate the clients' own models instead (``ClientEvaluation(every=...)``).

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
        self._initial = federation.global_vector.clone()
        self._visited = []

    def start(self, client: int, state: FederationState) -> Tensor | None:
        assert self._initial is not None
        if client in self._visited:
            return None
        return self._initial.to(state.model())

    def keep(self, local: LocalData) -> None:
        assert local.model is not None
        local.state[OWN_MODEL] = local.model.clone()

    def personalize(self, round: Round, contributions: Contributions, models: Starts) -> Starts:
        visited = set(self._visited)
        visited.update(on_host(round.client_ids))
        self._visited = sorted(visited)
        return {}
