"""FedEM: clients share the components of a mixture and keep their mixture weights.

Marfoq et al., "Federated Multi-Task Learning under a Mixture of Distributions", NeurIPS 2021, Algorithm 1. The local
EM steps are :class:`flsv.models.MixtureClient`'s; the server averages components as FedAvg does.
"""

from __future__ import annotations

from flsv.core import LocalData, Round
from flsv.core.strategy import Contributions, Federation
from flsv.personalization.base import Personalizer, Starts
from flsv.utilities.errors import ConfigurationError


class FedEM(Personalizer):
    """Every client starts from the global components with its own mixture weights; equal ones before its first round.

    The weights are taken over with the force of one sample: the responsibilities of the round soon decide.

    Raises:
        ConfigurationError: before training, a module without a :class:`flsv.models.mixture.Mixture` in it.

    Example:
        >>> FedEM()
        FedEM()
    """

    private = ("responsibility", "*.responsibility")

    def begin(self, federation: Federation) -> None:
        if sum(map(_is_weight, federation.space.private_names)) != 1:
            raise ConfigurationError(f"{self!r} needs a mixture of networks: train flsv.models.MixtureClient.")

    resume = begin

    def keep(self, local: LocalData) -> None:
        for name, counts in local.private.items():
            if _is_weight(name):
                local.private[name] = counts / counts.sum()

    def personalize(self, round: Round, contributions: Contributions, models: Starts) -> Starts:
        return {}


def _is_weight(name: str) -> bool:
    return name.rpartition(".")[2] == "responsibility"
