"""RFA: the geometric median of the clients' models, which a minority of bad ones cannot move far.

Pillutla, Kakade and Harchaoui, "Robust Aggregation for Federated Learning", IEEE TSP 2022, Algorithm 2.
"""

from __future__ import annotations

from torch import Tensor

from flsv.aggregation.base import Aggregator
from flsv.errors import ConfigurationError
from flsv.round import Round
from flsv.strategy import Contributions


class GeometricMedian(Aggregator):
    """argmin_z sum_i alpha_i |z - x_i| by the smoothed Weiszfeld algorithm, alpha_i the share of samples.

    Each step is a weighted average with weights alpha_i / max(nu, |z - x_i|), so the result is one, too, and its
    weights are what is reported.

    Args:
        smoothing: nu > 0, the distance below which a client's pull no longer grows.
        iterations: the most steps taken; the paper finds 3 to be enough.
        tolerance: stop when the objective falls by less than this share.

    Raises:
        ConfigurationError: an argument out of range.

    Example:
        >>> GeometricMedian()
        GeometricMedian(smoothing=1e-06, iterations=10, tolerance=1e-06)
    """

    def __init__(self, smoothing: float = 1e-6, iterations: int = 10, tolerance: float = 1e-6) -> None:
        if smoothing <= 0 or iterations < 1 or tolerance < 0:
            raise ConfigurationError(
                f"GeometricMedian(smoothing={smoothing}, iterations={iterations}, tolerance={tolerance}): expected "
                "smoothing > 0, iterations >= 1 and tolerance >= 0."
            )
        self.smoothing, self.iterations, self.tolerance = smoothing, iterations, tolerance

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        points = round.client_vectors
        alpha = round.num_samples.to(points) / round.num_samples.sum()
        weights, before = alpha, float("inf")
        for _ in range(self.iterations):
            distances = (points - weights @ points).norm(dim=1)
            objective = (alpha * distances).sum().item()
            if before - objective <= self.tolerance * objective:
                break
            before = objective
            weights = alpha / distances.clamp_min(self.smoothing)
            weights = weights / weights.sum()
        return weights
