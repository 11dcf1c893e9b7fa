"""Metrics with one fault each, for the checks to find."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.metrics import ContributionMetric, CumulativeShapley
from flsv.metrics.base import Guide, latest

NAN = float("nan")


class Norm(ContributionMetric):
    """How far each client moved; without fault."""

    per_class = False
    first, reduction = NAN, staticmethod(latest)

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("norms", torch.full((num_clients,), self.first), dist_reduce_fx=self.reduction)
        self.calls = 0

    def update(self, client_ids: Tensor, client_updates: Tensor) -> None:
        self._check_lengths(client_ids, client_updates=client_updates)
        self.norms[client_ids] = self.value(client_updates).to(self.norms)
        self.calls += 1

    def value(self, updates: Tensor) -> Tensor:
        return updates.norm(dim=1)

    def compute(self) -> Tensor:
        return self.norms.clone()


class AsksForColours(Norm):
    def update(self, client_ids: Tensor, colours: Tensor) -> None:  # type: ignore[override]
        super().update(client_ids, colours)


class OneNumber(Norm):
    def compute(self) -> Tensor:
        return self.norms.nanmean()


class BeginsWithZero(Norm):
    first = 0.0


class ByPlace(Norm):
    def value(self, updates: Tensor) -> Tensor:
        return torch.arange(len(updates)).float()


class CountsTwice(Norm):
    def update(self, client_ids: Tensor, client_updates: Tensor) -> None:
        super().update(client_ids, client_updates)
        self.rounds += 1


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


class OwnClientsOnly(Norm):
    def update(self, client_ids: Tensor, clients: Any) -> None:  # type: ignore[override]
        for client in clients:
            if client._owners is None or client._owners.has(client.id):
                self.norms[client.id] = float(client.id)


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


class TakesOneRow(Norm):
    def update(self, client_ids: Tensor, client_updates: Tensor) -> None:
        self.norms[client_ids] = client_updates.norm(dim=1).to(self.norms)


class NoUnit(Norm):
    def guide(self) -> Guide:
        return Guide(unit="", sign="more is better.", needs="nothing.", cost="nothing.")


class OtherFold(Norm):
    """Keeps the last round's value, and says that it is the rounds' sum."""

    over_rounds = "sum"

    def update(self, client_ids: Tensor, client_updates: Tensor) -> None:
        super().update(client_ids, client_updates)
        self.note_round(client_ids, client_updates.norm(dim=1))


class Silent(Norm):
    """Says that its value is a mean of rounds, and not what these are."""

    over_rounds = "mean"


class ForgetsPower(Norm):
    def __init__(self, num_clients: int | None = None, power: float = 2.0) -> None:
        super().__init__(num_clients)
        assert power > 0


class Squared(CumulativeShapley):
    def compute(self) -> Tensor:
        return super().compute() ** 2


class LargeClientsOnly(Norm):
    def update(self, client_ids: Tensor, client_updates: Tensor, num_samples: Tensor) -> None:  # type: ignore[override]
        if num_samples.min() < 6:
            raise RuntimeError("too small")
        super().update(client_ids, client_updates)


class Throws(Norm):
    """Draws from the global generator."""

    def value(self, updates: Tensor) -> Tensor:
        return updates.norm(dim=1) * torch.rand(len(updates))


class Remembers(Metric):
    """Of torchmetrics', with a state that it makes in ``update`` and changes later."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, client_updates: Tensor) -> None:
        if self.total == 0:
            self.total = client_updates.sum()
        else:
            self.total += client_updates.sum()

    def compute(self) -> Tensor:
        return self.total
