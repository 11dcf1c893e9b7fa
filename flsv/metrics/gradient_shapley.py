"""GradientShapley: Shapley values of the Taylor expansion of the validation loss."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flsv.functional.moving_average import momentum_add, momentum_merge, momentum_value
from flsv.functional.shapley.gradient import gradient_shapley
from flsv.metrics.base import ContributionMetric
from flsv.scores.performance import loss_measure
from flsv.utilities.declared import Momentum


class GradientShapley(ContributionMetric):
    r"""Exact Shapley values of the validation loss's first-order expansion.

    The game U(S) = -L(x + the updates' mean in S) has, up to a constant, the expansion

    .. math::
        U(S) \approx -\Bigl\langle g, \tfrac{1}{|S|} \sum_{i \in S} d_i \Bigr\rangle

    Here L is the validation loss, x the global model, g the gradient of L at x and d_i client i's update. A round of k
    clients costs one gradient and k dot products. The expansion is accurate if updates are small. See
    :func:`flsv.functional.gradient_shapley`.

    ``compute`` gives ``[num_clients]``, in nats, positive for clients that lower the loss. A client that does not take
    part in a round keeps its value, a client that never took part is NaN.

    When not to use it:
        With large updates (many local epochs, high learning rates): the expansion is accurate for small updates only.
        For a performance other than the loss: take :class:`CumulativeShapley`.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``.
        momentum: mu in [0, 1), the weight of the past in a moving average over a client's rounds. 0 gives the last
            round's value.
        loss: for modules other than classifiers, such as language models: the name of the loss that they log in
            ``validation_step``, such as ``"val_loss"``. None: the classifier's cross-entropy.
        kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: the momentum is outside [0, 1), or before the first round: the module does not log the loss,
            or logs it without its autograd graph.

    Example:
        >>> metric = GradientShapley(num_clients=3)
        >>> metric.update(torch.tensor([0, 2]), torch.tensor([-1.0, 0.5]))
        >>> metric.compute()
        tensor([ 0.8750,     nan, -0.6250])
    """

    unit = "fall of the validation loss (nats)"
    sign = "positive: lowers the validation loss; negative: raises it; 0: no difference."
    cost = "a gradient of the validation loss, and per client a dot product."
    claims = ("value",)
    to_pay_by = True
    per_class = False
    history: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        momentum: Momentum = 0.0,
        loss: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.momentum = momentum
        self.loss = loss
        #: The performance measure of models, see :meth:`flsv.Round.game`.
        self.measure = loss_measure(self, loss)
        super().__init__(num_clients, num_classes=None, **kwargs)

    rows_of_clients: Sequence[str] = ("gradient_products",)
    needs: Sequence[str] | None = ("slopes",)

    @property
    def round_fields(self) -> dict[str, Any]:
        """Functions ``{argument: f(round)}`` with which a ``FederatedLoop`` computes arguments of ``update``."""
        return {"gradient_products": lambda round: round.slopes(loss=self.measure)}

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        reduction = partial(momentum_merge, momentum=self.momentum)
        self.add_state("history", torch.zeros(num_clients, 3), dist_reduce_fx=reduction)

    def update(self, client_ids: Tensor, gradient_products: Tensor) -> None:
        """Update the states with one round.

        Args:
            client_ids: ``[k]``, the round's clients.
            gradient_products: ``[k]``, the products g . d_i of the validation loss's gradient g with the clients'
                updates d_i.
        """
        values = gradient_shapley(gradient_products)
        self.history = momentum_add(self.history, client_ids, values[:, None], self.momentum)

    def compute(self) -> Tensor:
        """Compute the moving averages of the rounds' Shapley values, ``[num_clients]``, in nats. NaN for clients that
        never took part."""
        return momentum_value(self.history, self.momentum).squeeze(-1)
