"""PrivacyLoss: the epsilon that each client has spent so far.

:class:`flsv.privacy.GaussianPrivacy` explains what epsilon bounds.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from flsv.data.groups import client_called
from flsv.metrics.base import ContributionMetric
from flsv.privacy.gaussian import GaussianPrivacy


class PrivacyLoss(ContributionMetric):
    r"""The epsilon that each client has spent so far.

    .. math::
        \epsilon_i = \epsilon\bigl(T_i; \text{clip}, \text{noise}, \delta\bigr)

    with :math:`T_i` the number of rounds in which client *i* took part.

    ``compute`` gives ``[num_clients]``, infinite if no noise is added, NaN for clients that never took part.
    ``diagnostics`` returns :math:`T_i` and, if the mechanism has a ``max_epsilon``, the number of rounds that each
    client can still afford, both ``[num_clients]``. A ``FederatedLoop`` with ``privacy`` adds this metric under the
    name ``"epsilon"``.

    When not to use it:
        As a contribution, or to compare runs with different deltas: it bounds the information in updates, and does not
        measure the success of an attack.

    Args:
        privacy: the mechanism that the clients apply to their updates.
        num_clients: n, the number of clients. None inside a ``FederatedLoop``, which takes it from the data.
        kwargs: further arguments of ``torchmetrics.Metric``.

    Raises:
        ValueError: client ids are unknown or repeated.

    Example:
        >>> metric = PrivacyLoss(GaussianPrivacy(clip=1.0, noise_multiplier=2.0, max_epsilon=3.0), num_clients=3)
        >>> metric.update(torch.tensor([0, 1]))
        >>> metric.update(torch.tensor([0]))
        >>> metric.compute()
        tensor([2.9432, 1.9931,    nan])
        >>> metric.diagnostics()["affordable"]
        tensor([0., 1., 2.])
    """

    unit = "epsilon spent"
    sign = "less is more private; it only grows."
    cost = "none."
    higher_is_better = False
    per_class = False
    plot_lower_bound = 0.0

    #: ``{argument of update: attribute of the round}``; ``senders`` includes clients whose updates the server dropped.
    round_fields: ClassVar[dict[str, Any]] = {"client_ids": "senders"}
    participations: Tensor

    def __init__(self, privacy: GaussianPrivacy, num_clients: int | None = None, **kwargs: Any) -> None:
        self.privacy = privacy
        super().__init__(num_clients, None, **kwargs)

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("participations", torch.zeros(num_clients, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, client_ids: Tensor) -> None:
        """Count a round. ``client_ids [k]`` are the ids of the k clients that have sent an update in it."""
        self.participations = self.participations.index_add(0, client_ids, torch.ones_like(client_ids))

    def compute(self) -> Tensor:
        """Compute the epsilon that each client has spent, ``[num_clients]``. NaN for clients that never took part."""
        epsilons = [self.privacy.epsilon(rounds) if rounds else float("nan") for rounds in self.participations.tolist()]
        return torch.tensor(epsilons, device=self.participations.device)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return the number of ``rounds`` in which each client took part and, if the mechanism has a ``max_epsilon``,
        the number of ``affordable`` further rounds, both ``[num_clients]``.
        """
        affordable, taken = self.privacy.affordable_rounds(), self.participations.float()
        return {"rounds": taken} if affordable is None else {"rounds": taken, "affordable": affordable - taken}

    def spent(self) -> str | None:
        """Return a message if the client with the most rounds would exceed ``max_epsilon`` in another round. None if
        all clients can afford another round.

        All clients are examined, since the clients of the next round are not drawn yet.
        """
        affordable = self.privacy.affordable_rounds()
        if affordable is None or int(self.participations.max()) < affordable:
            return None
        client = int(self.participations.argmax())
        taken = int(self.participations[client])
        return (
            f"{client_called(client, self.client_names or ())} has spent epsilon = "
            f"{self.privacy.epsilon(taken):.4g} in {taken} rounds, and one more would make it "
            f"{self.privacy.epsilon(taken + 1):.4g}, above max_epsilon={self.privacy.max_epsilon:g} "
            f"(delta={self.privacy.delta:g})"
        )
