"""FedAdam and FedYogi: adaptive optimizers at the server.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2. Unlike ``torch.optim.Adam``, the algorithm has
no bias correction and starts v at tau^2 (the paper: at tau^2 or above): :class:`AdaptiveServer`. The paper's
FedAdagrad is ``torch.optim.Adagrad(initial_accumulator_value=tau**2, eps=tau)`` in a
:class:`flsv.aggregation.ServerOptimizer`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch.optim import Optimizer

from flsv.aggregation.server_optimizer import ServerOptimizer
from flsv.utilities.declared import Momentum, Positive

#: Number of entries that :class:`AdaptiveServer` updates at a time, to bound the memory of intermediate results.
PIECE = 2**20


class FedAdam(ServerOptimizer):
    """FedAvg with the optimizer Adam at the server, see :class:`AdaptiveServer`.

    Args:
        lr: eta, the server's learning rate.
        beta1: decay of the moving average of updates, in [0, 1).
        beta2: decay of the moving average of squared updates, in [0, 1).
        tau: constant in the denominator of the step; the smaller, the more adaptive. It should be about the size of an
            entry of the clients' mean update.
        weighting: the clients' weights, see :class:`flsv.aggregation.FedAvg`.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> FedAdam(lr=0.03)
        FedAdam(lr=0.03)
    """

    rule: Literal["adam", "yogi"] = "adam"

    def __init__(
        self,
        lr: Positive = 0.01,
        beta1: Momentum = 0.9,
        beta2: Momentum = 0.99,
        tau: Positive = 1e-3,
        weighting: Literal["samples", "uniform"] = "samples",
    ) -> None:
        self.lr = lr
        self.beta1 = beta1
        self.beta2 = beta2
        self.tau = tau
        super().__init__(self._adaptive, weighting)

    def _adaptive(self, params: Iterable) -> Optimizer:
        return AdaptiveServer(params, self.lr, self.beta1, self.beta2, self.tau, self.rule)


class FedYogi(FedAdam):
    """FedAvg with the optimizer Yogi at the server, see :class:`AdaptiveServer`. The arguments are the same as for
    :class:`FedAdam`.

    Example:
        >>> FedYogi()
        FedYogi()
    """

    rule: Literal["adam", "yogi"] = "yogi"


class AdaptiveServer(Optimizer):
    """Optimizer of Reddi et al., Algorithm 2, for the server's steps."""

    def __init__(
        self,
        params: Iterable,
        lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        rule: Literal["adam", "yogi"] = "adam",
    ) -> None:
        super().__init__(params, {"lr": lr, "beta1": beta1, "beta2": beta2, "tau": tau, "rule": rule})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take the server's step of one round."""
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is None:
                    continue
                state = self.state[x]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(x), torch.full_like(x, group["tau"] ** 2)
                # In pieces, so that intermediate results do not need the memory of a model.
                pieces = (torch.atleast_1d(each).split(PIECE) for each in (x, x.grad, state["m"], state["v"]))
                for point, gradient, m, v in zip(*pieces):
                    square = gradient.square()
                    m.lerp_(-gradient, 1 - group["beta1"])
                    if group["rule"] == "adam":
                        v.lerp_(square, 1 - group["beta2"])
                    else:
                        v.addcmul_(square, (v - square).sign_(), value=group["beta2"] - 1)
                    point.addcdiv_(m, v.sqrt().add_(group["tau"]), value=group["lr"])
