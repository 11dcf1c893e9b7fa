"""FedOpt: aggregators in which an optimizer at the server takes each round's step. FedAvgM, FedAdam and FedYogi."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from flsv.aggregation.fedavg import FedAvg
from flsv.core import ClientMatrix, Round
from flsv.core.strategy import Contributions, FederationInfo
from flsv.utilities.declared import Momentum, Positive
from flsv.utilities.errors import ConfigurationError


class ServerOptimizer(FedAvg):
    """Aggregator whose optimizer takes a step along the clients' mean update.

    With Delta that update, the optimizer gets the gradient -Delta at the global model (Reddi et al., "Adaptive
    Federated Optimization", ICLR 2021, Algorithm 1). Buffers have no gradient, and are averaged.

    The optimizer's state (momentum, moments) is saved in checkpoints, so that a resumed run is bitwise identical. The
    optimizer's learning rate replaces ``server_lr``. The clients' updates, which metrics read, are the same
    as with FedAvg. The round's ``server_vector`` and ``server_update`` include the optimizer's step.

    Args:
        optimizer: function that makes an optimizer of a list of tensors, such as
            ``partial(torch.optim.SGD, lr=1.0, momentum=0.9)``. In a configuration file, an optimizer's ``class_path``
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
        optimizer: Callable[[Iterable[Tensor]], Optimizer],
        weighting: Literal["samples", "uniform"] = "samples",
    ) -> None:
        super().__init__(weighting)
        self.optimizer = optimizer
        try:
            self._defaults = optimizer([torch.zeros(1)]).defaults
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{type(self).__name__} could not construct its optimizer: {error}"
            ) from error
        self._moments: dict[Any, Any] = {}
        self._next_moments: dict[Any, Any] = {}

    def begin(self, federation: FederationInfo) -> None:
        self._moments = {}

    def aggregate(self, round: Round, contributions: Contributions) -> tuple[Tensor, Tensor]:
        weights = self.weights(round, contributions).to(round.client_vectors)
        vector = round.combine(weights)  # its buffers are the next model's
        num_parameters = round.space.num_parameters
        # Updates are measured from the global model, even if clients started from other models. Then SGD with lr=1 is
        # the same as FedAvg.
        initial_models = [round.global_vector] * len(round)
        updates = ClientMatrix(round.client_vectors, initial_models)
        mean_update = updates.first_columns(num_parameters).combine(weights)

        # The optimizer steps from the global model. It changes `next_parameters` in place, a view of `vector`, which
        # saves the memory of another model.
        next_parameters = vector[:num_parameters]
        next_parameters.copy_(round.global_vector[:num_parameters])
        parameter = torch.nn.Parameter(next_parameters)
        parameter.grad = mean_update.neg_()  # an optimizer steps against the gradient
        self._next_moments = self._moments_after_step(parameter)
        return vector, weights

    def _moments_after_step(self, parameter: Tensor) -> dict[int, Any]:
        # The optimizer changes the parameter in place.
        optimizer = self.optimizer([parameter])
        groups = optimizer.state_dict()["param_groups"]
        # A copy, since the round may still fail.
        moments = deepcopy(self._moments)
        optimizer.load_state_dict({"state": moments, "param_groups": groups})
        optimizer.step()
        return optimizer.state_dict()["state"]

    def end_round(self, round: Round) -> None:
        self._moments = self._next_moments

    def __repr__(self) -> str:
        if type(self) is not ServerOptimizer:
            return super().__repr__()
        arguments = [f"{name}={value!r}" for name, value in self._defaults.items()]
        # `optimizer` is a function. Call it to get the optimizer's class.
        optimizer = self.optimizer([torch.zeros(1)])
        optimizer_text = f"{type(optimizer).__name__}({', '.join(arguments)})"
        return f"ServerOptimizer({optimizer_text}, weighting={self.weighting!r})"


