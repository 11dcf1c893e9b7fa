"""CosineGradientShapley: the clients' reputations of CGSV, from the direction of their updates.

Xu et al., "Gradient Driven Rewards to Guarantee Fairness in Collaborative Machine Learning", NeurIPS 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flsv.core import ClientMatrix, Round
from flsv.functional.cgsv import EPSILON, cohort_reputation, cosines, normalized, updated_reputation
from flsv.metrics.base import ContributionMetric
from flsv.utilities.declared import Momentum, Positive


def parameters_of(round: Round) -> ClientMatrix:
    """Return the round's updates ``[k, P]`` without buffers."""
    return round.matrix.first_columns(round.space.num_parameters)


def cosines_with_sum(
    matrix: ClientMatrix, norms: Tensor, weights: Tensor, epsilon: float = EPSILON
) -> Tensor:
    """Scale updates to length 1, and compute their cosines ``[k]`` with their weighted sum."""
    weighted_sum = matrix.combine(weights / (norms + epsilon))
    norm_of_sum = torch.linalg.vector_norm(weighted_sum, dtype=torch.float64)
    return cosines(matrix.dot(weighted_sum), norms, norm_of_sum)


class CosineGradientShapley(ContributionMetric):
    r"""CGSV's reputations. They measure how well the direction of a client's updates agrees with the aggregate's.

    .. math::
        \varphi_i = \cos(u_i, u_N), \qquad r_i \leftarrow \max(\alpha r_i + (1 - \alpha)\varphi_i, \epsilon),
        \qquad r \leftarrow r / \textstyle\sum_j r_j

    with :math:`u_i` client *i*'s update scaled to length 1, :math:`u_N` the weighted sum of these, :math:`r_i` its
    reputation and :math:`\epsilon` the ``floor``.

    In a ``FederatedLoop`` the metric is updated after aggregation, with the weights of that aggregation in :math:`u_N`:
    with :class:`flsv.aggregation.CGSV` these weights are the reputations before the round, as in the paper, and in the
    first round the clients' shares of the samples. ``compute`` gives ``[num_clients]``, shares that sum to 1 over the
    clients seen, NaN for clients that never took part. ``diagnostics`` returns each client's last :math:`\varphi_i`.

    The paper has full participation only. Here a round redistributes the sum of its clients' reputations among them, so
    that absent clients keep their reputations. A client that joins late starts from the mean of the known reputations.

    A reputation depends on the order of all rounds. Merging parts of a run, or a sync between processes, therefore
    raises an error, and ``forward`` calls ``update`` twice.

    When not to use it:
        For payment: it compares directions, and does not measure by how much a model has improved. Where some clients'
        data are rare and correct, or the majority is wrong.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``.
        alpha: in [0, 1), the weight of the previous reputation.
        floor: the smallest reputation before normalization, above 0.
        init: the reputations before the first round: ``"zero"``, as in the authors' code, where the first round gives
            :math:`\varphi / \sum_j \varphi_j`, or ``"shares"``, the clients' shares of the samples, which an alpha near
            1 preserves for many rounds.
        kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: ``alpha`` is outside [0, 1), ``floor`` is not above 0, or ``init`` is unknown.
        ValueError: shapes do not fit, or client ids are unknown or repeated, metrics are merged.

    Example:
        >>> metric = CosineGradientShapley(num_clients=4, alpha=0.5)
        >>> updates = torch.tensor([[2.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
        >>> metric.update(torch.tensor([0, 1, 3]), updates, torch.tensor([10, 10, 10]))
        >>> metric.compute()
        tensor([0.4995, 0.4995,    nan, 0.0010])
    """

    unit = "reputation (share)"
    sign = "from 0 to 1, shares that sum to 1 over the clients seen; more is better."
    cost = "two products with the matrix of updates; no coalition."
    per_class = False
    claims = ("agreement", "weight")
    to_pay_by = False
    full_state_update = True
    mergeable = False
    #: Functions ``{argument: f(round)}`` with which a ``FederatedLoop`` computes arguments of ``update``.
    round_fields: ClassVar[dict[str, Any]] = {"client_updates": parameters_of}
    needs: Sequence[str] | None = ("matrix", "space")
    plot_lower_bound = 0.0

    reputation: Tensor
    phi: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        alpha: Momentum = 0.95,
        floor: Positive = 1e-3,
        init: Literal["zero", "shares"] = "zero",
        **kwargs: Any,
    ) -> None:
        self.alpha = alpha
        self.floor = floor
        self.init = init
        super().__init__(num_clients, num_classes=None, **kwargs)

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        no_values = torch.full((num_clients,), torch.nan)
        self.add_state("reputation", no_values, dist_reduce_fx=None)
        self.add_state("phi", no_values.clone(), dist_reduce_fx=None)

    def update(
        self,
        client_ids: Tensor,
        client_updates: Tensor | ClientMatrix,
        num_samples: Tensor | None = None,
        aggregation_weights: Tensor | None = None,
    ) -> None:
        """Update the states with one round.

        Args:
            client_ids: ``[k]``, the round's clients.
            client_updates: ``[k, P]``, the clients' updates of the P parameters (without buffers). A ``FederatedLoop``
                passes the round's :class:`ClientMatrix`, without a copy.
            num_samples: ``[k]``, the clients' numbers of samples, whose shares replace the reputations in the first
                round. None: equal shares.
            aggregation_weights: ``[k]``, the clients' weights in the round's aggregation. None: the reputations are the
                weights.
        """
        matrix = self._matrix(client_updates)
        if num_samples is None:
            num_samples = torch.ones_like(client_ids)
        reputation_before = cohort_reputation(self.reputation, client_ids, num_samples)
        if aggregation_weights is None:
            weights = normalized(reputation_before)
        else:
            weights = aggregation_weights.double()
        norms = matrix.norms()
        phi = cosines_with_sum(matrix, norms, weights.to(norms))  # [k]
        reputation_after = self._updated_reputation(reputation_before, phi)

        # The sum of the reputations of the round's clients does not change. `compute` normalizes the sum over all
        # clients to 1.
        with_equal_sum = reputation_after * reputation_before.sum()
        self.reputation = self.reputation.clone()
        self.reputation[client_ids] = with_equal_sum.to(self.reputation)
        self.phi = self.phi.clone()
        self.phi[client_ids] = phi.to(self.phi)

    def _updated_reputation(self, reputation: Tensor, phi: Tensor) -> Tensor:
        is_first_round = bool(self.reputation.isnan().all())
        starts_at_zero = self.init == "zero" and is_first_round
        return updated_reputation(
            None if starts_at_zero else reputation.to(phi.device),
            phi,
            alpha=self.alpha,
            floor=self.floor,
        )

    def compute(self) -> Tensor:
        """Compute the reputations ``[num_clients]``, which sum to 1. NaN for clients that never took part."""
        return self.reputation / self.reputation.nansum()

    def diagnostics(self) -> dict[str, Tensor]:
        """Return ``phi [num_clients]``, each client's cosine with the aggregate in its last round."""
        return {"phi": self.phi.clone()}
