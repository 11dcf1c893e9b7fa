"""CumulativeShapley: the federated Shapley value, the sum of the rounds' own (FedSV).

Wang et al., "A Principled Approach to Data Valuation for Federated Learning", 2020, definition 1.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flsv.functional.shapley import ShapleyEstimate, Utility
from flsv.metrics.federated_shapley import PartialFederatedShapley, freedom_of
from flsv.metrics.guide import Guide
from flsv.metrics.intervals import OverRounds


class CumulativeShapley(PartialFederatedShapley):
    """The sum of a client's Shapley values over the rounds in which it took part; 0 in all others.

    Inputs and arguments as for :class:`PartialFederatedShapley` (``momentum`` and ``init`` have no use). ``compute``
    gives ``[num_clients]`` or ``[num_clients, num_classes]``; clients never seen are NaN. The standard errors of the
    rounds, which are independent, add in squares.

    Example:
        >>> metric = CumulativeShapley(num_clients=3)
        >>> worth = lambda masks: masks.float() @ torch.tensor([1.0, 3.0])
        >>> metric.update(torch.tensor([0, 2]), worth)
        >>> metric.update(torch.tensor([0, 1]), worth)
        >>> metric.compute()
        tensor([2., 3., 3.])
    """

    over_rounds: OverRounds = "sum"
    total: Tensor
    variance: Tensor
    variance_squares: Tensor
    seen: Tensor

    def guide(self) -> Guide:
        return replace(super().guide(), unit=f"{super().guide().unit}, sum over rounds")

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        width = num_classes if self.per_class and num_classes is not None else 1
        self.add_state("total", torch.zeros(num_clients, width), dist_reduce_fx="sum")
        for name in ("variance", "variance_squares"):
            self.add_state(name, torch.zeros(num_clients, width), dist_reduce_fx="sum")
        self.add_state("seen", torch.zeros(num_clients, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("evaluations", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, client_ids: Tensor, utility: Utility, generator: torch.Generator | None = None) -> None:
        """Play one round's game; ``client_ids [k]`` are its players."""
        self._check_clients(client_ids)
        estimate: ShapleyEstimate = self._estimate(utility, len(client_ids), generator)
        shape = (len(client_ids), -1)
        values = estimate.values.to(self.total).reshape(shape)
        self._add(client_ids, values)
        self._note(client_ids, values.mean(-1))
        variance = estimate.stderr.to(self.variance).reshape(shape) ** 2
        self.variance[client_ids] += variance
        self.variance_squares[client_ids] += variance**2 / freedom_of(estimate).to(variance).reshape(shape)
        self.seen[client_ids] += 1
        self.evaluations += estimate.evaluations
        self.rounds += 1

    def _add(self, client_ids: Tensor, values: Tensor) -> None:
        """Fold one round's values ``[k, 1 or M]``, before the clients' rounds are counted."""
        self.total[client_ids] += values

    def compute(self) -> Tensor:
        """``[num_clients]`` or ``[num_clients, num_classes]``, NaN for clients never seen."""
        value = self.total.masked_fill(self.seen[:, None] == 0, float("nan"))
        return value if self.per_class else value.squeeze(-1)

    def diagnostics(self) -> dict[str, Tensor]:
        """The standard error of each client's sum, and the evaluations spent in all rounds."""
        result = {"evaluations": self.evaluations.clone()}
        if self.per_class:
            return result
        return {**result, "stderr": self.variance.sqrt().squeeze(-1).masked_fill(self.seen == 0, float("nan"))}

    def error_freedom(self) -> Tensor:
        # Satterthwaite: of a sum of variances, each of which is estimated.
        return torch.where(self.variance_squares > 0, self.variance**2 / self.variance_squares, torch.inf).squeeze(-1)
