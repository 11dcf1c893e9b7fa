"""Clients and a server for a valuation without training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from flsv.core import Client, LocalData, Split
from flsv.utilities.errors import need_classes


def clients_of(sets: Sequence[tuple[Tensor, Tensor]], num_classes: int | None = None) -> list[Client]:
    """Make one client from each pair of samples and classes.

    Args:
        sets: samples ``[m, ...]`` and classes ``[m]`` of each client, which may have none.
        num_classes: number of classes. None: the largest class plus one.

    Example:
        >>> (client,) = clients_of([(torch.zeros(3, 2), torch.tensor([0, 1, 1]))])
        >>> client.ask(lambda local: local.class_counts)
        tensor([1, 2])
    """
    classes = num_classes or max((int(y.max()) + 1 for _, y in sets if len(y)), default=1)
    counts = torch.stack([torch.bincount(y.long().cpu(), minlength=classes) for _, y in sets])
    return [_client(i, partial(_train_only, x, y), counts[i], counts.sum(0)) for i, (x, y) in enumerate(sets)]


def server_of(x: Tensor, y: Tensor) -> LocalData:
    """Make the server's data with validation samples ``[m, ...]`` of classes ``[m]``."""
    nothing = torch.zeros(int(y.max()) + 1 if len(y) else 1, dtype=torch.long)
    return LocalData("the server", lambda split: [(x, y)] if len(y) else [], nothing, nothing, guarded=False)


def participants_of(data: Any, device: str | torch.device = "cpu") -> tuple[list[Client], LocalData | None]:
    """Return a data module's clients, and the server's data. The latter are None without a validation set.

    Args:
        data: a :class:`flsv.FederatedDataModule` after ``setup``.
        device: device to which samples are moved, and on which their features are computed. Transport runs on the CPU.

    Raises:
        ConfigurationError: the samples have no classes.
    """
    if (missing := getattr(data, "no_classes", None)) is not None:
        raise need_classes("samples are valued together with their classes", missing, "leave the valuation out")
    counts = data.class_counts
    clients = [
        _client(i, partial(_split_of, data, i, device), counts[i], counts.sum(0)) for i in range(data.num_clients)
    ]
    loader = data.val_dataloader()
    if not loader:
        return clients, None
    nothing = torch.zeros_like(counts[0])
    return clients, LocalData("the server", lambda split: _moved(loader, device), nothing, nothing, guarded=False)


def _client(number: int, batches: Callable[[Split], Iterable[Any]], counts: Tensor, population: Tensor) -> Client:
    return Client(number, LocalData(f"client {number}", batches, counts, population))


def _train_only(x: Tensor, y: Tensor, split: Split) -> list[tuple[Tensor, Tensor]]:
    return [(x, y)] if split == "train" and len(y) else []


def _split_of(data: Any, client: int, device: str | torch.device, split: Split) -> Iterable[Any]:
    return _moved(data.client_loader(client, split, shuffle=False), device)


def _moved(batches: Iterable[Any], device: str | torch.device) -> Iterable[Any]:
    return (move_data_to_device(batch, torch.device(device)) for batch in batches)
