"""Server optimizers: an optimizer at the server treats the mean update as a gradient and takes the step.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 1 (any optimizer) and Algorithm 2 (FedAdam,
FedYogi). Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019 (FedAvgM).

With Delta = sum_i w_i (x_i - x) the optimizer is given the gradient -Delta at x. Where the papers are silent: buffers
(BatchNorm's statistics) have no gradient, and are averaged. Algorithm 2 is not ``torch.optim.Adam``: it has no bias
correction and starts v at tau^2 (the paper: at tau^2 or above), so it has an optimizer of its own here. Its FedAdagrad
is ``torch.optim.Adagrad(initial_accumulator_value=tau**2, eps=tau)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from flsv.aggregation.base import FedAvg
from flsv.core import ClientMatrix, Round
from flsv.core.strategy import Contributions, Federation
from flsv.utilities.declared import Momentum, Positive
from flsv.utilities.errors import ConfigurationError

#: Entries that :class:`AdaptiveServer` steps at a time.
PIECE = 2**20


class ServerOptimizer(FedAvg):
    """An optimizer moves the global model along the clients' mean update.

    Its state (momentum, moments) is part of the run: saved, and resumed to the bit. Its learning rate is the
    optimizer's, in the place of ``server_lr``. Contributions are measured on the clients' updates, as with FedAvg;
    ``server_vector`` and ``server_update`` have the optimizer's step in them.

    Args:
        optimizer: makes an optimizer of a list of tensors, such as ``partial(torch.optim.SGD, lr=1.0, momentum=0.9)``;
            in a configuration file, the ``class_path`` and ``init_args`` of one.
        weighting: the clients' weights, see :class:`FedAvg`.

    Raises:
        ConfigurationError: the optimizer refuses its arguments.

    Example:
        >>> from functools import partial
        >>> ServerOptimizer(partial(torch.optim.SGD, lr=1.0)).optimizer([torch.zeros(2)]).defaults["lr"]
        1.0
    """

    saved = ("_moments",)

    def __init__(
        self,
        optimizer: Callable[[Iterable], Optimizer],
        weighting: Literal["samples", "uniform"] = "samples",
    ) -> None:
        super().__init__(weighting)
        self.optimizer = optimizer
        try:
            self._defaults = optimizer([torch.zeros(1)]).defaults
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{type(self).__name__}: its optimizer cannot be made: {error}") from error
        self._moments: dict[Any, Any] = {}
        self._next: dict[Any, Any] = {}

    def begin(self, federation: Federation) -> None:
        self._moments = {}

    def aggregate(self, round: Round, contributions: Contributions) -> tuple[Tensor, Tensor]:
        weights = self.weights(round, contributions).to(round.client_vectors)
        vector, cut = round.combine(weights), round.space.num_parameters  # its buffers are those of the next model
        # Away from the global model, wherever clients started: without momentum, and with lr=1, this is FedAvg.
        moves = ClientMatrix(round.client_vectors, [round.global_vector] * len(round))
        point = torch.nn.Parameter(vector[:cut].copy_(round.global_vector[:cut]))  # the step is taken in place
        point.grad = moves.combine(weights, cut).neg_()
        optimizer = self.optimizer([point])
        groups = optimizer.state_dict()["param_groups"]
        # A copy: the round may yet fail.
        optimizer.load_state_dict({"state": deepcopy(self._moments), "param_groups": groups})
        optimizer.step()
        self._next = optimizer.state_dict()["state"]
        return vector, weights

    def end_round(self, round: Round) -> None:
        self._moments = self._next

    def __repr__(self) -> str:
        if type(self) is not ServerOptimizer:
            return super().__repr__()
        arguments = ", ".join(f"{name}={value!r}" for name, value in self._defaults.items())
        name = type(self.optimizer([torch.zeros(1)])).__name__
        return f"ServerOptimizer({name}({arguments}), weighting={self.weighting!r})"


class FedAvgM(ServerOptimizer):
    """v <- momentum v + Delta; x <- x + lr v (Hsu et al. 2019, section 4.3): ``torch.optim.SGD``.

    Args:
        lr: the server's learning rate; 1 in the paper, whose momenta from 0.7 on want less.
        momentum: in [0, 1).
        weighting: the clients' weights, see :class:`FedAvg`.

    Raises:
        ConfigurationError: an argument out of range.

    Example:
        >>> FedAvgM(momentum=0.7)
        FedAvgM(momentum=0.7)
    """

    def __init__(
        self, lr: Positive = 1.0, momentum: Momentum = 0.9, weighting: Literal["samples", "uniform"] = "samples"
    ) -> None:
        self.lr = lr
        self.momentum = momentum
        super().__init__(self._sgd, weighting)

    def _sgd(self, params: Iterable) -> Optimizer:
        return torch.optim.SGD(params, lr=self.lr, momentum=self.momentum)


class FedAdam(ServerOptimizer):
    """FedAdam by :class:`AdaptiveServer`.

    Args:
        lr: eta, the server's learning rate.
        beta1: how much of the mean is memory.
        beta2: how much of the squares is memory.
        tau: the less, the more adaptive; about the size of an entry of the clients' mean update.
        weighting: the clients' weights, see :class:`FedAvg`.

    Raises:
        ConfigurationError: an argument out of range.

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
    """FedYogi by :class:`AdaptiveServer`: v grows at once and shrinks slowly. Arguments as for :class:`FedAdam`.

    Example:
        >>> FedYogi()
        FedYogi()
    """

    rule: Literal["adam", "yogi"] = "yogi"


class AdaptiveServer(Optimizer):
    """Algorithm 2 of Reddi et al., for a gradient -Delta, with m = 0 and v = tau^2 before the first step:

        m <- beta1 m + (1 - beta1) Delta
        v <- beta2 v + (1 - beta2) Delta^2                    (Adam)
        v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)        (Yogi)
        x <- x + lr m / (sqrt(v) + tau)

    Args:
        params: parameters, or groups of them.
        lr: eta.
        beta1: in [0, 1).
        beta2: in [0, 1).
        tau: above 0.
        rule: for v.

    Example:
        >>> x = torch.nn.Parameter(torch.zeros(1))
        >>> x.grad = torch.tensor([-3.0])
        >>> AdaptiveServer([x], lr=1.0, beta1=0.0, beta2=0.0, tau=1.0).step()
        >>> x.item()
        0.75
    """

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
        """One round."""
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is None:
                    continue
                state = self.state[x]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(x), torch.full_like(x, group["tau"] ** 2)
                # Piece by piece, so that what lies in between takes no model's memory.
                pieces = (torch.atleast_1d(each).split(PIECE) for each in (x, x.grad, state["m"], state["v"]))
                for point, gradient, m, v in zip(*pieces):
                    square = gradient.square()
                    m.lerp_(-gradient, 1 - group["beta1"])
                    if group["rule"] == "adam":
                        v.lerp_(square, 1 - group["beta2"])
                    else:
                        v.addcmul_(square, (v - square).sign_(), value=group["beta2"] - 1)
                    point.addcdiv_(m, v.sqrt().add_(group["tau"]), value=group["lr"])
