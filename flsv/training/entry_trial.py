"""EntryTrial: what passes from one local training to the next in the objects that a module refers to."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from flsv.training.module_attributes import ModuleAttributes
from flsv.training.swapped_optimizer import held_optimizers, is_optimizer
from flsv.utilities.errors import listed
from flsv.utilities.object_states import ObjectState, TensorState, hidden_state_of, states_of
from flsv.utilities.reachable import GENERATORS, Part, is_closed, walk

#: Types of objects that are not a client's, or that are shared on purpose.
CLOSED = (
    L.Trainer,
    L.Callback,
    L.LightningDataModule,
    Logger,
    Dataset,
    DataLoader,
    Optimizer,
    LRScheduler,
    Metric,
    SimpleNamespace,
)
_SWAPPED = (*CLOSED, *GENERATORS)
#: Number of entries from which a tensor is compared by its sum and norm.
_MANY = 1000


class EntryTrial:
    """Comparison of what a process's first local training finds and leaves, beyond what is swapped between clients.

    A module's vector, buffers, plain attributes and random generators are each client's, as are optimizers' states,
    options and plain attributes. What closures, objects of libraries, classes and modules outside of the model hold is
    not.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._module = trainer.lightning_module
        self._optimizers = held_optimizers(trainer)
        self._values = self._hidden_values()
        self._states: list[tuple[str, ObjectState]] = []
        for path, value in self._hidden_parts():
            self._states += [(path, state) for state in _states(value)]

    def warn_of_changes(self) -> None:
        """Name what the local training has changed."""
        changed_paths = []
        for path, value in self._hidden_values().items():
            if self._values.get(path) is not value:
                changed_paths.append(path)
        for path, state in self._states:
            if not state.is_unchanged():
                changed_paths.append(path)
        if changed_paths:
            names = listed(dict.fromkeys(changed_paths))
            rank_zero_warn(
                f"flsv: training changes {names} of {type(self._module).__name__}, which passes from client to "
                "client, or from round to round at a site, so that what a client learns may depend on what was "
                "trained before in this process. Keep it in an attribute that holds numbers, tensors, collections of "
                "these or layers. To share it on purpose, hold it in a types.SimpleNamespace."
            )

    def _hidden_values(self) -> dict[str, Any]:
        attributes = ModuleAttributes(self._module)
        values = {}
        for path, value in attributes.hidden_values("module"):
            if not isinstance(value, _SWAPPED) and not is_optimizer(value):
                values[path] = value
        for swapped in self._optimizers:
            for path, value in swapped.hidden_values().items():
                if not isinstance(value, _SWAPPED):
                    values[path] = value
        return values

    def _hidden_parts(self) -> Iterator[Part]:
        """Yield ``(path, object)`` of everything that no other part of flsv gives each client anew."""
        attributes = ModuleAttributes(self._module)
        swapped_ids = attributes.ids()
        for value in (
            *self._module.modules(),
            *self._module.parameters(),
            *self._module.buffers(),
        ):
            swapped_ids.add(id(value))

        roots = self._hidden_values()
        for layer in self._module.modules():
            if not is_closed(type(layer)):
                roots[f"the class {type(layer).__name__}"] = type(layer)
        for root_path, root in roots.items():
            for path, value in walk(root, root_path, closed=_SWAPPED, closed_ids=swapped_ids):
                if id(value) not in swapped_ids and not isinstance(value, _SWAPPED):
                    yield path, value


def _states(value: object) -> list[ObjectState]:
    if isinstance(value, Tensor):
        if value.numel() > _MANY:
            return [_MarkState(value)]
        return [TensorState(value)]
    states = list(states_of(value))
    try:
        hidden_state = hidden_state_of(value)
    except Exception:  # whatever an object's own __reduce__ raises: it is not compared
        return states
    if hidden_state is not None:
        states.append(hidden_state)
    return states


class _MarkState(ObjectState):
    """A large tensor's sum and norm. Nothing is copied."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._marks = self._current_marks()

    def is_unchanged(self) -> bool:
        return torch.equal(self._current_marks(), self._marks)

    def restore(self) -> None:
        pass

    def _current_marks(self) -> Tensor:
        values = self._tensor.detach()
        if values.is_complex():
            values = torch.view_as_real(values)
        values = values.double()
        return torch.stack([values.sum(), values.norm()]).nan_to_num()
