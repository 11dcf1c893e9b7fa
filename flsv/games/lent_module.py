"""LentModule: the training run's own module, used to evaluate other models and restored afterwards."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from flsv.core.parameter_space import ParameterSpace

#: Types of objects that a module only reads, or that are restored by other means.
_LEFT = (Dataset, DataLoader, L.LightningDataModule, L.Trainer, L.Callback, Optimizer)


class LentModule:
    """Snapshot of a module's state, which :meth:`restore` writes back after another model's evaluation."""

    def __init__(self, module: nn.Module, space: ParameterSpace | None = None) -> None:
        constant = (
            set() if space is None else {id(each) for each in space.constants(module).values()}
        )
        self._gradients = [(each, each.requires_grad, each.grad) for each in module.parameters()]
        found: list[Any] = [
            each for each in named_tensors(module).values() if id(each) not in constant
        ]
        self._held: list[tuple[Any, Any]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._store_copies(vars(module), found, {*constant, *map(id, found)})
        self._tensors = [
            [each, each._version, each.detach().clone()]
            for each in found
            if not each.is_inference()
        ]

    def _store_copies(self, value: Any, tensors: list[Tensor], seen: set[int]) -> None:
        """Store copies of a container and, recursively, of all in it. Add its tensors to ``tensors``."""
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, np.ndarray):
            self._arrays.append((value, value.copy()))
        elif isinstance(value, dict | list | set | deque | tuple):
            self._held += [] if isinstance(value, tuple) else [(value, copy(value))]
            for each in list(value.values() if isinstance(value, dict) else value):
                self._store_copies(each, tensors, seen)
        elif not isinstance(value, _LEFT) and hasattr(value, "__dict__"):
            if type(value).__module__.partition(".")[0] in sys.stdlib_module_names:
                return  # functions, loggers, threads
            self._store_copies(vars(value), tensors, seen)

    @torch.no_grad()
    def restore(self) -> None:
        """Set the module back to its state at construction."""
        for holder, before in self._held:
            if not _has_same_objects(holder, before):
                holder.clear()
                (holder.update if isinstance(holder, dict | set) else holder.extend)(before)
        for array, before in self._arrays:
            if array.flags.writeable:
                array[...] = before
        for entry in self._tensors:
            tensor, version, before = entry
            if tensor._version != version:
                tensor.copy_(before)
                entry[1] = tensor._version
        for parameter, flag, gradient in self._gradients:
            parameter.requires_grad, parameter.grad = flag, gradient


def _has_same_objects(holder: Any, before: Any) -> bool:
    """Return whether a container still has the same objects as its copy ``before``."""
    if len(holder) != len(before):
        return False
    if isinstance(holder, dict):
        return all(key in holder and holder[key] is value for key, value in before.items())
    return (
        holder == before if isinstance(holder, set) else all(a is b for a, b in zip(holder, before))
    )


@contextmanager
def lent(module: nn.Module, space: ParameterSpace | None = None) -> Iterator[LentModule]:
    """Yield a snapshot of a module's state, and restore the module when the context ends."""
    state = LentModule(module, space)
    try:
        yield state
    finally:
        state.restore()


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def module_device(module: nn.Module) -> torch.device:
    """Return the device of the module's first parameter or buffer, or the CPU."""
    return next((tensor.device for tensor in named_tensors(module).values()), torch.device("cpu"))


@torch.no_grad()
def put_private(module: nn.Module, space: ParameterSpace, private: Mapping[str, Tensor]) -> None:
    """Write ``private``, the state-dict entries that model vectors do not contain, into a module."""
    own = named_tensors(module) if private else {}
    for name, value in private.items():
        if name in own and name not in space.names and own[name].shape == value.shape:
            own[name].copy_(value)
