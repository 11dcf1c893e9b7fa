"""Bucketing: another aggregator combines the means of small random groups of clients.

Karimireddy, He and Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", ICLR 2022, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flsv.aggregation.base import Aggregator
from flsv.core import Round
from flsv.core.strategy import Contributions, FederationInfo
from flsv.utilities.declared import Count


class Bucketing(Aggregator):
    """Aggregator that averages clients in random buckets and combines the means by another aggregator.

    Means of several honest clients with different data differ less than the single updates, so that robust rules do not
    mistake these clients for attackers. The last bucket may be smaller. Members of a bucket have equal weights in its
    mean. The bucket's number of samples is the sum over its members. The other aggregator gives each bucket a weight. A
    member's weight is this weight divided by the bucket's size. Metrics see the clients' single updates.

    Args:
        aggregator: the aggregator that combines the means, such as :class:`flsv.aggregation.TrimmedMean`. An aggregator
            that reads a metric, the clients' identities or their numbers of steps is refused, since a bucket has none
            of these.
        size: number of clients in a bucket, s in the paper, which is 2 in most of its experiments.

    Raises:
        ConfigurationError: an argument is out of range, or the aggregator is refused.

    Example:
        >>> from flsv.aggregation import GeometricMedian
        >>> Bucketing(GeometricMedian(), size=3).size
        3
    """

    rules = (
        (
            lambda a: (
                not (
                    a.aggregator.metric
                    or a.aggregator.sends
                    or a.aggregator.reports
                    or a.aggregator.of_clients
                )
            ),
            "it works with every client's own steps, report or contribution, which a bucket has not. Give one that "
            "looks at models only, such as TrimmedMean or GeometricMedian.",
        ),
    )

    def __init__(self, aggregator: Aggregator, size: Count = 2) -> None:
        super().__init__(server_lr=aggregator.server_lr)
        self.aggregator = aggregator
        self.size = size
        self.robust = aggregator.robust

    def begin(self, federation: FederationInfo) -> None:
        self.aggregator.begin(self._of_buckets(federation))

    def resume(self, federation: FederationInfo) -> None:
        self.aggregator.resume(self._of_buckets(federation))

    def _of_buckets(self, federation: FederationInfo) -> FederationInfo:
        return replace(federation, num_clients=-(-federation.num_clients // self.size))

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        return self.aggregate(round, contributions)[1]

    def aggregate(self, round: Round, contributions: Contributions) -> tuple[Tensor, Tensor]:
        device = round.client_vectors.device
        order = torch.randperm(len(round), generator=round.generator("buckets")).to(device)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(round), device=device) // self.size
        members = torch.bincount(place)
        means = round.client_vectors.new_zeros(len(members), round.client_vectors.shape[1])
        means.index_add_(0, place, round.client_vectors / members[place, None])
        buckets = Round(
            round_index=round.round_index,
            client_ids=torch.arange(len(members), device=device),
            num_samples=torch.zeros_like(members).index_add_(
                0, place, round.num_samples.to(members)
            ),
            global_vector=round.global_vector,
            client_vectors=means,
            space=round.space,
            seed=round.seed,
        )
        vector, weights = self.aggregator.aggregate(buckets, {})
        return vector, (weights / members)[place]

    def end_round(self, round: Round) -> None:
        self.aggregator.end_round(round)

    def state_dict(self) -> dict[str, Any]:
        return self.aggregator.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.aggregator.load_state_dict(state)
