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
    """Geometric median argmin_z sum_i alpha_i |z - x_i| by the smoothed Weiszfeld algorithm.

    x_i is client i's model, and alpha_i its share of the samples.

    Each step sets z to the average of the x_i with weights alpha_i / max(nu, |z - x_i|). The weights of the last step,
    scaled to sum to 1, are the clients' weights. Distances are computed over the parameters, in float64. Buffers
    (BatchNorm's statistics) are averaged with the same weights.

    The paper leaves the first z open. The plain average is not a safe choice: one update of length 1e30 moves it so far
    that ten steps do not bring it back. Here the first z is the average of the updates, each shortened to the median
    length.

    Args:
        smoothing: nu > 0, the distance below which a client's weight no longer grows.
        iterations: the largest number of steps. The paper finds 3 to be enough.
        tolerance: relative decrease of the objective below which the iteration ends.
        server_lr: the server's learning rate, see :class:`flsv.aggregation.Aggregator`.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> GeometricMedian()
        GeometricMedian()
    """

    robust = True

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
        num_parameters = round.space.num_parameters
        points = round.client_vectors[:, :num_parameters]
        global_point = round.global_vector[:num_parameters]
        sample_shares = round.num_samples.double() / round.num_samples.sum()  # alpha, [k]

        center = _mean_of_clipped(points, global_point, sample_shares)
        weights = sample_shares
        previous_objective = float("inf")
        for _ in range(self.iterations):
            distances_to_center = distances(points, center)
            objective = (sample_shares @ distances_to_center).item()
            if previous_objective - objective <= self.tolerance * objective:
                break
            previous_objective = objective
            weights = sample_shares / distances_to_center.clamp_min(self.smoothing)
            weights = weights / weights.sum()
            center = weighted_mean(points, weights)
        return weights


def _mean_of_clipped(points: Tensor, global_point: Tensor, sample_shares: Tensor) -> Tensor:
    # Updates are clipped to their median length.
    lengths = distances(points, global_point)  # [k]
    factors = (lengths.median() / lengths).nan_to_num(1)  # 0 / 0: all updates are 0
    clipped_weights = sample_shares * factors.clamp(max=1)
    mean = weighted_mean(points, clipped_weights)
    # The weight that clipping takes from the clients' points goes to the global point.
    remaining_weight = float(1 - clipped_weights.sum())
    return mean.add_(global_point, alpha=remaining_weight)
