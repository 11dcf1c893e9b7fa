"""SoftmaxSampler (S-FedAvg): relevant clients are drawn more often.

Nagalapatti and Narayanam, "Game of Gradients: Mitigating Irrelevant Clients in Federated Learning", AAAI 2021,
Algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.core.strategy import Contributions
from flsv.functional.nan_to_mean import nan_to_mean
from flsv.sampling.base import ClientSampler
from flsv.utilities.declared import Count, Positive


class SoftmaxSampler(ClientSampler):
    """Sampler that draws ``cohort_size`` clients without replacement, with probabilities softmax(relevance /
    temperature).

    Args:
        cohort_size: number of clients per round.
        metric: the name of one of the loop's metrics with one value per client, ``[n]``, which is used as the
            relevance. Before its first value all clients are equally likely. A client that never took part gets the
            metric's ``prior`` or, if there is no prior, the mean of the other clients' values.
        temperature: divisor of the relevance. 1 in the paper. Shapley values in units of accuracy are a few hundredths:
            at 1 they have hardly any effect. At 0.1 a client with a value larger by 0.01 is 10 % more likely to be
            drawn first.

    Raises:
        ConfigurationError: the cohort size is below 1 or above the number of clients, or the temperature is not
            positive.

    Example:
        >>> SoftmaxSampler(2, metric="sv").sample(5, {}, torch.Generator().manual_seed(0)).shape
        torch.Size([2])
    """

    metric_shape = ("n",)

    def __init__(
        self,
        cohort_size: Count,
        metric: str = "sv",
        temperature: Positive = 1.0,
    ) -> None:
        self.cohort_size = cohort_size
        self.temperature = temperature
        self.metric: str = metric

    def first_draw_probabilities(self, num_clients: int, contributions: Contributions) -> Tensor:
        """Compute each client's probability ``[n]`` to be drawn first."""
        relevance = contributions.get(self.metric)
        if relevance is None:
            relevance = torch.zeros(num_clients)
        else:
            relevance = nan_to_mean(relevance.cpu())
        scores = relevance.double() / self.temperature
        return scores.softmax(0)

    def sample(
        self,
        num_clients: int,
        contributions: Contributions,
        generator: torch.Generator,
        round_index: int = 0,
    ) -> Tensor:
        probabilities = self.first_draw_probabilities(num_clients, contributions)
        return probabilities.multinomial(self.cohort_size, generator=generator).sort().values

    def inclusion_probabilities(
        self,
        num_clients: int,
        contributions: Contributions,
        round_index: int = 0,
    ) -> Tensor:
        """Estimate the probabilities ``[n]`` from 4096 draws, since they have no closed form."""
        num_draws = 4096
        probabilities = self.first_draw_probabilities(num_clients, contributions)
        generator = torch.Generator().manual_seed(0)
        cohorts = probabilities.expand(num_draws, -1).multinomial(
            self.cohort_size, generator=generator
        )
        counts = torch.bincount(cohorts.flatten(), minlength=num_clients)
        return counts.float() / num_draws
