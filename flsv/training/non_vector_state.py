"""NonVectorState: tensors of a module that are not part of its vector, such as counters, masks and memory banks.

All clients of a round start with the same values. The next global model takes the values that the cohort's first client
has at the end of its training, since averages of counters have no meaning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from flsv.core.plain_tensors import LIGHTNINGS, plain_state
from flsv.utilities.errors import ConfigurationError

#: What :meth:`NonVectorState.read` returns: ``{"buffers": {name: tensor or None}, "attributes": {name: value}}``.
State = dict[str, dict[str, Any]]


class NonVectorState:
    """State of a module that its vector does not hold, such as counters."""

    def __init__(self, module: nn.Module, infinite: Collection[str] = ()) -> None:
        self._module, state = module, dict([*module.named_parameters(), *module.named_buffers()])
        self._infinite = [(name, state[name], state[name].detach().clone()) for name in infinite]
        self._collected: dict[str, int] | None = _collections(module)

    def read(self) -> State:
        """Copy the state."""
        return {
            "buffers": {name: None if b is None else b.clone() for name, _, _, b in self._buffers()},
            "attributes": {name: _each(value, torch.clone) for name, _, _, value in list(plain_state(self._module))},
        }

    @torch.no_grad()
    def write(self, state: State, partial: bool = False) -> None:
        """Write a state that :meth:`read` returned back into the module."""
        self._write_buffers(state["buffers"])
        missing = dict(state["attributes"])
        for name, layer, own, value in list(plain_state(self._module)):
            if name in missing:
                before = missing.pop(name)
                if not _same(value, before):
                    # A new object: the old one may be in use elsewhere, as a batch of the data for example.
                    setattr(layer, own, _each(before, torch.clone))
            elif value is not None and not partial:
                delattr(layer, own)
        for name, value in missing.items():
            if value is not None:
                prefix, _, own = name.rpartition(".")
                setattr(self._module.get_submodule(prefix), own, _each(value, torch.clone))

    def resume(self, state: State) -> None:
        """Write a state from a checkpoint into the module."""
        device = _device(self._module)
        attributes = {
            name: _each(value, lambda tensor: tensor.to(device)) for name, value in state["attributes"].items()
        }
        self.write({"buffers": state["buffers"], "attributes": attributes}, partial=True)

    def warn_of_collections(self) -> None:
        """Warn once if lists and dictionaries of the module hold more tensors than at first."""
        before = self._collected
        now = _collections(self._module) if before is not None else {}
        if before is None or not (grown := [name for name, count in now.items() if count > before.get(name, 0)]):
            return
        self._collected = None
        rank_zero_warn(
            f"{type(self._module).__name__} keeps tensors in {grown} from one round to the next, as a replay buffer "
            "does: in one process they pass from client to client, and every client trains on the others' samples. "
            "Keep them as a tensor (self.memory = torch.cat(...)), which is each client's own for a round, or empty "
            "them in on_train_epoch_end."
        )

    def check(self) -> None:
        """Check that entries that held infinite or NaN values at first have not changed."""
        moved = [name for name, value, before in self._infinite if not _equal(value, before)]
        if moved:
            raise ConfigurationError(
                f"{moved} held infinite values or NaN when training started, and training has changed them: such "
                "values cannot be averaged. Register the buffers with persistent=False, so that every client has its "
                "own for a round, or start them from finite values."
            )

    def _write_buffers(self, state: Mapping[str, Tensor | None]) -> None:
        gone = dict(state)
        for name, layer, own, buffer in list(self._buffers()):
            if name not in state:
                delattr(layer, own)
                continue
            value = gone.pop(name)
            if buffer is None or value is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                layer._buffers[own] = None if value is None else value.to(_device(self._module), copy=True)
            else:
                buffer.copy_(value)
        layers = dict(self._module.named_modules()) if gone else {}
        for name, value in gone.items():
            prefix, _, own = name.rpartition(".")
            if own not in layers[prefix]._buffers:  # made in training
                value = None if value is None else value.to(_device(self._module), copy=True)
                layers[prefix].register_buffer(own, value, persistent=False)

    def _buffers(self) -> Iterator[tuple[str, nn.Module, str, Tensor | None]]:
        """Yield each integer or non-persistent buffer with its names and its layer."""
        for prefix, layer in self._module.named_modules():
            for own, buffer in layer._buffers.items():
                whole = buffer is not None and not (buffer.is_floating_point() or buffer.is_complex())
                if own in layer._non_persistent_buffers_set or whole:
                    yield f"{prefix}.{own}" if prefix else own, layer, own, buffer


def _collections(module: nn.Module) -> dict[str, int]:
    """Count the tensors in each collection that is an attribute of a module."""
    found = {}
    for prefix, layer in module.named_modules():
        for own, value in vars(layer).items() if not isinstance(layer, Metric) else ():
            if isinstance(value, list | dict | set | deque) and own not in LIGHTNINGS:
                parts = tree_leaves(list(value.values()) if isinstance(value, dict) else list(value))
                if count := sum(isinstance(part, Tensor) and part.ndim > 0 for part in parts):
                    found[f"{prefix}.{own}" if prefix else own] = count
    return found


def _each(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor in a nested tuple."""
    if value is None or isinstance(value, Tensor):
        return None if value is None else function(value.detach())
    return tuple(_each(part, function) for part in value)


def _same(a: Any, b: Any) -> bool:
    """Return whether two attributes are the same object, or hold equal tensors."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or (isinstance(a, Tensor) and isinstance(b, Tensor) and _equal(a, b))


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two dense tensors are equal, NaN included."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and a.layout == b.layout == torch.strided
        and bool(((a == b.to(a.device)) | ((a != a) & (b != b).to(a.device))).all())
    )


def _device(module: nn.Module) -> torch.device:
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")
