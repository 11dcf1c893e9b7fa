"""SurrogateFederatedShapley: normalised Shapley values, averaged over a client's rounds. The weights of AFedSV.

Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, definition 4.2 and equation 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flsv.functional.momentum import momentum_value
from flsv.functional.shapley import ShapleyEstimate, normalize_shapley
from flsv.metrics.federated_shapley import PartialFederatedShapley, Performance, Weighting


class SurrogateFederatedShapley(PartialFederatedShapley):
    r"""The surrogate federated Shapley value.

    .. math::
        NSV_i = \frac{SV_i - \min SV}{\max SV - \min SV}, \qquad
        SSV_i \leftarrow \beta\, SSV_i + (1 - \beta)\, NSV_i \quad (i \in C)

    with minimum and maximum over the round's cohort; where all values are equal NSV is 1/2 (the paper leaves it open).
    A client outside the cohort keeps its value; everybody starts at ``init``.

    Inputs as for :class:`PartialFederatedShapley`. ``compute`` gives ``[num_clients]`` in [0, 1].

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        beta: the weight of the past. The authors' code weighs the present with 0.3, which is beta = 0.7 in their eq. 3.
        init: the value before a client's first round.
        estimator: as for :class:`PartialFederatedShapley`.
        estimator_args: likewise.
        performance: likewise.
        weighting: likewise.
        kwargs: see ``torchmetrics.Metric``.

    Example:
        >>> metric = SurrogateFederatedShapley(num_clients=3)
        >>> metric.update(torch.tensor([0, 2]), lambda masks: masks.float() @ torch.tensor([1.0, 3.0]))
        >>> metric.compute()
        tensor([0.3500, 0.5000, 0.6500])
    """

    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def __init__(
        self,
        num_clients: int | None = None,
        beta: float = 0.7,
        init: float = 0.5,
        estimator: str | Callable[..., ShapleyEstimate] = "auto",
        estimator_args: dict[str, Any] | None = None,
        performance: Performance = "accuracy",
        weighting: Weighting = "uniform",
        **kwargs: Any,
    ) -> None:
        self.beta, self.init = beta, init
        super().__init__(num_clients, None, estimator, estimator_args, performance, weighting, momentum=beta, **kwargs)

    def compute(self) -> Tensor:
        """``[num_clients]`` in [0, 1]; ``init`` for clients never seen."""
        return momentum_value(self.history, self.beta, init=self.init).squeeze(-1)

    def _value(self, estimate: ShapleyEstimate) -> tuple[Tensor, Tensor]:
        # The spread of the values' own range is left out: the error of a normalised value has no simple form.
        spread = estimate.values.max() - estimate.values.min()
        stderr = estimate.stderr / spread if spread > 0 else torch.full_like(estimate.stderr, float("nan"))
        return normalize_shapley(estimate.values), stderr
