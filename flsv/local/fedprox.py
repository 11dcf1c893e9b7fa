"""FedProx: clients are held near the global model, or near the one that they start from.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, equation 2.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flsv.errors import ConfigurationError
from flsv.local.base import ClientTerm


class FedProx(ClientTerm):
    """Adds mu/2 |w - w_anchor|^2 to every client's loss, for any module.

    Args:
        mu: the weight of the term, at least 0. 0 is FedAvg. The paper tries 0.001 to 1.
        anchor: ``"global"``, the global model at the start of the round, as in the paper; ``"start"``, the model that
            the client starts from, where it has one of its own (FedAMP).

    Raises:
        ConfigurationError: a negative mu; another anchor.

    Example:
        >>> gradient = torch.zeros(1)
        >>> FedProx(mu=0.1).add_gradients([torch.tensor([3.0])], [gradient], [torch.tensor([1.0])])
        >>> gradient
        tensor([0.2000])
    """

    def __init__(self, mu: float = 0.01, anchor: Literal["global", "start"] = "global") -> None:
        if mu < 0:
            raise ConfigurationError(f"FedProx(mu={mu}): expected a number >= 0.")
        if anchor not in ("global", "start"):
            raise ConfigurationError(f'FedProx(anchor={anchor!r}): expected "global" or "start".')
        self.mu, self.anchor = mu, anchor

    @torch.no_grad()
    def add_gradients(self, parameters: list[Tensor], gradients: list[Tensor], anchors: list[Tensor]) -> None:
        torch._foreach_add_(gradients, torch._foreach_sub(parameters, anchors), alpha=self.mu)
