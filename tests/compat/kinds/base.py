"""What a kind of module is here, and data of every shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flsv.data import FederatedDataModule, SizePartitioner


@dataclass(frozen=True)
class Kind:
    """A module as public Lightning projects have it, the data that it trains on, and what its Trainer is given.

    Attributes:
        module: makes one, always of the same weights.
        data: makes the data module, always with the same samples.
        callbacks: makes the project's own.
        trainer: the Trainer's arguments.
        logged: what ``validation_step`` logs, to be made small.
        tolerance: to which the global model after the last round is that of the loop by hand.
        exact: whether every client's first model is the same to the bit.
        values_tolerance: of the contributions.
        clients: how many samples they have, up to a factor.
        by_hand: makes the module of the loop by hand, where that is another.
    """

    module: Callable[[], L.LightningModule]
    data: Callable[[], L.LightningDataModule]
    callbacks: Callable[[], Sequence[L.Callback]] = list
    trainer: dict[str, Any] = field(default_factory=dict)
    logged: str = "val_loss"
    tolerance: float = 1e-6
    exact: bool = True
    values_tolerance: float = 1e-6
    clients: tuple[int, ...] = (2, 1)
    by_hand: Callable[[], L.LightningModule] | None = None


class Sets(L.LightningDataModule):
    """A project's data module: a training set, one validation set or several, how samples become batches."""

    def __init__(
        self,
        train: Dataset,
        val: Dataset | Sequence[Dataset],
        batch_size: int = 8,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        super().__init__()
        self.train, self.val = train, val if isinstance(val, (list, tuple)) else [val]
        self.options: dict[str, Any] = {"batch_size": batch_size, "collate_fn": collate_fn}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, shuffle=True, **self.options)

    def val_dataloader(self) -> Any:
        loaders = [DataLoader(each, **self.options) for each in self.val]
        return loaders if len(loaders) > 1 else loaders[0]


class Items(Dataset):
    """A list of samples."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = list(items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def federated(kind: Kind) -> FederatedDataModule:
    """The kind's data, dealt to its clients."""
    return FederatedDataModule(kind.data(), SizePartitioner(list(kind.clients)))


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(labels: bool = True, samples: int = 44, val: int = 12, side: int = 8, classes: int = 3) -> Sets:
    """Noisy stripes of as many widths as there are classes."""
    generator = drawn()

    def some(n: int) -> TensorDataset:
        y = torch.arange(n) % classes
        wave = torch.sin(torch.arange(side) * (y[:, None] + 1.0))[:, None, None, :].expand(n, 1, side, side)
        x = wave + 0.3 * torch.randn(n, 1, side, side, generator=generator)
        return TensorDataset(x.contiguous(), y) if labels else TensorDataset(x.contiguous())

    return Sets(some(samples), some(val))


def table(
    target: Callable[[Tensor], Tensor], samples: int = 44, val: int = 12, features: int = 5, seed: int = 1
) -> Sets:
    """Gaussian features, and a target that is a function of them."""
    x = torch.randn(samples + val, features, generator=drawn(seed))
    y = target(x)
    return Sets(TensorDataset(x[:samples], y[:samples]), TensorDataset(x[samples:], y[samples:]))
