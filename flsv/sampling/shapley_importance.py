"""ShapleyImportanceSampler: AFedSV+'s importance sampling by Shapley values.

Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, theorem 5.1.
"""

from __future__ import annotations

from typing import Literal

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
    among = ClientSampler.among  # raises an error: this sampler draws by the metric's values

    def __init__(
        self,
        expected_cohort: Positive,
        metric: str = "ssv",
        min_cohort: Literal[1, 2] = 2,
    ) -> None:
        super().__init__(expected_cohort, min_cohort)
        self.metric: str = metric

    def coins(self, num_clients: int, contributions: Contributions) -> Tensor:
        values = contributions.get(self.metric)
        if values is None:
            return super().coins(num_clients, contributions)
        weights = nan_to_mean(values.cpu()).clamp_min(0)
        probabilities = importance_probabilities(weights, self.expected_cohort)
        num_possible = int((probabilities > 0).sum())
        if num_possible < self.min_cohort:
            # All other clients have weight 0, so that a draw would never have enough clients.
            return super().coins(num_clients, contributions)
        return probabilities
