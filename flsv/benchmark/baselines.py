"""Baselines for contribution metrics: numbers of samples, the training loss, values of the data alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flsv.data import FederatedDataModule
from flsv.errors import ConfigurationError
from flsv.functional.divergences import divergence_weights, label_divergence
from flsv.functional.transport.lava import knn_shapley, lava
from flsv.metrics import ContributionMetric
from flsv.metrics.base import latest

#: Principal components in which samples are compared.
COMPONENTS = 32


class SampleCount(ContributionMetric):
    """The clients' numbers of training samples. ``compute`` gives ``[num_clients]``, NaN for clients never seen.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        kwargs: see ``torchmetrics.Metric``.

    Example:
        >>> metric = SampleCount(num_clients=3)
        >>> metric.update(torch.tensor([0, 2]), torch.tensor([10, 30]))
        >>> metric.compute()
        tensor([10., nan, 30.])
    """

    per_class = False
    counted: Tensor

    def __init__(self, num_clients: int | None = None, **kwargs: Any) -> None:
        super().__init__(num_clients, None, **kwargs)

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("counted", torch.full((num_clients,), float("nan")), dist_reduce_fx=latest)

    def update(self, client_ids: Tensor, num_samples: Tensor) -> None:
        """Add one round; shapes ``[k]``, ``[k]``."""
        self._check_clients(client_ids)
        self.counted = self.counted.clone()
        self.counted[client_ids] = num_samples.to(self.counted)
        self.rounds += 1

    def compute(self) -> Tensor:
        """``[num_clients]``."""
        return self.counted


class TrainingLoss(SampleCount):
    """Minus a client's mean training loss over its rounds.

    Example:
        >>> metric = TrainingLoss(num_clients=2)
        >>> metric.update(torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
        >>> metric.update(torch.tensor([0]), torch.tensor([0.5]))
        >>> metric.compute()
        tensor([-0.7500, -2.0000])
    """

    total: Tensor
    seen: Tensor

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("total", torch.zeros(num_clients), dist_reduce_fx="sum")
        self.add_state("seen", torch.zeros(num_clients), dist_reduce_fx="sum")

    def update(self, client_ids: Tensor, losses: Tensor) -> None:  # type: ignore[override]
        """Add one round; shapes ``[k]``, ``[k]``."""
        self._check_clients(client_ids)
        self.total = self.total.index_add(0, client_ids, losses.to(self.total))
        self.seen = self.seen.index_add(0, client_ids, torch.ones_like(losses).to(self.seen))
        self.rounds += 1

    def compute(self) -> Tensor:
        """``[num_clients]``, NaN for clients never seen."""
        return -self.total / self.seen  # 0 / 0 is NaN


def divergence(data: FederatedDataModule) -> Tensor:
    """``[n]``, the aggregation weights of Guo et al.: samples, less how one-sided the labels are."""
    return divergence_weights(data.num_samples, label_divergence(data.class_counts))


def knn(data: FederatedDataModule) -> Tensor:
    """``[n]``, sums of the clients' samples' values for a classifier by the 10 nearest neighbours; the samples lie in
    one place. In principal components of the validation set."""
    x, y, owner, x2, y2 = _pooled(data)
    return _sums(knn_shapley(x, y, x2, y2), owner, data.num_clients)


def lava_values(data: FederatedDataModule) -> Tensor:
    """``[n]``, minus sums of the clients' samples' calibrated gradients towards the validation set, by LAVA with
    Gaussian classes; the samples lie in one place. In principal components of the validation set."""
    x, y, owner, x2, y2 = _pooled(data)
    return -_sums(lava(x, y, x2, y2, inner="gaussian"), owner, data.num_clients)


def _sums(values: Tensor, owner: Tensor, clients: int) -> Tensor:
    return torch.zeros(clients, dtype=torch.float64).index_add(0, owner, values.double())


def _pooled(data: FederatedDataModule) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Samples, classes, whose they are; the validation samples and their classes."""
    parts, owners = [], []
    for client in range(data.num_clients):
        batches = list(data.client_loader(client, shuffle=False))
        parts += batches
        owners += [torch.full((len(y),), client) for _, y in batches]
    x, y = (torch.cat(each) for each in zip(*parts))
    x2, y2 = (torch.cat(each) for each in zip(*data.val_dataloader()))
    if not x.is_floating_point() or y.is_floating_point():
        raise ConfigurationError("samples are compared by their distances and classes, which these do not have.")
    x, x2 = x.flatten(1), x2.flatten(1)
    mean = x2.mean(0)
    _, _, directions = torch.linalg.svd(x2 - mean, full_matrices=False)
    basis = directions[:COMPONENTS].T
    # In units in which validation samples have a mean squared length of 1: LAVA's regularisation is one of units.
    scale = ((x2 - mean) @ basis).square().sum(1).mean().sqrt().clamp(min=1e-12)
    return (x - mean) @ basis / scale, y, torch.cat(owners), (x2 - mean) @ basis / scale, y2
