"""Bucketing: another aggregator combines the means of small random groups of clients.

Karimireddy, He and Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", ICLR 2022, Algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flsv.aggregation.base import Aggregator
from flsv.core import Round
from flsv.core.strategy import Contributions, FederationInfo
from flsv.utilities.declared import Count


def _works_per_client(aggregator: Aggregator) -> bool:
    """Return whether an aggregator uses values of single clients, such as steps, reports or contributions."""
    if aggregator.metric or aggregator.of_clients:
        return True
    return bool(aggregator.sends or aggregator.reports)


class Bucketing(Aggregator):
    """Aggregator that averages clients in random buckets and combines the means by another aggregator.

    Means of several honest clients with different data differ less than the single updates, so that robust rules do not
    mistake these clients for attackers. The last bucket may be smaller. Members of a bucket have equal weights in its
    mean. The bucket's number of samples is the sum over its members. The other aggregator gives each bucket a weight. A
    member's weight is this weight divided by the bucket's size. Metrics see the clients' single updates.

    Args:
        aggregator: the aggregator that combines the means, such as :class:`flsv.aggregation.TrimmedMean`. An aggregator
            that reads a metric, the clients' ids or their numbers of steps raises an error, since a bucket has none of
            these.
        size: number of clients in a bucket, s in the paper, which is 2 in most of its experiments.

    Raises:
        ConfigurationError: an argument is out of range, or the aggregator uses values of single clients.

    Example:
        >>> from flsv.aggregation import GeometricMedian
        >>> Bucketing(GeometricMedian(), size=3).size
        3
    """

    rules = (
        (
            lambda arguments: not _works_per_client(arguments.aggregator),
            "the aggregator uses values of single clients (steps, reports or contributions), which a bucket does not "
            "have. Choose an aggregator that uses models only, such as TrimmedMean or GeometricMedian.",
        ),
    )

    def __init__(self, aggregator: Aggregator, size: Count = 2) -> None:
        super().__init__(server_lr=aggregator.server_lr)
        self.aggregator = aggregator
        self.size = size
        self.robust = aggregator.robust

    def set_up(self, federation: FederationInfo) -> None:
        self.aggregator.set_up(self._of_buckets(federation))

    def begin(self, federation: FederationInfo) -> None:
        self.aggregator.begin(self._of_buckets(federation))

    def resume(self, federation: FederationInfo) -> None:
        self.aggregator.resume(self._of_buckets(federation))

    def _of_buckets(self, federation: FederationInfo) -> FederationInfo:
        num_buckets = math.ceil(federation.num_clients / self.size)
        return replace(federation, num_clients=num_buckets)

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        _, weights = self.aggregate(round, contributions)
        return weights

    def aggregate(self, round: Round, contributions: Contributions) -> tuple[Tensor, Tensor]:
        bucket_of_client = self._draw_buckets(round)
        sizes = torch.bincount(bucket_of_client)
        buckets = _means_of_buckets(round, bucket_of_client, sizes)
        vector, weights = self.aggregator.aggregate(buckets, {})
        weights_of_members = weights / sizes
        return vector, weights_of_members[bucket_of_client]

    def _draw_buckets(self, round: Round) -> Tensor:
        device = round.client_vectors.device
        num_clients = len(round)
        generator = round.generator("buckets")
        order = torch.randperm(num_clients, generator=generator).to(device)
        # The first `size` clients of the permutation form bucket 0, and so on.
        bucket_of_client = torch.empty_like(order)
        bucket_of_client[order] = torch.arange(num_clients, device=device) // self.size
        return bucket_of_client

    def end_round(self, round: Round) -> None:
        self.aggregator.end_round(round)

    def state_dict(self) -> dict[str, Any]:
        return self.aggregator.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.aggregator.load_state_dict(state)


def _means_of_buckets(round: Round, bucket_of_client: Tensor, sizes: Tensor) -> Round:
    num_buckets = len(sizes)
    shares = round.client_vectors / sizes[bucket_of_client, None]
    means = shares.new_zeros(num_buckets, shares.shape[1])
    means.index_add_(0, bucket_of_client, shares)
    num_samples = torch.zeros_like(sizes)
    num_samples.index_add_(0, bucket_of_client, round.num_samples.to(sizes))
    return Round(
        round_index=round.round_index,
        client_ids=torch.arange(num_buckets, device=shares.device),
        num_samples=num_samples,
        global_vector=round.global_vector,
        client_vectors=means,
        space=round.space,
        seed=round.seed,
    )
