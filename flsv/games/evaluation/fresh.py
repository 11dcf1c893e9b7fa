"""A fresh copy of the module for each model, for models whose evaluation may change them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from flsv.games.evaluation.copies import copied
from flsv.games.evaluation.replica import Build, module_device
from flsv.parameters import ParameterSpace

#: What a module reads and does not change: all copies share it.
_SHARED = (Dataset, DataLoader, L.LightningDataModule)


class FreshCopies:
    """Makes copies of a module with vectors in them.

    A user's ``validation_step`` may count, collect outputs and keep the best value so far. So that a model's score
    depends on nothing but its vector and the fit's module, every model has a copy of its own, in which the module's
    Python state, metrics and buffers are as they are in the module now. Only the tensors that a vector holds are not
    allocated anew: all copies share one set of them, which a new copy overwrites. One copy is valid at a time.

    Args:
        module: it is read, never written.
        space: the map between the module and vectors.
    """

    @torch.inference_mode(False)
    def __init__(self, module: nn.Module, space: ParameterSpace) -> None:
        self._module, self._space = module, space
        self._held: dict[str, Tensor] = {}
        for name, tensor in _tensors(module):
            if name in space.names:
                own = torch.empty_like(tensor)
                self._held[name] = nn.Parameter(own, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else own
        self._vector = torch.empty(space.size, dtype=space.dtype, device=module_device(module))

    @torch.no_grad()
    def copy(self, build: Build, index: int, private: Mapping[str, Tensor] | None = None) -> Any:
        """A copy that is model ``index``, in the modes (training or evaluation) of the module.

        Raises:
            ConfigurationError: the module cannot be copied.
        """
        instead: dict[int, Any] = {id(t): self._held[name] for name, t in _tensors(self._module) if name in self._held}
        for layer in self._module.modules():
            for value in vars(layer).values():
                instead.update(_shared(value))
        own = copied(self._module, instead)
        build(index, self._vector)
        self._space.write(own, self._vector)
        for name, tensor in _tensors(own) if private else ():
            if name in private and name not in self._held:  # type: ignore[operator]
                tensor.copy_(private[name])  # type: ignore[index]
        return own


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _shared(value: Any) -> Iterator[tuple[int, Any]]:
    """Data, which is not copied."""
    if isinstance(value, _SHARED):
        yield id(value), value
    elif type(value) in (list, tuple, dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _shared(part)
