"""FedEM: the components of a mixture are shared, the mixture weights stay at their client.

Marfoq et al., "Federated Multi-Task Learning under a Mixture of Distributions", NeurIPS 2021, Algorithm 1. The local EM
steps are :class:`flsv.mixture.MixtureClient`'s; the server averages the components as FedAvg does, weighted by samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flsv.errors import ConfigurationError
from flsv.local_data import Client, LocalData
from flsv.personalization.base import Personalizer
from flsv.round import Exchange, Round
from flsv.strategy import Contributions, Federation


class FedEM(Personalizer):
    """Every client starts from the global components with its own mixture weights; equal ones before its first round.

    The weights are taken over with the force of one sample: the responsibilities of the round soon decide.

    Raises:
        ConfigurationError: before training, a module without a :class:`flsv.mixture.Mixture` in it.

    Example:
        >>> FedEM()
        FedEM()
    """

    def __init__(self) -> None:
        self._weights: dict[int, Tensor] = {}

    def begin(self, federation: Federation) -> None:
        self.resume(federation)
        self._weights = {}

    def resume(self, federation: Federation) -> None:
        space = federation.space
        places = space.unflatten(torch.arange(space.size, device=federation.global_vector.device))
        found = [place for name, place in places.items() if name.split(".")[-1] == "responsibility"]
        if len(found) != 1:
            raise ConfigurationError(f"{self!r} needs a mixture of networks: train a flsv.mixture.MixtureClient.")
        (self._place,) = found

    def start(self, client: Client, global_vector: Tensor, models: Mapping[int, Tensor]) -> Tensor:
        start, count = global_vector.clone(), len(self._place)
        start[self._place] = self._weights.get(client.id, torch.full((count,), 1 / count)).to(start)
        return start

    def personalize(
        self, round: Round, contributions: Contributions, models: Mapping[int, Tensor]
    ) -> Mapping[int, Tensor]:
        assert round.clients is not None
        # They stay at their client, for which they are kept here.
        self._weights.update({client.id: client.ask(mixture_weights, self._place) for client in round.clients})
        return {}

    def exchanged(self, round: Round) -> Exchange:
        """The components up and down, without the mixture weights."""
        whole = Exchange.of_models(round)
        return Exchange(whole.uploaded - len(self._place), whole.downloaded - len(self._place))

    def state_dict(self) -> dict[str, Any]:
        return {"weights": dict(self._weights)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._weights = dict(state["weights"])


def mixture_weights(local: LocalData, place: Tensor) -> Tensor:
    """At the client: pi ``[K]`` of the model that it has just trained."""
    assert local.model is not None
    return local.model[place] / local.model[place].sum()
