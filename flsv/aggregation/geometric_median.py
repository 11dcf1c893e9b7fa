"""GeometricMedian (RFA): the geometric median of the clients' models, which a minority cannot move far.

Pillutla, Kakade and Harchaoui, "Robust Aggregation for Federated Learning", IEEE TSP 2022, Algorithm 2.
"""

from __future__ import annotations

from torch import Tensor

from flsv.aggregation.base import Aggregator
from flsv.core import Round
from flsv.core.strategy import Contributions
from flsv.functional.distances import distances, weighted_mean
from flsv.utilities.declared import Count, NonNegative, Positive


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
