"""GradientShapley: Shapley values of the Taylor expansion of the validation loss. No coalition is evaluated."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from flsv.arguments import check_number
from flsv.errors import ConfigurationError
from flsv.functional.gradient_shapley import gradient_shapley
from flsv.functional.over_rounds import momentum_merge, momentum_row, momentum_value
from flsv.metrics.base import ContributionMetric
from flsv.metrics.guide import Guide


class GradientShapley(ContributionMetric):
    """Exact Shapley values of the first- or second-order expansion of U(S) = -L(x + mean of the updates of S).

    Costs one gradient of the validation loss and k dot products a round, and k Hessian-vector products for the second
    order. Good while updates are small; see :func:`flsv.functional.gradient_shapley`.

    As input to ``update``: ``client_ids [k]``, ``gradient_products [k]`` (g . d_i) and ``hessian_products [k, k]``
    (d_i^T H d_j) or None. ``compute`` gives ``[num_clients]``, in nats, positive for clients that lower the loss; a
    client outside the cohort keeps its value, one never seen is NaN.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        order: 1 or 2.
        momentum: mu in [0, 1) of a moving average over a client's rounds; 0: the last round's value.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: another order, momentum outside [0, 1).

    Example:
        >>> metric = GradientShapley(num_clients=3)
        >>> metric.update(torch.tensor([0, 2]), torch.tensor([-1.0, 0.5]))
        >>> metric.compute()
        tensor([ 0.8750,     nan, -0.6250])
    """

    per_class = False
    over_rounds = "momentum"
    measured_by = "negative_loss"
    history: Tensor

    def __init__(
        self, num_clients: int | None = None, order: Literal[1, 2] = 1, momentum: float = 0.0, **kwargs: Any
    ) -> None:
        if order not in (1, 2):
            raise ConfigurationError(f"GradientShapley(order={order}): expected 1 or 2.")
        check_number(self, "momentum", momentum, least=0, below=1)
        self.order, self.momentum = order, momentum
        super().__init__(num_clients, None, **kwargs)

    @property
    def round_fields(self) -> dict[str, Any]:
        """Where a ``FederatedLoop`` finds the arguments of ``update``."""
        return {
            "gradient_products": lambda round: round.gradient_products(self.order).gradient,
            "hessian_products": lambda round: round.gradient_products(self.order).hessian,
        }

    def guide(self) -> Guide:
        return Guide(
            unit="fall of the validation loss (nats)",
            sign="positive: lowers the validation loss; negative: raises it; 0: no difference.",
            needs="the server's validation set.",
            cost="a gradient of the validation loss, and per client a dot product; order 2: a Hessian product too.",
        )

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        reduction = partial(momentum_merge, momentum=self.momentum)
        self.add_state("history", torch.zeros(num_clients, 3), dist_reduce_fx=reduction)

    def update(self, client_ids: Tensor, gradient_products: Tensor, hessian_products: Tensor | None = None) -> None:
        """Add one round; shapes ``[k]``, ``[k]``, ``[k, k]``."""
        self._check_clients(client_ids)
        self._check_lengths(client_ids, gradient_products=gradient_products, hessian_products=hessian_products)
        values = gradient_shapley(gradient_products, hessian_products)
        now = torch.zeros_like(self.history)
        now[client_ids] = momentum_row(values.to(now)[:, None], self.momentum)
        self.history = momentum_merge(torch.stack([self.history, now]), self.momentum)
        self._note(client_ids, values)
        self.rounds += 1

    def compute(self) -> Tensor:
        """``[num_clients]``, NaN for clients never seen."""
        return momentum_value(self.history, self.momentum).squeeze(-1)
