"""Checks of a round's clients and of its tensors, before a metric is updated with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flsv.metrics.needs import BY_CLIENT, SHAPES
from flsv.utilities.host_copies import on_host


def check_clients(client_ids: Tensor, num_clients: int) -> None:
    """Raise ValueError unless ``client_ids [k]``, at least one, are different numbers in 0 .. ``num_clients`` - 1."""
    if client_ids.numel() == 0:
        raise ValueError("client_ids is empty: a round needs at least one client.")
    ids = on_host(client_ids)
    low, high = int(min(ids)), int(max(ids))
    if low < 0 or high >= num_clients:
        raise ValueError(f"client_ids must lie in [0, {num_clients}), num_clients={num_clients}; got {low} to {high}.")
    if len(set(ids)) != len(ids):
        raise ValueError(f"a client appears twice in one round: client_ids={client_ids.tolist()}.")


def check_rows(client_ids: Tensor, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError unless each tensor in ``arguments`` that is to have one row per client has k = len(client_ids)
    rows. Without this check a single row would be broadcast to all clients."""
    for name in BY_CLIENT & arguments.keys():
        value = arguments[name]
        if isinstance(value, Tensor) and value.shape[:1] != client_ids.shape:
            shape = f"k={len(client_ids)}{SHAPES.get(name, '')}"
            raise ValueError(f"expected {name} [{shape}], got {list(value.shape)}.")
