"""ShapleyImportanceSampler and SystematicShapleySampler: AFedSV+'s importance sampling by Shapley values.

Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, theorem 5.1.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from flsv.core.strategy import Contributions
from flsv.functional import importance_probabilities
from flsv.functional.nan_to_mean import nan_to_mean
from flsv.sampling.base import ClientSampler
from flsv.sampling.bernoulli import BernoulliSampler
from flsv.utilities.declared import Positive


class ShapleyImportanceSampler(BernoulliSampler):
    """Sampler that includes clients independently, in proportion to their Shapley weights (AFedSV+, Theorem 5.1).

    These probabilities, capped at 1, minimize the variance of the cohort's aggregate. Before the metric's first value
    all probabilities are equal.

    Args:
        expected_cohort: m, the expected number of clients per round.
        metric: the name of a metric with one non-negative weight per client, ``[n]``, such as
            :class:`flsv.metrics.SurrogateFederatedShapley`. A client that never took part gets the metric's ``prior``
            or, if there is no prior, the mean of the other clients' values.
        min_cohort: the smallest number of clients in a round, 1 or 2.

    Example:
        >>> import torch
        >>> sampler = ShapleyImportanceSampler(expected_cohort=2, metric="ssv")
        >>> sampler.coins(4, {"ssv": torch.tensor([0.6, 0.1, 0.1, 0.2])})
        tensor([1.0000, 0.2500, 0.2500, 0.5000])
    """

    metric_shape = ("n",)
    among = ClientSampler.among  # it chooses by the metric's values

    def __init__(self, expected_cohort: Positive, metric: str = "ssv", min_cohort: Literal[1, 2] = 2) -> None:
        super().__init__(expected_cohort, min_cohort)
        self.metric: str = metric

    def coins(self, num_clients: int, contributions: Contributions) -> Tensor:
        weights = contributions.get(self.metric)
        if weights is None:
            return super().coins(num_clients, contributions)
        weights = nan_to_mean(weights.cpu()).clamp_min(0)
        coins = importance_probabilities(weights, self.expected_cohort)
        if int((coins > 0).sum()) < self.min_cohort:  # all others have weight 0: no second player would ever come
            return super().coins(num_clients, contributions)
        return coins


#: Tolerance by which a probability counts as 1, since probabilities are computed in float32.
_ROUNDING = 1e-6


class SystematicShapleySampler(ShapleyImportanceSampler):
    """Sampler of exactly ``cohort_size`` clients, with inclusion probabilities in proportion to Shapley weights.

    The paper includes clients independently (:class:`ShapleyImportanceSampler`): one cohort may have two clients and
    another twelve, so that the sum of the cohort's weights varies much. This sampler, which is not in the paper, draws
    systematically: each client gets a segment of the length of its inclusion probability p_i; the segments are laid end
    to end in random order; of points at distances of 1 on this line each selects the client in whose segment it lies.
    The probabilities are those of AFedSV+, so dividing by them is unbiased, as in Theorem 5.1. If all are below 1, each
    client's weight w_i / p_i, with w_i its share of the Shapley weights, is 1 / ``cohort_size``, and the cohort's
    weights sum to 1.

    Args:
        cohort_size: m, the number of clients per round, at least 2.
        metric: as for :class:`ShapleyImportanceSampler`.

    Raises:
        ConfigurationError: ``cohort_size`` is below 2 or, before training, above the number of clients.

    Example:
        >>> sampler = SystematicShapleySampler(cohort_size=2, metric="ssv")
        >>> contributions = {"ssv": torch.tensor([0.6, 0.1, 0.1, 0.2])}
        >>> sampler.inclusion_probabilities(4, contributions)
        tensor([1.0000, 0.2500, 0.2500, 0.5000])
        >>> sampler.sample(4, contributions, torch.Generator().manual_seed(0))
        tensor([0, 1])
    """

    def __init__(self, cohort_size: Annotated[int, Ge(2)], metric: str = "ssv") -> None:
        super().__init__(cohort_size, metric)
        self.cohort_size = cohort_size

    def sample(
        self, num_clients: int, contributions: Contributions, generator: torch.Generator, round_index: int = 0
    ) -> Tensor:
        coins = self.coins(num_clients, contributions).double()
        sure = coins > 1 - _ROUNDING
        order = torch.randperm(num_clients, generator=generator)
        order = order[~sure[order]]
        points = torch.rand((), generator=generator, dtype=torch.float64) + torch.arange(
            self.cohort_size - int(sure.sum())
        )
        ends = coins[order].cumsum(0)
        # Scaled to the number of points: rounding in the length of the line must not lose the last point.
        picked = torch.searchsorted(ends * (len(points) / ends[-1]) if len(ends) else ends, points, right=True)
        return torch.cat([sure.nonzero().flatten(), order[picked]]).sort().values

    def inclusion_probabilities(self, num_clients: int, contributions: Contributions, round_index: int = 0) -> Tensor:
        return self.coins(num_clients, contributions)
