"""Contribution: a metric's values between two rounds."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.metrics import ContributionMetric
from flsv.results.rows import overall


class Contribution(Tensor):
    """Tensor with a metric's values ``[n]``, values per class and interval.

    Example:
        >>> import torch
        >>> from torchmetrics import MeanMetric
        >>> found = contribution(MeanMetric(), torch.tensor([[0.5, 1.0], [0.0, 0.5]]))
        >>> found, found.by_class[0]
        (tensor([0.7500, 0.2500]), tensor([0.5000, 1.0000]))
    """

    # Results of operations are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # not a classmethod
    by_class: Tensor | None = None
    interval: tuple[Tensor, Tensor] | None = None
    pending: str | None = None

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]  # torch names the option
        text = str(self.as_subclass(Tensor).__repr__(**options))
        if self.pending is None:
            return text
        return f"{text} ({self.pending})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Contribution:
        copied = self.detach().clone().as_subclass(Contribution)
        copied.by_class = copy.deepcopy(self.by_class, memo)
        copied.interval = copy.deepcopy(self.interval, memo)
        copied.pending = self.pending
        return copied


def missing_contribution(value: Tensor, reason: str) -> Contribution:
    """Return a Contribution for a value ``[n]`` or ``[n, M]`` that is NaN, with the reason."""
    client_values = value if value.ndim < 2 else value.mean(-1)
    contributions = client_values.as_subclass(Contribution)
    contributions.pending = reason
    return contributions


def contribution(metric: Metric, value: Tensor) -> Contribution:
    """Return a Contribution for a metric's value ``[n]``, or ``[n, M]`` by class."""
    client_values = overall(metric, value)  # [n]
    contributions = client_values.as_subclass(Contribution)
    contributions.by_class = None
    if value.ndim == 2:
        contributions.by_class = value
    contributions.interval = None
    has_clients = client_values.ndim > 0
    if isinstance(metric, ContributionMetric) and has_clients:
        contributions.interval = metric.intervals(value=client_values)
    contributions.pending = getattr(metric, "pending", None)
    return contributions
