"""Aggregators that bound what a few clients can do.

TrimmedMean, coordinate by coordinate: in each entry the largest and the smallest values do not count.

Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML
2018, Definition 2.

GeometricMedian (RFA): the geometric median of the clients' models, which a minority of bad models cannot move far.

Pillutla, Kakade and Harchaoui, "Robust Aggregation for Federated Learning", IEEE TSP 2022, Algorithm 2.

Bucketing: another aggregator is given means of a few random clients each, instead of the clients' own models.

Karimireddy, He and Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", ICLR 2022, Algorithm 1.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Annotated, Any

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from flsv.aggregation.base import Aggregator
from flsv.core import Round
from flsv.core.strategy import Contributions, Federation
from flsv.functional.distances import distances, weighted_mean
from flsv.utilities.arguments import rounded_up
from flsv.utilities.declared import Count, NonNegative, Positive
from flsv.utilities.errors import ConfigurationError


class TrimmedMean(Aggregator):
    """In each entry the mean of the clients' values without the b largest and the b smallest, b = floor(trim * k).

    Clients count alike, whatever their samples, as in the paper. A client's weight is its share of the values that
    were averaged. Buffers (BatchNorm's statistics) are averaged with these weights. A cohort that is too small for
    anybody to be left out is averaged whole, and a warning says so.

    Args:
        trim: the paper's beta in [0, 0.5): the share of the cohort that is left out at either end, at least that of bad
            clients.
        server_lr: see :class:`flsv.aggregation.Aggregator`.

    Raises:
        ConfigurationError: an argument out of range; before training, a trim above 0 that leaves out nobody.

    Example:
        >>> TrimmedMean(trim=0.3)
        TrimmedMean(trim=0.3)
    """

    def __init__(self, trim: Annotated[float, Ge(0), Lt(0.5)] = 0.2, *, server_lr: Positive = 1.0) -> None:
        super().__init__(server_lr=server_lr)
        self.trim = trim

    def begin(self, federation: Federation) -> None:
        clients = federation.num_clients
        if self.trim > 0 and not self._cut(clients):
            way = f"The least trim that does is {rounded_up(1 / clients)}" if clients > 2 else "It takes 3 clients"
            raise ConfigurationError(f"{self!r} leaves out nobody of {clients} clients. {way}; 0 is the plain mean.")

    def _cut(self, clients: int) -> int:
        return int(self.trim * clients + 1e-9)  # 0.3 * 10 is 2.9999...

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        return self._trimmed(round)[1]

    def aggregate(self, round: Round, contributions: Contributions) -> tuple[Tensor, Tensor]:
        trimmed, weights = self._trimmed(round)
        vector = round.combine(weights.to(round.client_vectors))
        vector[: round.space.num_parameters] = trimmed
        return vector, weights

    def _trimmed(self, round: Round) -> tuple[Tensor, Tensor]:
        """The parameters, and the clients' shares ``[k]`` in them."""
        clients, cut = len(round), self._cut(len(round))
        if self.trim > 0 and not cut:
            warnings.warn(
                f"in round {round.round_index + 1} {self!r} is the plain mean: of {clients} clients none is left out. "
                f"Draw at least {math.ceil(1 / self.trim)} clients a round.",
                stacklevel=2,
            )
        rows, end = round.client_vectors, round.space.num_parameters
        result, shares = rows.new_empty(end), torch.zeros(clients, dtype=torch.float64, device=rows.device)
        for block in round.matrix.blocks(end):
            values, order = rows[:, block].sort(dim=0, stable=True)
            result[block] = values[cut : clients - cut].mean(0)
            shares += torch.bincount(order[cut : clients - cut].flatten(), minlength=clients)
        return result, shares / shares.sum()


class GeometricMedian(Aggregator):
    """argmin_z sum_i alpha_i |z - x_i| by the smoothed Weiszfeld algorithm, alpha_i the share of samples.

    Each step is a weighted average with weights alpha_i / max(nu, |z - x_i|), so the result is one, too, and its
    weights are what is reported. Distances are those of the parameters, in float64; buffers (BatchNorm's statistics)
    are averaged with the same weights.

    The paper leaves the first z open. The plain average would do where nobody lies; but one update of 1e30 takes it
    along, and ten steps do not bring it back. So z is the average of updates none of which is longer than the median
    one.

    Args:
        smoothing: nu > 0, the distance below which a client's pull no longer grows.
        iterations: the most steps taken; the paper finds 3 to be enough.
        tolerance: stop when the objective falls by less than this share.
        server_lr: see :class:`flsv.aggregation.Aggregator`.

    Raises:
        ConfigurationError: an argument out of range.

    Example:
        >>> GeometricMedian()
        GeometricMedian()
    """

    def __init__(
        self,
        smoothing: Positive = 1e-6,
        iterations: Count = 10,
        tolerance: NonNegative = 1e-6,
        *,
        server_lr: Positive = 1.0,
    ) -> None:
        super().__init__(server_lr=server_lr)
        self.smoothing = smoothing
        self.iterations = iterations
        self.tolerance = tolerance

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        cut = round.space.num_parameters
        points, start = round.client_vectors[:, :cut], round.global_vector[:cut]
        alpha = round.num_samples.double() / round.num_samples.sum()
        lengths = distances(points, start)
        clipped = alpha * (lengths.median() / lengths).nan_to_num(1).clamp(max=1)  # 0 / 0: nobody has moved
        center = weighted_mean(points, clipped).add_(start, alpha=float(1 - clipped.sum()))
        weights, before = alpha, float("inf")
        for _ in range(self.iterations):
            away = distances(points, center)
            objective = (alpha @ away).item()
            if before - objective <= self.tolerance * objective:
                break
            before = objective
            weights = alpha / away.clamp_min(self.smoothing)
            weights = weights / weights.sum()
            center = weighted_mean(points, weights)
        return weights


class Bucketing(Aggregator):
    """Shuffles the cohort, averages ``size`` clients at a time, and has another aggregator combine the averages.

    Honest clients with different data look less different that way, so that robust rules do not take them for
    attackers. The last bucket holds those who are left. Members of a bucket count alike; a bucket has the samples of
    all its members. A client's weight is its part of its bucket's. Metrics see the clients' own updates.

    Args:
        aggregator: of the buckets, such as :class:`flsv.aggregation.TrimmedMean`. One that reads a metric, or asks who
            its clients are or how many steps they took, is refused: a bucket has neither.
        size: the paper's s, clients in a bucket: 2 in most of its experiments.

    Raises:
        ConfigurationError: an argument out of range, or such an aggregator.

    Example:
        >>> from flsv.aggregation import GeometricMedian
        >>> Bucketing(GeometricMedian(), size=3).size
        3
    """

    rules = (
        (
            lambda a: (
                not (a.aggregator.metric or a.aggregator.sends or a.aggregator.reports or a.aggregator.of_clients)
            ),
            "it works with every client's own steps, report or contribution, which a bucket has not. Give one that "
            "looks at models only, such as TrimmedMean or GeometricMedian.",
        ),
    )

    def __init__(self, aggregator: Aggregator, size: Count = 2) -> None:
        super().__init__(server_lr=aggregator.server_lr)
        self.aggregator = aggregator
        self.size = size

    def begin(self, federation: Federation) -> None:
        self.aggregator.begin(self._of_buckets(federation))

    def resume(self, federation: Federation) -> None:
        self.aggregator.resume(self._of_buckets(federation))

    def _of_buckets(self, federation: Federation) -> Federation:
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
            num_samples=torch.zeros_like(members).index_add_(0, place, round.num_samples.to(members)),
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
