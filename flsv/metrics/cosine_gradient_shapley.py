"""CosineGradientShapley: every participant's reputation, from the direction of its updates.

Xu et al. (NeurIPS 2021), "Gradient Driven Rewards to Guarantee Fairness in Collaborative Machine Learning" (CGSV).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flsv.arguments import check_number
from flsv.functional.cosine_gradient_shapley import (
    EPSILON,
    cohort_reputation,
    cosines,
    normalised,
    updated_reputation,
)
from flsv.metrics.base import ContributionMetric
from flsv.round import ClientMatrix


class CosineGradientShapley(ContributionMetric):
    r"""CGSV's reputations.

    .. math::
        \varphi_i = \cos(u_i, u_N), \qquad r_i \leftarrow \max(\alpha r_i + (1 - \alpha)\varphi_i, \epsilon),
        \qquad r \leftarrow r / \textstyle\sum_j r_j

    with :math:`u_i` client *i*'s update made to one length and :math:`u_N` their weighted sum. Costs two products with
    the matrix of updates: no validation data, no coalition.

    As input to ``update``: ``client_ids [k]``, ``client_updates [k, P]`` (parameters only: buffers have no gradient),
    ``num_samples [k]`` and ``aggregation_weights [k]``. In a ``FederatedLoop`` the metric is updated after
    aggregation, with the weights of that aggregation in :math:`u_N`: under :class:`flsv.aggregation.CGSV` these are
    the reputations before the round, as in the paper. ``compute`` gives ``[num_clients]``, shares that sum to 1 over
    the clients seen, NaN for clients never seen. ``diagnostics`` holds each client's last :math:`\varphi_i`.

    Where the paper, with full participation, is silent: the cohort shares out anew what its members had together, so
    absent clients keep theirs; a client that joins late starts from the mean of the known ones.

    A reputation depends on all rounds in their order, so two halves of a run cannot be merged: ``merge_state`` and a
    sync between processes are not supported, and ``forward`` updates twice.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        alpha: in [0, 1), how much of a reputation is memory.
        floor: the least reputation in a cohort, above 0.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: alpha outside [0, 1), floor not above 0.
        ValueError: shapes that do not fit, unknown or repeated client ids.

    Example:
        >>> metric = CosineGradientShapley(num_clients=4, alpha=0.5)
        >>> updates = torch.tensor([[2.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
        >>> metric.update(torch.tensor([0, 1, 3]), updates, torch.tensor([10, 10, 10]))
        >>> metric.compute()
        tensor([0.4996, 0.4996,    nan, 0.0007])
    """

    per_class = False
    full_state_update = True
    plot_lower_bound = 0.0

    reputation: Tensor
    phi: Tensor

    def __init__(self, num_clients: int | None = None, alpha: float = 0.95, floor: float = 1e-3, **kwargs: Any) -> None:
        check_number(self, "alpha", alpha, least=0, below=1)
        check_number(self, "floor", floor, above=0)
        self.alpha, self.floor = alpha, floor
        super().__init__(num_clients, None, **kwargs)

    @property
    def round_fields(self) -> dict[str, Any]:
        """Where a ``FederatedLoop`` finds the arguments of ``update``."""
        return {"client_updates": lambda round: round.matrix.until(round.space.num_parameters)}

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("reputation", torch.full((num_clients,), float("nan")), dist_reduce_fx=None)
        self.add_state("phi", torch.full((num_clients,), float("nan")), dist_reduce_fx=None)

    def update(
        self,
        client_ids: Tensor,
        client_updates: Tensor | ClientMatrix,
        num_samples: Tensor | None = None,
        aggregation_weights: Tensor | None = None,
    ) -> None:
        """Add one round; shapes ``[k]``, ``[k, P]``, ``[k]``, ``[k]``.

        Without ``num_samples`` first reputations are equal; without ``aggregation_weights`` the reputations weigh. A
        ``FederatedLoop`` gives the cohort's matrix in place of the updates, which needs no second one.
        """
        self._check_clients(client_ids)
        if isinstance(client_updates, Tensor):
            if client_updates.ndim != 2 or len(client_updates) != len(client_ids):
                raise ValueError(f"expected client_updates [k={len(client_ids)}, P], got {list(client_updates.shape)}.")
            client_updates = ClientMatrix(client_updates, [torch.zeros_like(client_updates[0])] * len(client_updates))
        samples = torch.ones_like(client_ids) if num_samples is None else num_samples
        before = cohort_reputation(self.reputation, client_ids, samples)
        weights = normalised(before) if aggregation_weights is None else aggregation_weights.double()
        norms = client_updates.norms()
        aggregate = client_updates.combine(weights.to(norms) / (norms + EPSILON))
        phi = cosines(client_updates.dot(aggregate), norms, torch.linalg.vector_norm(aggregate, dtype=torch.float64))
        after = updated_reputation(before.to(norms), phi, alpha=self.alpha, floor=self.floor)
        self.reputation, self.phi = self.reputation.clone(), self.phi.clone()
        # What the cohort has together stays the same; compute makes the whole sum to 1.
        self.reputation[client_ids] = (after * before.sum()).to(self.reputation)
        self.phi[client_ids] = phi.to(self.phi)
        self.rounds += 1

    def compute(self) -> Tensor:
        """``[num_clients]``, NaN for clients never seen."""
        return self.reputation / self.reputation.nansum()

    def diagnostics(self) -> dict[str, Tensor]:
        """Each client's last cosine with the aggregate ``[num_clients]``."""
        return {"phi": self.phi.clone()}
