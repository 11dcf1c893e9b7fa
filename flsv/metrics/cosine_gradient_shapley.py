"""CosineGradientShapley: every participant's reputation, from the direction of its updates.

Xu et al. (NeurIPS 2021), "Gradient Driven Rewards to Guarantee Fairness in Collaborative Machine Learning" (CGSV).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from flsv.arguments import check_number
from flsv.errors import ConfigurationError
from flsv.functional.agreement import (
    EPSILON,
    cohort_reputation,
    cosines,
    normalised,
    updated_reputation,
)
from flsv.metrics.base import ContributionMetric
from flsv.metrics.guide import Guide
from flsv.round import ClientMatrix


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

    A reputation depends on all rounds in their order. So that two halves of a run can be merged, the rounds' cosines
    are kept (20 bytes a client and round) and played again, the earlier half's first. Rounds weighed by the reputations
    themselves, without ``aggregation_weights``, cannot follow others: their cosines depend on those. ``forward``
    updates twice.

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
        ValueError: shapes that do not fit, unknown or repeated client ids; a merge of rounds that cannot
            follow others.

    Example:
        >>> metric = CosineGradientShapley(num_clients=4, alpha=0.5)
        >>> updates = torch.tensor([[2.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
        >>> metric.update(torch.tensor([0, 1, 3]), updates, torch.tensor([10, 10, 10]))
        >>> metric.compute()
        tensor([0.4995, 0.4995,    nan, 0.0010])
    """

    per_class = False
    full_state_update = True
    over_rounds = "sum"
    plot_lower_bound = 0.0

    init: Literal["zero", "shares"] = "shares"
    reputation: Tensor
    phi: Tensor
    log: list[Tensor]

    def __init__(
        self,
        num_clients: int | None = None,
        alpha: float = 0.95,
        floor: float = 1e-3,
        init: Literal["zero", "shares"] = "zero",
        **kwargs: Any,
    ) -> None:
        check_number(self, "alpha", alpha, least=0, below=1)
        check_number(self, "floor", floor, above=0)
        if init not in ("zero", "shares"):
            raise ConfigurationError(f'{type(self).__name__}(init={init!r}): expected "zero" or "shares".')
        self.alpha, self.floor = alpha, floor
        if init != self.init:  # checkpoints of runs that had no other way are those of "shares"
            self.init = init
        super().__init__(num_clients, None, **kwargs)

    @property
    def round_fields(self) -> dict[str, Any]:
        """Where a ``FederatedLoop`` finds the arguments of ``update``."""
        return {"client_updates": lambda round: round.matrix.until(round.space.num_parameters)}

    def guide(self) -> Guide:
        return Guide(
            unit="reputation (share)",
            sign="from 0 to 1, shares that sum to 1 over the clients seen; more is better.",
            needs="the clients' updates; no validation data.",
            cost="two products with the matrix of updates; no coalition.",
        )

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("reputation", torch.full((num_clients,), float("nan")), dist_reduce_fx=None)
        self.add_state("phi", torch.full((num_clients,), float("nan")), dist_reduce_fx=None)
        # [k, 5] a round: its place among the rounds, k, and each client's number, samples and cosine. A place p is
        # -1 - p where the reputations weighed.
        self.add_state("log", [], dist_reduce_fx="cat")

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
        self._check_clients(client_ids)
        self._check_lengths(client_ids, num_samples=num_samples, aggregation_weights=aggregation_weights)
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
        memory = None if self._begins(self.reputation) else before.to(norms)
        after = updated_reputation(memory, phi, alpha=self.alpha, floor=self.floor)
        self.reputation, self.phi = self.reputation.clone(), self.phi.clone()
        # What the cohort has together stays the same; compute makes the whole sum to 1.
        self.reputation[client_ids] = (after * before.sum()).to(self.reputation)
        self.phi[client_ids] = phi.to(self.phi)
        self._remember(client_ids, before.sum(), memory is not None, phi)
        place = -1 - int(self.rounds) if aggregation_weights is None else int(self.rounds)
        columns = torch.full_like(client_ids, place), torch.full_like(client_ids, len(client_ids)), client_ids, samples
        self.log.append(torch.stack([*(column.to(self.phi) for column in columns), phi.to(self.phi)], dim=1))
        self.rounds += 1

    def _remember(self, client_ids: Tensor, mass: Tensor, memory: bool, phi: Tensor) -> None:
        """A round's own say in the reputations: the cohort's cosines as shares of what it has together. A share is then
        the sum of the rounds' own, but for the floor."""
        phi = phi.double().clamp_min(self.floor)
        new, old = (1 - self.alpha) * phi.sum(), self.alpha if memory else 0.0
        share = mass.to(phi) * phi / phi.sum()
        self._note(client_ids, share, (new / (new + old)).to(self.phi), (old / (new + old)).to(self.phi))

    def _begins(self, reputation: Tensor) -> bool:
        """Whether a round has nothing to remember."""
        return self.init == "zero" and bool(reputation.isnan().all())

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Take in the rounds of another metric, or of its state; they count as earlier than this one's."""
        self._check_merge(incoming_state)
        earlier = incoming_state.metric_state if isinstance(incoming_state, Metric) else incoming_state
        self._play([*earlier["log"], *self.log])

    def _sync_dist(self, *args: Any, **kwargs: Any) -> None:
        kept = ("reputation", "phi", "log", "rounds", "round_spread", "noted")
        mine = {name: getattr(self, name) for name in kept}
        self.log = self.log or [self.phi.new_zeros(0, 5)]
        super()._sync_dist(*args, **kwargs)
        log = dim_zero_cat(self.log)
        for name, state in mine.items():  # where they cannot be played, all stays as it was
            setattr(self, name, state)
        self._play([log])

    def _play(self, log: list[Tensor]) -> None:
        """Set the state to what it is after these rounds."""
        rows = torch.cat([self.phi.new_zeros(0, 5), *log])
        reputation = torch.full((self.num_clients or 0,), float("nan"), dtype=self.phi.dtype, device=self.phi.device)
        phi = reputation.clone()
        rounds: list[Tensor] = []
        said: list[tuple[Tensor, Tensor, bool, Tensor]] = []
        while len(rows):
            size, place = int(rows[0, 1]), int(rows[0, 0])
            this, rows = rows[:size].clone(), rows[size:]
            if place < 0 and -1 - place != len(rounds):
                raise ValueError(
                    "CosineGradientShapley: a round without aggregation_weights was weighed by the reputations before "
                    "it, and in a merge these would be others. Pass aggregation_weights to update."
                )
            this[:, 0] = -1 - len(rounds) if place < 0 else len(rounds)
            ids, samples, cosine = this[:, 2].long(), this[:, 3], this[:, 4]
            before = cohort_reputation(reputation, ids, samples)
            memory = None if self._begins(reputation) else before
            after = updated_reputation(memory, cosine, alpha=self.alpha, floor=self.floor)
            reputation[ids] = (after * before.sum()).to(reputation)
            phi[ids] = cosine
            said.append((ids, before.sum(), memory is not None, cosine))
            rounds.append(this)
        self.reputation, self.phi, self.log = reputation, phi, rounds
        self.rounds = torch.full_like(self.rounds, len(rounds))
        self.round_spread, self.noted = torch.zeros_like(self.round_spread), torch.zeros_like(self.noted)
        for each in said:
            self._remember(*each)
        self._computed = None

    def compute(self) -> Tensor:
        """``[num_clients]``, NaN for clients never seen."""
        return self.reputation / self.reputation.nansum()

    def diagnostics(self) -> dict[str, Tensor]:
        """Each client's last cosine with the aggregate ``[num_clients]``."""
        return {"phi": self.phi.clone()}
