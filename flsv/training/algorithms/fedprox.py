"""FedProx: adds a proximal term to the clients' losses that pulls clients toward the global model.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, equation 2.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flsv.core import FederationState
from flsv.training.algorithms.base import ANCHOR, ClientAlgorithm
from flsv.utilities.declared import NonNegative


class FedProx(ClientAlgorithm):
    """Client algorithm that pulls each client's model w toward an anchor. It adds mu/2 |w - w_anchor|^2 to the client's
    loss, for any module.

    Args:
        mu: the weight of this term, at least 0 (FedAvg). The paper tries 0.001 to 1.
        anchor: which model w_anchor is. ``"global"``: the global model at the start of the round, as in the paper.
            ``"start"``: the model that the client starts from, which a personalizer (FedAMP) may have chosen.

    Raises:
        ConfigurationError: ``mu`` is negative, or ``anchor`` is unknown.

    Example:
        >>> FedProx(mu=0.1)
        FedProx(mu=0.1)
    """

    sends = (ANCHOR,)

    def __init__(
        self, mu: NonNegative = 0.01, anchor: Literal["global", "start"] = "global"
    ) -> None:
        self.mu = mu
        self.anchor = anchor

    def send(self, client: int, start: Tensor | None, state: FederationState) -> dict[str, Tensor]:
        # A client that starts from the global model has it already.
        client_has_anchor = self.anchor == "start" or start is state.global_vector
        if client_has_anchor:
            return {}
        return {ANCHOR: state.model()}

    @torch.no_grad()
    def add_proximal_gradients(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        initial_parameters: list[Tensor],
    ) -> None:
        drift = torch._foreach_sub(parameters, initial_parameters)
        torch._foreach_add_(gradients, drift, alpha=self.mu)
