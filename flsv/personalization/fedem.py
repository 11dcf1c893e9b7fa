"""FedEM: clients share the components of a mixture and keep their mixture weights.

Marfoq et al., "Federated Multi-Task Learning under a Mixture of Distributions", NeurIPS 2021, Algorithm 1. The local EM
steps are implemented by :class:`flsv.models.MixtureClient`. The server averages components as FedAvg does.
"""

from __future__ import annotations

from flsv.core import LocalData, Round
from flsv.core.strategy import Contributions, FederationInfo
from flsv.personalization.base import Personalizer, Starts
from flsv.utilities.errors import ConfigurationError


class FedEM(Personalizer):
    """Personalizer of mixtures: clients share the components, and each has its own mixture weights, initially equal.

    After training, a client's mixture weights are proportional to the sum of its previous weights, which thus count as
    one sample, and the responsibilities (the components' shares) of all samples in the round's batches.

    Raises:
        ConfigurationError: before training: the module does not contain exactly one
            :class:`flsv.models.mixture.Mixture`.

    Example:
        >>> FedEM()
        FedEM()
    """

    private = ("responsibility", "*.responsibility")

    def set_up(self, federation: FederationInfo) -> None:
        weight_names = [name for name in federation.space.private_names if _is_weight(name)]
        if len(weight_names) != 1:
            raise ConfigurationError(
                f"{self!r} needs a module with exactly one flsv.models.Mixture. Train a flsv.models.MixtureClient."
            )

    def keep(self, local: LocalData) -> None:
        for name, counts in local.private.items():
            if _is_weight(name):
                local.private[name] = counts / counts.sum()

    def personalize(self, round: Round, contributions: Contributions, models: Starts) -> Starts:
        return {}


def _is_weight(name: str) -> bool:
    return name.rpartition(".")[2] == "responsibility"
