"""ShapleySoftmax (FedSV as an aggregation): client weights by a softmax of the round's Shapley values.

The baseline that Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, call FedSV, as
implemented in their code (``fedsv.py`` and ``avgSV_baseline``). Wang et al. 2020 define the value, without an
aggregation.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Gt, Le
from torch import Tensor

from flsv.aggregation.base import Aggregator
from flsv.core import Round
from flsv.core.strategy import Contributions
from flsv.functional.nan_to_mean import nan_to_mean
from flsv.utilities.declared import Positive


class ShapleySoftmax(Aggregator):
    """Aggregator with the result x + step sum_i s_i d_i, where x is the global model, d_i client i's update and
    s = softmax(value / temperature) over the round's clients.

    ShapleyFL's code takes half of the weighted average and half of the model x that the round started from: step = 0.5.
    Buffers (BatchNorm's statistics), which the networks of that code do not have, are averaged with the weights s.

    The values are the current round's, such as those of a :class:`flsv.metrics.PartialFederatedShapley` without
    momentum. Values in units of accuracy are a few hundredths: at temperature 1 the weights are nearly equal.

    Args:
        metric: the name of one of the loop's metrics with one value per client, ``[n]``. A client that never took part
            gets the metric's ``prior`` or, if there is no prior, the mean of the other clients' values.
        step: total weight of the clients, in (0, 1]; the global model x has the rest.
        temperature: divisor of the values, above 0.
        server_lr: the server's learning rate, see :class:`flsv.aggregation.Aggregator`.

    Raises:
        ConfigurationError: the step is outside (0, 1], or the temperature is not above 0; before training: the metric
            is updated after the aggregation.

    Example:
        >>> ShapleySoftmax(step=1.0)
        ShapleySoftmax(step=1.0)
    """

    metric_shape = ("n",)
    metric_of_round = True

    def __init__(
        self,
        metric: str = "sv",
        step: Annotated[float, Gt(0), Le(1)] = 0.5,
        temperature: Positive = 1.0,
        *,
        server_lr: Positive = 1.0,
    ) -> None:
        super().__init__(server_lr=server_lr)
        self.metric: str = metric
        self.step = step
        self.temperature = temperature

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        values = contributions.get(self.metric)
        if values is None:
            raise RuntimeError(f"{self!r}: the metric {self.metric!r} has no value before the first aggregation.")
        values = nan_to_mean(values)[round.client_ids].double()
        return self.step * (values / self.temperature).softmax(0)
