"""Metrics with one fault each, for the checks to find."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flsv.metrics import ContributionMetric
from flsv.metrics.base import latest
from flsv.metrics.needs import Guide

NAN = float("nan")


class Norm(ContributionMetric):
    """How far each client moved; without fault."""

    per_class = False
    first, reduction = NAN, staticmethod(latest)

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("norms", torch.full((num_clients,), self.first), dist_reduce_fx=self.reduction)
        self.calls = 0

    def update(self, client_ids: Tensor, client_updates: Tensor) -> None:
        self.norms[client_ids] = self.value(client_updates).to(self.norms)
        self.calls += 1

    def value(self, updates: Tensor) -> Tensor:
        return updates.norm(dim=1)

    def compute(self) -> Tensor:
        return self.norms.clone()


class AsksForColors(Norm):
    def update(self, client_ids: Tensor, colors: Tensor) -> None:  # type: ignore[override]
        super().update(client_ids, colors)


class OneNumber(Norm):
    def compute(self) -> Tensor:
        return self.norms.nanmean()


class BeginsWithZero(Norm):
    first = 0.0


class ByPlace(Norm):
    def value(self, updates: Tensor) -> Tensor:
        return torch.arange(len(updates)).float()


class InPlace(Norm):
    def value(self, updates: Tensor) -> Tensor:
        return updates.mul_(2).norm(dim=1)


class Counts(Norm):
    """Adds how often it was updated, which is no state."""

    def compute(self) -> Tensor:
        return self.norms + self.calls


class Sums(Norm):
    """Of states that are sums it takes the larger one."""

    first, reduction = 0.0, "max"

    def value(self, updates: Tensor) -> Tensor:
        return updates.norm(dim=1)

    def update(self, client_ids: Tensor, client_updates: Tensor) -> None:
        self.norms[client_ids] += client_updates.norm(dim=1).to(self.norms)


class Forgets(Norm):
    """A copy begins anew."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "norms": torch.full_like(self.norms, NAN) if self.calls else self.norms}

    def __deepcopy__(self, memo: Any = None) -> Any:
        other = type(self)(self.num_clients)
        return other


class Single(Norm):
    def value(self, updates: Tensor) -> Tensor:
        return updates @ torch.ones(updates.shape[1])


class HalfAgain(Norm):
    """Of double precision."""

    def value(self, updates: Tensor) -> Tensor:
        return updates.norm(dim=1) * (1.5 if updates.dtype == torch.float64 else 1.0)


class KeepsScale(Norm):
    """A tensor that is no state stays where it is."""

    def __init__(self, num_clients: int | None = None) -> None:
        super().__init__(num_clients)
        self.scale = torch.tensor(1.0)


class NoUnit(Norm):
    def guide(self) -> Guide:
        return Guide(unit="", sign="more is better.", needs="nothing.", cost="nothing.")


class LargeClientsOnly(Norm):
    def update(self, client_ids: Tensor, client_updates: Tensor, num_samples: Tensor) -> None:  # type: ignore[override]
        if num_samples.min() < 6:
            raise RuntimeError("too small")
        super().update(client_ids, client_updates)


class Throws(Norm):
    """Draws from the global generator."""

    def value(self, updates: Tensor) -> Tensor:
        return updates.norm(dim=1) * torch.rand(len(updates))
