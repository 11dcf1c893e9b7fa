"""CGSV's aggregation: normalized updates, weighted by reputation.

Xu et al., "Gradient Driven Rewards to Guarantee Fairness in Collaborative Machine Learning", NeurIPS 2021,
Algorithm 1. The reward that completes the algorithm is :class:`flsv.personalization.SparsifiedReward`.
"""

from __future__ import annotations

from torch import Tensor

from flsv.aggregation.base import Aggregator
from flsv.core import Round
from flsv.core.strategy import Contributions
from flsv.functional.cgsv import EPSILON, cohort_reputation
from flsv.utilities.declared import Positive


class CGSV(Aggregator):
    """CGSV's aggregator x + sum_i r_i u_i. Here x is the global model, r_i the reputation of client i and u_i = scale
    d_i / |d_i| its normalized update.

    The r_i are the reputations after the previous round. In the first round they are the clients' shares of the
    samples. The global model moves by at most ``scale``, however long the clients' updates are. With
    :class:`flsv.personalization.SparsifiedReward` the algorithm is complete: ``configs/cgsv.yaml``. Buffers
    (BatchNorm's statistics) have no gradient: they are averaged with weights r.

    Choices that the paper, which has full participation, leaves open: the cohort's reputations are scaled to sum to 1.
    A client without a reputation gets the mean of the others' reputations.

    Args:
        metric: the name of a :class:`flsv.metrics.CosineGradientShapley` among the loop's metrics.
        scale: length of a normalized update, the paper's Gamma. It is the step size of the global model: choose about
            the length of the clients' updates.
        server_lr: the server's learning rate, see :class:`flsv.aggregation.Aggregator`.

    Raises:
        ConfigurationError: the scale is not above 0.

    Example:
        >>> CGSV(scale=0.5)
        CGSV(scale=0.5)
    """

    metric_shape = ("n",)

    def __init__(
        self,
        metric: str = "cgsv",
        scale: Positive = 1.0,
        *,
        server_lr: Positive = 1.0,
    ) -> None:
        super().__init__(server_lr=server_lr)
        self.metric: str = metric
        self.scale = scale

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        merits = cohort_reputation(
            reputation=contributions.get(self.metric),
            client_ids=round.client_ids,
            num_samples=round.num_samples,
        )
        return merits / merits.sum()

    def aggregate(self, round: Round, contributions: Contributions) -> tuple[Tensor, Tensor]:
        weights = self.weights(round, contributions).to(round.client_vectors)
        vector = round.combine(weights)  # for the buffers
        num_parameters = round.space.num_parameters
        # Updates are scaled to one length.
        parameters = round.matrix.first_columns(num_parameters)
        norms = parameters.norms() + EPSILON
        factors = self.scale * weights.double() / norms
        step = parameters.combine(factors)
        vector[:num_parameters] = round.global_vector[:num_parameters] + step
        return vector, weights
