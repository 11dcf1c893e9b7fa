"""ServerOptimizer: an optimizer at the server that uses the clients' mean update as a gradient.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 1.

With x the global model, x_i client i's model, w_i its weight and Delta = sum_i w_i (x_i - x), the optimizer gets the
gradient -Delta at x. Choices that the paper leaves open: buffers (BatchNorm's statistics) have no gradient, and are
averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from flsv.aggregation.fedavg import FedAvg
from flsv.core import ClientMatrix, Round
from flsv.core.strategy import Contributions, FederationInfo
from flsv.utilities.errors import ConfigurationError


class ServerOptimizer(FedAvg):
    """Aggregator whose optimizer takes a step along the clients' mean update.

    The optimizer's state (momentum, moments) is saved in checkpoints, so that a resumed run is the same to the bit. The
    optimizer's learning rate takes the place of ``server_lr``. The clients' updates, which metrics read, are the same
    as with FedAvg; the round's ``server_vector`` and ``server_update`` include the optimizer's step.

    Args:
        optimizer: function that makes an optimizer of a list of tensors, such as
            ``partial(torch.optim.SGD, lr=1.0, momentum=0.9)``; in a configuration file, an optimizer's ``class_path``
            and ``init_args``.
        weighting: the clients' weights, see :class:`flsv.aggregation.FedAvg`.

    Raises:
        ConfigurationError: the optimizer cannot be constructed with its arguments.

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

    def begin(self, federation: FederationInfo) -> None:
        self._moments = {}

    def aggregate(self, round: Round, contributions: Contributions) -> tuple[Tensor, Tensor]:
        weights = self.weights(round, contributions).to(round.client_vectors)
        vector, cut = round.combine(weights), round.space.num_parameters  # its buffers are the next model's
        # Updates are measured from the global model, whatever model the clients started from: SGD with lr=1 is then
        # FedAvg.
        moves = ClientMatrix(round.client_vectors, [round.global_vector] * len(round))
        point = torch.nn.Parameter(vector[:cut].copy_(round.global_vector[:cut]))  # the step is taken in place
        point.grad = moves.combine(weights, cut).neg_()
        optimizer = self.optimizer([point])
        groups = optimizer.state_dict()["param_groups"]
        # A copy, since the round may still fail.
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
