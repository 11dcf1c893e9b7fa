"""ShapleyWeighted and ShapleySoftmax: aggregation weights made of clients' values."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Gt, Le
from torch import Tensor

from flsv.aggregation.base import Aggregator
from flsv.core import Round
from flsv.core.strategy import Contributions
from flsv.functional.nan_to_mean import nan_to_mean
from flsv.utilities.declared import Positive


class ShapleyWeighted(Aggregator):
    """AFedSV's aggregator, which weights clients by their values (Sun et al., "ShapleyFL", KDD 2023, Algorithm 1).

    The next global model is x + sum_i (w_i / p_i) d_i (equation 5). Here x is the global model, d_i client i's update,
    w_i = value_i / (sum of the values of *all* clients) and p_i its probability to be drawn.

    Dividing by p_i makes the sum over the cohort an unbiased estimate of the sum over all clients (Horvitz and
    Thompson), as in the paper. The total weight then changes with the cohort. ``normalize=True`` makes the total 1 (the
    self-normalized estimate, which has a small bias and less variance).

    Args:
        metric: the name of a metric with one value per client, ``[n]``, such as
            :class:`flsv.metrics.SurrogateFederatedShapley`. Negative values count as 0. A client that never took part
            gets the metric's ``prior`` or, if there is no prior, the mean of the other clients' values.
        normalize: whether to scale the cohort's weights to sum to 1.
        server_lr: the server's learning rate, see :class:`flsv.aggregation.Aggregator`.

    Example:
        >>> ShapleyWeighted("value")
        ShapleyWeighted(metric='value')
    """

    metric_shape = ("n",)

    def __init__(
        self,
        metric: str = "ssv",
        normalize: bool = False,
        *,
        server_lr: Positive = 1.0,
    ) -> None:
        super().__init__(server_lr=server_lr)
        self.metric: str = metric
        self.normalize = normalize

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        values = contributions.get(self.metric)
        if values is None:
            raise RuntimeError(
                f"{self!r}: the metric {self.metric!r} has no value before the first aggregation."
            )
        merits = nan_to_mean(values).clamp_min(0).double()  # [n]
        if merits.sum() == 0:
            merits = torch.ones_like(merits)
        weights = merits[round.client_ids] / merits.sum()  # [k], of the cohort
        if round.inclusion_probabilities is not None:
            weights = weights / round.inclusion_probabilities.to(weights)
        if not self.normalize:
            return weights

        total = weights.sum()
        if total > 0:
            return weights / total
        return torch.full_like(weights, 1 / len(weights))


class ShapleySoftmax(Aggregator):
    """Average of the clients' models, weighted by the softmax of their values.

    The next global model is x + step sum_i s_i d_i, as in the baseline FedSV of ShapleyFL's code (Sun et al., KDD
    2023). Here x is the global model, d_i client i's update and s = softmax(value / temperature) over the round's
    clients.

    ShapleyFL's code averages the weighted average and the model x that the round started from: step = 0.5.
    Buffers (BatchNorm's statistics), which the networks of that code do not have, are averaged with the weights s.

    The values are the current round's, such as those of a :class:`flsv.metrics.PartialFederatedShapley` without
    momentum. Values in units of accuracy are a few hundredths: at temperature 1 the weights are nearly equal.

    Args:
        metric: the name of one of the loop's metrics with one value per client, ``[n]``. A client that never took part
            gets the metric's ``prior`` or, if there is no prior, the mean of the other clients' values.
        step: total weight of the clients, in (0, 1]. The global model x has the rest.
        temperature: divisor of the values, above 0.
        server_lr: the server's learning rate, see :class:`flsv.aggregation.Aggregator`.

    Raises:
        ConfigurationError: the step is outside (0, 1], or the temperature is not above 0, or before training: the
            metric is updated after the aggregation.

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
            raise RuntimeError(
                f"{self!r}: the metric {self.metric!r} has no value before the first aggregation."
            )
        cohort_values = nan_to_mean(values)[round.client_ids].double()  # [k]
        return self.step * (cohort_values / self.temperature).softmax(0)
