"""Watch: detects training steps that draw random numbers, or change attributes other than parameters and buffers.

Rows of one batched model have parameters and buffers of their own and share everything else in the module. A counter, a
list of outputs, a generator or a past batch that a step stores in the module would thus pass from row to row, and from
the rows to the client whose own model the module holds.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection

#: Names of the global random generators.
GENERATORS = ("torch", "NumPy", "random")
#: Attributes of a module that Lightning and torch set themselves.
_LIGHTNINGS = frozenset({"_current_fx_name", "_trainer", "_fabric", "log", "log_dict", "_parameters", "_modules"})
_LIGHTNINGS |= {"_metric_attributes"}
#: Types whose objects are compared by identity only; and the depth to which all other objects, lists and dictionaries
#: are compared.
_WHOLE, _DEPTH = (nn.Module, Dataset, DataLoader, L.Trainer, L.LightningDataModule), 4


class Watch:
    """Snapshot of a module's attributes and of the global random generators, to detect changes by later steps.

    Args:
        module: the module whose steps are watched.
        draws: names of the global generators, of :data:`GENERATORS`, that steps may draw from.
        counts: whether the module's torchmetrics may change.
    """

    def __init__(self, module: nn.Module, draws: Collection[str] = (), counts: bool = False) -> None:
        self._module, self._draws, self._counts = module, draws, counts
        self._before, self._drawn = dict(self._kept()), _random_states()

    def changed(self) -> str:
        """Return a description of the changes since the snapshot, for an error message; empty if there are none."""
        drawn = [name for name, state in _random_states().items() if state != self._drawn[name]]
        if drawn := [name for name in drawn if name not in self._draws]:
            return f"it draws random numbers by {drawn[0]}, as dropout or an augmentation does"
        before, now = self._before, dict(self._kept())
        names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        text = ", ".join(names[:3])
        return f"it changes what the module keeps beside parameters and buffers: {text}" if names else ""

    def values_changed(self) -> list[str]:
        """Return the names of the numbers, strings and tensors among the attributes that changed since the snapshot."""
        changed = [name for name, mark in self._kept() if mark != self._before.get(name)]
        layers = dict(self._module.named_modules())
        held = {name: vars(layers[name.rpartition(".")[0]]).get(name.rpartition(".")[2]) for name in changed}
        return sorted(name for name, value in held.items() if isinstance(value, (bool, int, float, str, Tensor)))

    def _kept(self) -> Iterator[tuple[str, Any]]:
        """Yield the name of each attribute of the module and its layers, and the attribute's :func:`_mark`."""
        for prefix, layer in self._module.named_modules():
            if self._counts and isinstance(layer, (Metric, MetricCollection)):
                continue
            for name, value in vars(layer).items():
                if name == "_buffers" and isinstance(value, dict):
                    yield f"{prefix}._buffers", {key: id(buffer) for key, buffer in value.items()}
                elif name not in _LIGHTNINGS:
                    yield f"{prefix}.{name}" if prefix else name, _mark(value, _DEPTH)


def _mark(value: Any, depth: int) -> Any:
    """Return a fingerprint of a value: it differs from an earlier one if the value, or an object in it, has changed.

    Args:
        value: the value of an attribute.
        depth: the depth to which objects, lists and dictionaries in the value are compared.
    """
    kind = type(value).__name__, id(value)
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return repr(value)
    for types, content in _CONTENTS:
        if isinstance(value, types):
            return (*kind, content(value))
    if depth == 0 or isinstance(value, (*_WHOLE, type)):
        return kind
    if isinstance(value, dict):
        return (*kind, [(repr(key), _mark(each, depth - 1)) for key, each in value.items()])
    if isinstance(value, (list, tuple, deque)):
        return (type(value).__name__, [_mark(each, depth - 1) for each in value])
    held = getattr(value, "__dict__", None)
    return (*kind, _mark(dict(held), depth - 1)[2]) if isinstance(held, dict) and depth > 1 else kind


def _checksum(array: Any) -> int | None:
    """Return a checksum of a NumPy array; None if it holds Python objects."""
    return None if array.dtype == object else zlib.crc32(np.ascontiguousarray(array).tobytes())


#: ``(type, function)``: the function's result for an object of this type is another one after the object has changed.
_CONTENTS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (Tensor, lambda tensor: None if tensor.is_inference() else tensor._version),
    (torch.Generator, lambda generator: generator.get_state().numpy().tobytes()),
    (np.random.Generator, lambda generator: repr(generator.bit_generator.state)),
    (np.random.RandomState, lambda state: repr(state.get_state(legacy=False))),
    (random.Random, lambda generator: generator.getstate()),
    (np.ndarray, _checksum),
    ((set, frozenset), len),
)


def _random_states() -> dict[str, Any]:
    """Return the states of the global random generators by the names in :data:`GENERATORS`."""
    legacy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    cuda = [s.numpy().tobytes() for s in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else None
    torches = torch.get_rng_state().numpy().tobytes(), cuda
    return dict(zip(GENERATORS, (torches, repr(legacy), random.getstate())))
