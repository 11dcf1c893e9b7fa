"""LowerBoundShapley: what a client is worth a round at least, by a lower confidence bound of its Shapley values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.arguments import check_number
from flsv.functional.lower_bound import lower_bound
from flsv.functional.shapley import ShapleyEstimate
from flsv.games.performance import Mode
from flsv.metrics.cumulative_shapley import CumulativeShapley
from flsv.metrics.federated_shapley import PartialFederatedShapley, Weighting
from flsv.metrics.guide import Guide
from flsv.metrics.intervals import OverRounds


def merged_moments(states: Tensor) -> Tensor:
    """Counts, means and sums of squared deviations of stretches of rounds, ``[W, n, 2M+1]``, as those of all of them.

    After Chan, Golub and LeVeque 1983. A row is count [1] | mean [M] | squares [M].
    """
    merged = states[0]
    width = (merged.shape[-1] - 1) // 2
    for later in states[1:]:
        count, more = merged[:, :1], later[:, :1]
        total = (count + more).clamp_min(1)
        shift = later[:, 1 : 1 + width] - merged[:, 1 : 1 + width]
        mean = merged[:, 1 : 1 + width] + shift * more / total
        squares = merged[:, 1 + width :] + later[:, 1 + width :] + shift.square() * count * more / total
        merged = torch.cat([count + more, mean, squares], dim=1)
    return merged


class LowerBoundShapley(CumulativeShapley):
    r"""A one-sided lower confidence bound of a client's mean Shapley value over its rounds.

    .. math:: v_i = \overline{SV}_i - t_{T_i - 1}(\text{confidence})\, \frac{s_i}{\sqrt{T_i}}

    with the mean and the spread over the :math:`T_i` rounds in which the client took part; the spread holds the error
    of a sampled estimate, and how values change in the course of training. A client in its first round has its value
    less its estimator's standard error times the normal quantile. Whoever is paid by it is paid for what is
    established: values that swing from round to round, as those of noise and of few samples do, count for less, and
    a client seen seldom for less than one seen often. It is no remedy against a client that comes as two, whose values
    are as steady as one's: for that take ``estimator="banzhaf"``, under which two copies together have the one's value,
    or ``"beta"`` with ``{"alpha": 1, "beta": 4}``, under which they have less (see
    :mod:`flsv.functional.shapley.beta`).

    Inputs as for :class:`PartialFederatedShapley`. ``compute`` gives ``[num_clients]`` or ``[num_clients,
    num_classes]``, in the utility's unit; NaN for clients never seen. ``diagnostics`` holds the means, too.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        num_classes: as for :class:`PartialFederatedShapley`.
        estimator: likewise.
        estimator_args: likewise.
        performance: likewise.
        weighting: likewise.
        per_class: likewise.
        mode: likewise.
        confidence: in [0.5, 1); 0.5 is the mean itself.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: confidence outside [0.5, 1); what :class:`PartialFederatedShapley` raises.

    Example:
        >>> metric = LowerBoundShapley(num_clients=3)
        >>> for worth in ([1.0, 3.0], [1.0, 5.0]):
        ...     metric.update(torch.tensor([0, 2]), lambda masks: masks.float() @ torch.tensor(worth))
        >>> metric.compute()
        tensor([1.0000,    nan, 0.9223])
    """

    over_rounds: OverRounds = None  # it is the end of an interval
    moments: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        num_classes: int | None = None,
        estimator: str | Callable[..., ShapleyEstimate] = "auto",
        estimator_args: dict[str, Any] | None = None,
        performance: str | Metric = "accuracy",
        weighting: Weighting = "uniform",
        per_class: bool = False,
        mode: Mode | None = None,
        confidence: float = 0.9,
        **kwargs: Any,
    ) -> None:
        check_number(self, "confidence", confidence, least=0.5, below=1)
        self.confidence = confidence
        super().__init__(
            num_clients,
            num_classes,
            estimator,
            estimator_args,
            performance,
            weighting,
            per_class=per_class,
            mode=mode,
            **kwargs,
        )

    def guide(self) -> Guide:
        told = PartialFederatedShapley.guide(self)
        sign = "what a round gains by the client at least; below 0: it is not established that it gains anything."
        return replace(told, unit=f"{told.unit} a round, lower bound", sign=sign)

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        super().init_states(num_clients, num_classes)
        width = self.total.shape[1]
        self.add_state("moments", torch.zeros(num_clients, 2 * width + 1), dist_reduce_fx=merged_moments)

    def _add(self, client_ids: Tensor, values: Tensor) -> None:
        super()._add(client_ids, values)
        now = torch.zeros_like(self.moments)
        now[client_ids] = torch.cat([torch.ones_like(values[:, :1]), values, torch.zeros_like(values)], dim=1)
        self.moments = merged_moments(torch.stack([self.moments, now]))

    def compute(self) -> Tensor:
        """``[num_clients]`` or ``[num_clients, num_classes]``, NaN for clients never seen."""
        count, mean, squares = self._moments()
        bound = lower_bound(count.expand_as(mean), mean, squares, self.variance.sqrt(), self.confidence).to(mean)
        return bound if self.per_class else bound.squeeze(-1)

    def diagnostics(self) -> dict[str, Tensor]:
        """Each client's mean, and the evaluations spent in all rounds."""
        result = {"evaluations": self.evaluations.clone()}
        if self.per_class:
            return result
        count, mean, _ = self._moments()
        return {**result, "mean": mean.masked_fill(count == 0, float("nan")).squeeze(-1)}

    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        width = self.total.shape[1]
        return self.moments[:, :1], self.moments[:, 1 : 1 + width], self.moments[:, 1 + width :]
