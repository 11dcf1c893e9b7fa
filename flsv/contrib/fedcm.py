"""FedCM: clients mix each gradient with the direction in which the global model has moved in the last round.

Paper: Xu, Wang, Wang and Yao, "FedCM: Federated Learning with Client-level Momentum", 2021, algorithm FedCM,
https://arxiv.org/abs/2106.10874
Owner: the flsv contributors
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from annotated_types import Gt, Le
from torch import Tensor

from flsv.core import FederationInfo, FederationState, Numbers, Round
from flsv.training.algorithms import ClientAlgorithm, ClientContext
from flsv.training.algorithms.base import is_plain_sgd
from flsv.utilities.errors import ConfigurationError

DIRECTION = "fedcm_direction"
LR_SUM = "fedcm_learning_rate_sum"


class FedCM(ClientAlgorithm):
    r"""Client algorithm with a momentum that all clients share. A local step along the gradient g of the client's loss
    and the next round's momentum D, 0 in the first round, are

    .. math::
        y_i \leftarrow y_i - \eta (\alpha g + (1 - \alpha) D), \qquad
        D \leftarrow -\frac{\sum_i w_i (y_i - x)}{\sum_i w_i K_i \eta}.

    Here x is the global model of the round, y_i client i's model, K_i its number of local steps and w_i its weight in
    the average. In the paper all K_i and all w_i are equal. K_i eta is the sum of the learning rates of the client's
    steps, which it reports. The server sends D beside the model. With another aggregator than FedAvg, the step of the
    global model before ``server_lr`` takes the place of the sum over updates. Only parameters have a momentum. Buffers
    (BatchNorm's statistics) are averaged as in FedAvg.

    With gradient clipping, the mixed gradients are clipped. Weight decay is added after the mixture, and D includes it.
    If all learning rates of a round are 0, D stays what it was.

    When not to use it:
        If traffic to the clients matters, since it is doubled. In a run of few rounds, since the first round takes
        steps of :math:`\alpha \eta` only. If a small cohort differs from the other clients, since the next cohort
        follows it.

    Args:
        alpha: the gradient's part of a step, above 0 and at most 1 (FedAvg). The paper uses 0.1.

    Raises:
        ConfigurationError: ``alpha`` is not above 0 and at most 1. Before training: the optimizer is not a single
            ``torch.optim.SGD`` with one learning rate and no momentum. D is not a mean gradient then.

    Example:
        >>> FedCM(alpha=0.2)
        FedCM(alpha=0.2)
    """

    sends = (DIRECTION,)
    reports = (LR_SUM,)
    saved = ("_direction",)

    def __init__(self, alpha: Annotated[float, Gt(0), Le(1)] = 0.1) -> None:
        self.alpha = alpha

    def begin(self, federation: FederationInfo) -> None:
        self._direction = federation.global_vector.new_zeros(federation.space.num_parameters)

    def set_up(self, federation: FederationInfo) -> None:
        self._aggregator: Any = federation.strategies["aggregator"]
        if not is_plain_sgd(federation.optimizers):
            raise ConfigurationError(
                f"{self!r} computes a mean gradient from the change of the global model. This needs one "
                "torch.optim.SGD with momentum=0 and a single learning rate, but the module configures "
                f"{list(federation.optimizers)}. Set momentum=0: FedCM has its own momentum."
            )

    def send(
        self,
        client: int,
        start: Tensor | None,
        state: FederationState,
    ) -> dict[str, Tensor]:
        return {DIRECTION: self._direction.to(state.model())}

    @torch.no_grad()
    def gradients(
        self,
        context: ClientContext,
        parameters: list[Tensor],
        gradients: list[Tensor],
    ) -> None:
        direction = context.unflatten(context.received(DIRECTION), parameters)
        torch._foreach_mul_(gradients, self.alpha)
        torch._foreach_add_(gradients, direction, alpha=1 - self.alpha)

    def end_client(self, context: ClientContext) -> dict[str, float]:
        return {LR_SUM: context.lr_sum}

    def expected_reports(self) -> Mapping[str, Numbers]:
        return {LR_SUM: Numbers(torch.float64, lowest=0)}

    def end_round(self, round: Round) -> None:
        assert round.aggregation_weights is not None
        weights = round.aggregation_weights.double()
        mean_lr_sum = weights @ round.reports[LR_SUM].to(weights)
        # The sum is 0 if all learning rates were 0, or if the aggregate was not finite and all weights are 0.
        if mean_lr_sum > 0:
            update = round.server_update[: round.space.num_parameters]
            displacement = update / self._aggregator.server_lr
            self._direction = -displacement / mean_lr_sum
