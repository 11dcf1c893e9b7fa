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
    """Yield ``(name, layer, attribute name, tensor)`` for each tensor that a layer of a module keeps as a plain
    attribute.

    Tensors that require a gradient (outputs), tensors that share their memory with a parameter or buffer, and the
    states of torchmetrics are left out.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> net.center = torch.zeros(2)
        >>> [name for name, *_ in plain_tensors(net)]
        ['center']
    """
    return (found for found in plain_state(module) if isinstance(found[3], Tensor))


def plain_state(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield ``(name, layer, attribute name, value)`` as :func:`plain_tensors` does, but also for attributes that hold a
    (nested) tuple of tensors, such as an LSTM's state, or None, which a tensor may replace later."""
    found = list(_plain_attributes(module))
    own_tensors = (*module.parameters(), *module.buffers()) if any(tensors for *_, tensors in found) else ()
    known = {_memory(tensor) for tensor in own_tensors}
    for name, layer, attribute, value, tensors in found:
        if not any(_memory(tensor) in known for tensor in tensors):
            yield name, layer, attribute, value


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any, list[Tensor]]]:
    """Yield ``(name, layer, attribute name, value, tensors in the value)`` for all attributes of layers that hold
    tensors or None and require no gradient. Metrics of torchmetrics and their child modules are left out."""
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
    """Return the tensors that ``value`` consists of: itself, or those of a (nested) tuple; an empty list if it is None.
    Return None if ``value`` is anything else."""
    if value is None or isinstance(value, Tensor):
        return [] if value is None else [value]
    parts = [leaves(part) for part in value] if type(value) is tuple else []
    if not parts or any(not part for part in parts):
        return None
    return [tensor for part in parts if part for tensor in part]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)
