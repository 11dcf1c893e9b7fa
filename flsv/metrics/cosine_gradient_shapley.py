"""CosineGradientShapley: the clients' reputations of CGSV, from the direction of their updates.

Xu et al., "Gradient Driven Rewards to Guarantee Fairness in Collaborative Machine Learning", NeurIPS 2021.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flsv.core import ClientMatrix
from flsv.functional.cgsv import cohort_reputation, normalized, updated_reputation
from flsv.metrics.base import ContributionMetric, cosines_with_sum, parameters_of
from flsv.utilities.declared import Momentum, Positive


class CosineGradientShapley(ContributionMetric):
    r"""CGSV's reputations: how well each client's updates point where the cohort's go.

    .. math::
        \varphi_i = \cos(u_i, u_N), \qquad r_i \leftarrow \max(\alpha r_i + (1 - \alpha)\varphi_i, \epsilon),
        \qquad r \leftarrow r / \textstyle\sum_j r_j

    with :math:`u_i` client *i*'s update made to one length and :math:`u_N` their weighted sum. Costs two products with
    the matrix of updates: no validation data, no coalition.

    As input to ``update``: ``client_ids [k]``, ``client_updates [k, P]`` (parameters only: buffers have no gradient),
    ``num_samples [k]`` and ``aggregation_weights [k]``. In a ``FederatedLoop`` the metric is updated after
    aggregation, with the weights of that aggregation in :math:`u_N`: under :class:`flsv.aggregation.CGSV` these are
    the reputations before the round, as in the paper, and data shares in the first. ``compute`` gives
    ``[num_clients]``, shares that sum to 1 over the clients seen, NaN for clients never seen. ``diagnostics`` holds
    each client's last :math:`\varphi_i`.

    Where the paper, with full participation, is silent: the cohort shares out anew what its members had together, so
    absent clients keep theirs; a client that joins late starts from the mean of the known ones.

    A reputation depends on all rounds in their order, so that parts of a run cannot be merged, nor two processes'
    rounds synchronized: that is refused. ``forward`` updates twice.

    When not to use it:
        To pay by: it is a share of directions, and does not say by how much a model has improved. Where somebody's data
        are rare and right: whoever differs from the majority has a low reputation. With a majority that errs.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        alpha: in [0, 1), how much of a reputation is memory.
        floor: the least reputation in a cohort, above 0.
        init: what the reputations remember in the first round: ``"zero"``, as in the authors' code, where they are
            :math:`\varphi / \sum_j \varphi_j` after it, or ``"shares"``: they start from the data shares, which alpha
            keeps for many rounds.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: alpha outside [0, 1), floor not above 0, another ``init``.
        ValueError: shapes that do not fit, unknown or repeated client ids; a merge.

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
    to_pay_by = False
    full_state_update = True
    mergeable = False
    #: Where a ``FederatedLoop`` finds the arguments of ``update``.
    round_fields: ClassVar[dict[str, Any]] = {"client_updates": parameters_of}
    over_rounds = "sum"
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
        self.alpha, self.floor, self.init = alpha, floor, init
        super().__init__(num_clients, None, **kwargs)

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

        Without ``num_samples`` the shares of the first round are equal; without ``aggregation_weights`` the reputations
        weigh. A ``FederatedLoop`` gives the cohort's matrix in place of the updates, which needs no second one.
        """
        matrix = self._matrix(client_ids, client_updates)
        samples = torch.ones_like(client_ids) if num_samples is None else num_samples
        before = cohort_reputation(self.reputation, client_ids, samples)
        weights = normalized(before) if aggregation_weights is None else aggregation_weights.double()
        norms = matrix.norms()
        phi = cosines_with_sum(matrix, norms, weights.to(norms))
        begins = self.init == "zero" and bool(self.reputation.isnan().all())  # with nothing to remember
        after = updated_reputation(None if begins else before.to(phi.device), phi, alpha=self.alpha, floor=self.floor)
        self.reputation, self.phi = self.reputation.clone(), self.phi.clone()
        # What the cohort has together stays the same; compute makes the whole sum to 1.
        self.reputation[client_ids] = (after * before.sum()).to(self.reputation)
        self.phi[client_ids] = phi.to(self.phi)
        # The round's own say: the cohort's cosines as shares of what it has together. A share is then the sum of the
        # rounds' own, but for the floor.
        phi = phi.double().clamp_min(self.floor)
        new, old = (1 - self.alpha) * phi.sum(), 0.0 if begins else self.alpha
        share = before.sum().to(phi) * phi / phi.sum()
        self.note_round(client_ids, share, (new / (new + old)).to(self.phi), (old / (new + old)).to(self.phi))

    def compute(self) -> Tensor:
        """``[num_clients]``, NaN for clients never seen."""
        return self.reputation / self.reputation.nansum()

    def diagnostics(self) -> dict[str, Tensor]:
        """Each client's last cosine with the aggregate ``[num_clients]``."""
        return {"phi": self.phi.clone()}
