"""FedProx: clients are held near the global model.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, equation 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.errors import ConfigurationError
from flsv.local.base import ClientTerm


class FedProx(ClientTerm):
    """Adds mu/2 |w - w_global|^2 to every client's loss, for any module.

    Args:
        mu: the weight of the term, at least 0. 0 is FedAvg. The paper tries 0.001 to 1.

    Raises:
        ConfigurationError: a negative mu.

    Example:
        >>> gradient = torch.zeros(1)
        >>> FedProx(mu=0.1).add_gradients([torch.tensor([3.0])], [gradient], [torch.tensor([1.0])])
        >>> gradient
        tensor([0.2000])
    """

    def __init__(self, mu: float = 0.01) -> None:
        if mu < 0:
            raise ConfigurationError(f"FedProx(mu={mu}): expected a number >= 0.")
        self.mu = mu

    @torch.no_grad()
    def add_gradients(self, parameters: list[Tensor], gradients: list[Tensor], anchors: list[Tensor]) -> None:
        torch._foreach_add_(gradients, torch._foreach_sub(parameters, anchors), alpha=self.mu)
