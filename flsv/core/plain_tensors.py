"""Tensors that a module keeps as plain attributes, not as parameters or buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric

#: Attributes that every LightningModule has: they are not a model's state.
LIGHTNINGS = frozenset(vars(L.LightningModule()))


def plain_tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield ``(name, layer, attribute name, tensor)`` for each tensor that is a plain attribute of a layer."""
    return (found for found in plain_state(module) if isinstance(found[3], Tensor))


def plain_state(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield what :func:`plain_tensors` yields, and attributes that are tuples of tensors or None."""
    found = list(_plain_attributes(module))
    own_tensors = (*module.parameters(), *module.buffers()) if any(tensors for *_, tensors in found) else ()
    known = {_memory(tensor) for tensor in own_tensors}
    for name, layer, attribute, value, tensors in found:
        if not any(_memory(tensor) in known for tensor in tensors):
            yield name, layer, attribute, value


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any, list[Tensor]]]:
    """Yield all attributes of layers that hold tensors or None, and the tensors in them."""
    skipped: set[int] = set()
    for prefix, layer in module.named_modules():
        if id(layer) in skipped or isinstance(layer, Metric):
            skipped.update(map(id, layer.children()))
            continue
        for attribute, value in vars(layer).items():
            tensors = None if attribute in LIGHTNINGS else leaves(value)
            if tensors is not None and not any(tensor.requires_grad for tensor in tensors):
                yield f"{prefix}.{attribute}" if prefix else attribute, layer, attribute, value, tensors


def leaves(value: Any) -> list[Tensor] | None:
    """List the tensors that ``value``, a tensor, a nested tuple or None, consists of."""
    if value is None or isinstance(value, Tensor):
        return [] if value is None else [value]
    parts = [leaves(part) for part in value] if type(value) is tuple else []
    if not parts or any(not part for part in parts):
        return None
    return [tensor for part in parts if part for tensor in part]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)