class FedAvgM(ServerOptimizer):
    """FedAvg with server momentum (Hsu, Qi and Brown 2019, section 4.3). With x the global model and Delta the clients'
    mean update, v <- momentum v + Delta, then x <- x + lr v.

    Args:
        lr: the server's learning rate. In the paper 1, and below 1 if the momentum is 0.7 or more.
        momentum: the momentum, in [0, 1).
        weighting: the clients' weights, see :class:`flsv.aggregation.FedAvg`.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> FedAvgM(momentum=0.7)
        FedAvgM(momentum=0.7)
    """

    def __init__(
        self,
        lr: Positive = 1.0,
        momentum: Momentum = 0.9,
        weighting: Literal["samples", "uniform"] = "samples",
    ) -> None:
        self.lr = lr
        self.momentum = momentum
        super().__init__(self._sgd, weighting)

    def _sgd(self, params: Iterable[Tensor]) -> Optimizer:
        return torch.optim.SGD(params, lr=self.lr, momentum=self.momentum)


#: Number of elements that :class:`AdaptiveServer` updates at a time, to bound the memory of intermediate results.
CHUNK_SIZE = 2**20


class FedAdam(ServerOptimizer):
    """FedAvg with the optimizer Adam at the server, see :class:`AdaptiveServer`.

    Args:
        lr: eta, the server's learning rate.
        beta1: decay of the moving average of updates, in [0, 1).
        beta2: decay of the moving average of squared updates, in [0, 1).
        tau: constant in the denominator of the step. The smaller, the more adaptive. It should be about the size of an
            element of the clients' mean update.
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

    def _adaptive(self, params: Iterable[Tensor]) -> Optimizer:
        return AdaptiveServer(
            params,
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            tau=self.tau,
            rule=self.rule,
        )


class FedYogi(FedAdam):
    """FedAvg with the optimizer Yogi at the server, see :class:`AdaptiveServer`. The arguments are the same as for
    :class:`FedAdam`.

    Example:
        >>> FedYogi()
        FedYogi()
    """

    rule: Literal["adam", "yogi"] = "yogi"


class AdaptiveServer(Optimizer):
    """Adam or Yogi (``rule``) for the server's steps, by Reddi et al., Algorithm 2."""

    # Unlike torch.optim.Adam it has no bias correction, and v starts at tau^2. The paper's FedAdagrad is
    # torch.optim.Adagrad(initial_accumulator_value=tau**2, eps=tau) in a ServerOptimizer.

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        rule: Literal["adam", "yogi"] = "adam",
    ) -> None:
        defaults = {
            "lr": lr,
            "beta1": beta1,
            "beta2": beta2,
            "tau": tau,
            "rule": rule,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take the server's step of one round, along the gradients of the parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, parameter.grad, group)

    def _step_parameter(
        self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]
    ) -> None:
        state = self.state[parameter]
        if not state:
            state["m"] = torch.zeros_like(parameter)
            state["v"] = torch.full_like(parameter, group["tau"] ** 2)

        # Chunks are updated one by one, so that intermediate results do not need the memory of a model.
        chunks_of_tensors = zip(
            _chunks(parameter), _chunks(gradient), _chunks(state["m"]), _chunks(state["v"])
        )
        for x, g, m, v in chunks_of_tensors:
            # m <- beta1 m - (1 - beta1) g
            m.lerp_(-g, 1 - group["beta1"])
            _update_second_moment(v, g.square(), group)
            # x <- x + lr m / (sqrt(v) + tau)
            divisor = v.sqrt().add_(group["tau"])
            x.addcdiv_(m, divisor, value=group["lr"])


def _chunks(tensor: Tensor) -> Sequence[Tensor]:
    return torch.atleast_1d(tensor).split(CHUNK_SIZE)


def _update_second_moment(v: Tensor, square: Tensor, group: Mapping[str, Any]) -> None:
    if group["rule"] == "adam":
        # v <- beta2 v + (1 - beta2) g^2
        v.lerp_(square, 1 - group["beta2"])
    else:
        # v <- v - (1 - beta2) g^2 sign(v - g^2)
        sign = (v - square).sign_()
        v.addcmul_(square, sign, value=group["beta2"] - 1)
