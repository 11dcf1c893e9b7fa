"""CenteredClipping: clients' updates are clipped around the last round's step, so that no client moves it far.

Paper: Karimireddy, He and Jaggi, "Learning from History for Byzantine Robust Optimization", ICML 2021, Algorithm 2,
https://arxiv.org/abs/2012.10333
Owner: the flsv contributors
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.aggregation import Aggregator
from flsv.core import Contributions, FederationInfo, Round
from flsv.functional.distances import distances, weighted_mean
from flsv.utilities.declared import Count, Positive


class CenteredClipping(Aggregator):
    r"""Mean of the clients' updates, each clipped to the distance tau from a center v. The center is the last round's
    step, 0 before the first. In each of L iterations

    .. math::
        v \leftarrow v + \sum_k w_k (d_k - v) \min\Bigl(1, \frac{\tau}{|d_k - v|}\Bigr).

    Then the next global model is :math:`x + v`. Here x is the global model, :math:`d_k` client k's model minus x, and
    :math:`w_k` its share of the cohort's samples (in the paper 1/k). A client's weight is :math:`w_k` times the minimum
    in the last iteration. The weights sum to less than 1 if an update is clipped. Norms are those of parameters.
    Buffers (BatchNorm's statistics) are averaged with the same weights, scaled to sum to 1. In the paper, clients send
    momentum. Here they send updates. The center is the step before ``server_lr``.

    When not to use it:
        If the norm of an honest update is unknown: with a small radius all updates are clipped, and those of rare
        classes first. In a run of few rounds, since the center starts at 0.

    Args:
        radius: tau, the distance from the center above which an update is clipped, in units of the parameters.
        iterations: L, 1 in the paper's experiments.
        server_lr: the server's learning rate, see :class:`flsv.aggregation.Aggregator`.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> CenteredClipping(radius=2.0)
        CenteredClipping(radius=2.0)
    """

    robust = True
    saved = ("_center",)

    def __init__(
        self,
        radius: Positive = 10.0,
        iterations: Count = 1,
        *,
        server_lr: Positive = 1.0,
    ) -> None:
        super().__init__(server_lr=server_lr)
        self.radius = radius
        self.iterations = iterations
        self._center = torch.zeros(0)

    def begin(self, federation: FederationInfo) -> None:
        num_parameters = federation.space.num_parameters
        self._center = torch.zeros_like(federation.global_vector[:num_parameters])

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        _, weights = self._clipped_model(round)
        return weights

    def aggregate(self, round: Round, contributions: Contributions) -> tuple[Tensor, Tensor]:
        model, weights = self._clipped_model(round)
        num_parameters = round.space.num_parameters
        vector = round.combine(weights)  # its buffers are the next model's
        vector[:num_parameters] = model
        return vector, weights

    def _clipped_model(self, round: Round) -> tuple[Tensor, Tensor]:
        """Return the next global model's parameters, float64 ``[p]``, and the clients' weights ``[k]``."""
        num_parameters = round.space.num_parameters
        points = round.client_vectors[:, :num_parameters]
        global_point = round.global_vector[:num_parameters]
        sample_shares = round.num_samples.double() / round.num_samples.sum()

        model = global_point.double() + self._center.to(global_point)
        weights = sample_shares
        for _ in range(self.iterations):
            lengths = distances(points, model)
            factors = (self.radius / lengths).clamp(max=1)  # 1 up to the radius, also at length 0
            weights = sample_shares * factors
            clipped_sum = weighted_mean(points, weights)
            model = clipped_sum + (1 - weights.sum()) * model
        return model, weights

    def end_round(self, round: Round) -> None:
        assert round.server_update is not None
        num_parameters = round.space.num_parameters
        step = round.server_update[:num_parameters]  # 0 if the aggregate was not finite
        self._center = step / self.server_lr
