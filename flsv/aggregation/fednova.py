"""FedNova: updates averaged per local step, so that clients with more steps do not dominate.

Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS 2020,
equations 4 to 6 and section 4.

Differences from the paper:

- p_i is the client's share of the *cohort's* samples, as in FedAvg here.
- tau_eff is the paper's default, sum_i p_i |a_i|. Its other choices are a factor on ``FedNova(server_lr=...)``.
- Local solvers are SGD with and without momentum. The paper's proximal solver is not supported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flsv.aggregation.base import Aggregator
from flsv.core import Round
from flsv.core.strategy import Contributions, FederationInfo
from flsv.utilities.errors import ConfigurationError


class FedNova(Aggregator):
    r"""Aggregator that normalizes each client's update by its number of local steps.

    The next global model is x + tau_eff sum_i p_i (x_i - x) / |a_i|. Here x is the global model, x_i client i's model,
    p_i its share of the samples, |a_i| its effective number of local steps, and tau_eff = sum_i p_i |a_i|.

    After tau_i steps of SGD with gradients g_ik and momentum rho from an empty buffer, x_i - x = -lr sum_k a_ik g_ik
    with a_ik = (1 - rho^(tau_i - k)) / (1 - rho), k = 0 .. tau_i - 1. The sum |a_i| of the a_ik is tau_i without
    momentum. Rho is read from the clients' optimizer. Clients with equal numbers of steps are averaged as by FedAvg.
    The method assumes one learning rate for all steps of a round, and the default
    ``FederatedLoop(optimizer_state="reset")``.

    Buffers (BatchNorm's statistics) are averaged in proportion to p_i / |a_i|.

    Raises:
        ConfigurationError: before training: the optimizer is not SGD, or has Nesterov momentum or dampening, a client
            algorithm changes the local steps, or clients are remote sites, whose steps the server cannot count.

    Example:
        >>> FedNova()
        FedNova()
        >>> step_norm(torch.tensor([1, 2, 3]), momentum=0.5)
        tensor([1.0000, 2.5000, 4.2500], dtype=torch.float64)
    """

    momentum = 0.0
    of_clients = True
    reads_steps = True

    def set_up(self, federation: FederationInfo) -> None:
        optimizer_classes = [type(optimizer) for optimizer in federation.optimizers]
        groups = []
        for optimizer in federation.optimizers:
            groups += optimizer.param_groups
        is_one_sgd = optimizer_classes == [torch.optim.SGD]
        if not is_one_sgd or not _is_plain(groups):
            raise ConfigurationError(
                f"{self!r} needs one torch.optim.SGD, with or without momentum, without nesterov and dampening, but "
                f"the module configures {list(federation.optimizers)}."
            )
        algorithm = federation.strategies.get("client_algorithm")
        if algorithm is not None:
            raise ConfigurationError(
                f"{self!r} divides each update by the number of plain SGD steps, but client_algorithm={algorithm!r} "
                "changes the steps. Remove client_algorithm."
            )
        self.momentum = float(groups[0]["momentum"])

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        assert round.num_steps is not None
        shares = round.num_samples.double() / round.num_samples.sum()
        norms = step_norm(round.num_steps, self.momentum)
        mean_norm = (shares * norms).sum()
        divisors = norms.clamp_min(1)  # a client without steps has an update of zero
        return mean_norm * shares / divisors


def _is_plain(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether groups of SGD have one momentum, without nesterov and dampening."""
    momenta = {group["momentum"] for group in groups}
    is_changed = any(group["nesterov"] or group["dampening"] for group in groups)
    return len(momenta) <= 1 and not is_changed


def step_norm(num_steps: Tensor, momentum: float) -> Tensor:
    """Compute the effective number of local steps |a_i| of each client, float64 ``[k]``."""
    steps = num_steps.double()
    geometric_sum = (1 - momentum**steps) / (1 - momentum)
    return (steps - momentum * geometric_sum) / (1 - momentum)
