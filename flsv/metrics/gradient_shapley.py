"""GradientShapley: Shapley values of the Taylor expansion of the validation loss, without evaluating a coalition."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from flsv.functional.moving_average import momentum_add, momentum_merge, momentum_value
from flsv.functional.shapley.gradient import gradient_shapley
from flsv.games.performance import loss_measure
from flsv.metrics.base import ContributionMetric
from flsv.utilities.declared import Momentum

#: Condition on the arguments, and the message if it is violated: order 2 needs the classifier's own loss.
_RULES = ((lambda given: given.order == 1 or given.loss is None, "of a loss that is logged there is the first order."),)


def _products(metric: Any) -> dict[str, Any]:
    return {
        "gradient_products": lambda round: round.gradient_products(metric.order, metric.measured_by).gradient,
        "hessian_products": lambda round: round.gradient_products(metric.order, metric.measured_by).hessian,
    }


class GradientShapley(ContributionMetric):
    r"""Exact Shapley values of the first- or second-order Taylor expansion of U(S) = -L(x + mean of the updates of S).

    .. math::
        U(S) \approx -\Bigl\langle g, \tfrac{1}{|S|} \sum_{i \in S} d_i \Bigr\rangle - \tfrac12 \bar d_S^\top H \bar d_S

    Here L is the validation loss, x the global model, g and H the gradient and Hessian of L at x, d_i client i's update
    and :math:`\bar d_S` the mean update of coalition S. A round of k clients costs one gradient and k dot products, and
    k Hessian-vector products for the second order. The expansion is accurate if updates are small; see
    :func:`flsv.functional.gradient_shapley`.

    As input to ``update``: ``client_ids [k]``, ``gradient_products [k]`` (g . d_i) and ``hessian_products [k, k]``
    (d_i^T H d_j) or None. ``compute`` gives ``[num_clients]``, in nats, positive for clients that lower the loss; a
    client that does not take part in a round keeps its value, a client that never took part is NaN.

    When not to use it:
        With large updates (many local epochs, high learning rates): the expansion is accurate for small updates only.
        For a performance other than the loss: take :class:`CumulativeShapley`.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``, which takes it from the data.
        order: the order of the expansion, 1 or 2.
        momentum: mu in [0, 1), the weight of the past in a moving average over a client's rounds; 0 gives the last
            round's value.
        loss: for modules other than classifiers, such as language models: the name of the loss that they log in
            ``validation_step``, such as ``"val_loss"``, with order 1 only. None: the classifier's cross-entropy.
        kwargs: further arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: the order is not 1 or 2, the momentum is outside [0, 1), or order 2 is used with a ``loss``;
            before the first round: the module does not log the loss, or logs it without its autograd graph.

    Example:
        >>> metric = GradientShapley(num_clients=3)
        >>> metric.update(torch.tensor([0, 2]), torch.tensor([-1.0, 0.5]))
        >>> metric.compute()
        tensor([ 0.8750,     nan, -0.6250])
    """

    unit = "fall of the validation loss (nats)"
    sign = "positive: lowers the validation loss; negative: raises it; 0: no difference."
    cost = "a gradient of the validation loss, and per client a dot product; order 2: a Hessian product too."
    to_pay_by = True
    rules = _RULES
    per_class = False
    over_rounds = "momentum"
    history: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        order: Literal[1, 2] = 1,
        momentum: Momentum = 0.0,
        loss: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.order, self.momentum, self.loss = order, momentum, loss
        #: The performance measure of models, see :meth:`flsv.Round.play`.
        self.measured_by = loss_measure(self, loss)
        super().__init__(num_clients, None, **kwargs)

    @property
    def round_fields(self) -> dict[str, Any]:
        """Functions ``{argument: f(round)}`` with which a ``FederatedLoop`` computes arguments of ``update``."""
        return _products(self)

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        reduction = partial(momentum_merge, momentum=self.momentum)
        self.add_state("history", torch.zeros(num_clients, 3), dist_reduce_fx=reduction)

    def update(self, client_ids: Tensor, gradient_products: Tensor, hessian_products: Tensor | None = None) -> None:
        """Update the states with one round.

        Args:
            client_ids: ``[k]``, the ids of the round's k clients.
            gradient_products: ``[k]``, the products g . d_i of the validation loss's gradient g with the clients'
                updates d_i.
            hessian_products: ``[k, k]``, the products d_i^T H d_j with the loss's Hessian H; None: only the first order
                is used.
        """
        values = gradient_shapley(gradient_products, hessian_products)
        self.history = momentum_add(self.history, client_ids, values[:, None], self.momentum)
        self.note_round(client_ids, values)

    def compute(self) -> Tensor:
        """Compute the moving averages of the rounds' Shapley values, ``[num_clients]``, in nats; NaN for clients that
        never took part."""
        return momentum_value(self.history, self.momentum).squeeze(-1)
