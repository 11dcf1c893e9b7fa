"""EntryTrial: what passes from one local training to the next in the objects that a module refers to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
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

from flsv.training.module_snapshot import ModuleSnapshot
from flsv.training.swapped_optimizer import find_optimizers, is_optimizer
from flsv.utilities.errors import listed
from flsv.utilities.object_states import ObjectState, TensorState, hidden_state_of, states_of
from flsv.utilities.reachable import GENERATORS, Part, is_closed, walk

#: Types of objects that are not a client's, or that are shared on purpose.
SHARED_TYPES = (
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
#: Types that the trial does not compare: generators are swapped between clients.
_SKIPPED_TYPES = (*SHARED_TYPES, *GENERATORS)
#: Larger tensors are compared by their sums and norms.
_MAX_COMPARED_ENTRIES = 1000


class EntryTrial:
    """Check that a process's first local training leaves objects as it finds them, beyond what is swapped.

    Not swapped is what closures, objects of libraries, classes and modules outside of the model hold.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._module = trainer.lightning_module
        self._optimizers = find_optimizers(trainer)
        self._initial_values = self._optimizer_values()
        self._initial_states: list[tuple[str, ObjectState]] = []
        for path, value in self._hidden_parts():
            for state in _comparable_states(value):
                self._initial_states.append((path, state))

    def warn_of_changes(self) -> None:
        """Name what the local training has changed."""
        changed_paths = []
        for path, value in self._optimizer_values().items():
            if self._initial_values.get(path) is not value:
                changed_paths.append(path)
        for path, initial_state in self._initial_states:
            if not initial_state.is_unchanged():
                changed_paths.append(path)
        if changed_paths:
            names = listed(dict.fromkeys(changed_paths))
            rank_zero_warn(
                f"flsv: training changes {names} of {type(self._module).__name__}, which passes from client to "
                "client, or from round to round at a site, so that what a client learns may depend on what was "
                "trained before in this process. Keep it in an attribute that holds numbers, tensors, collections of "
                "these or layers. To share it on purpose, hold it in a types.SimpleNamespace."
            )

    def _optimizer_values(self) -> dict[str, Any]:
        values = {}
        for swapped_optimizer in self._optimizers:
            for path, value in swapped_optimizer.hidden_values().items():
                if not isinstance(value, _SKIPPED_TYPES):
                    values[path] = value
        return values

    def _hidden_parts(self) -> Iterator[Part]:
        """Yield ``(path, object)`` of everything that is not swapped between clients."""
        # What a client takes with it is swapped: the module's attributes and tensors, and objects of some types.
        module = self._module
        snapshot = ModuleSnapshot(module)
        swapped_ids = set(snapshot.visited)
        roots = dict(self._optimizer_values())
        for path, value in snapshot.originals.items():
            if path in snapshot.values:
                swapped_ids.add(id(value))
            elif id(value) not in swapped_ids and not is_optimizer(value):
                roots[f"module.{path}"] = value
        for value in (*module.modules(), *module.parameters(), *module.buffers()):
            swapped_ids.add(id(value))

        for layer in module.modules():
            layer_class = type(layer)
            if not is_closed(layer_class):
                roots[f"the class {layer_class.__name__}"] = layer_class
        for root_path, root in roots.items():
            # The walk does not enter objects of these types and ids, but yields them.
            parts = walk(root, root_path, closed=_SKIPPED_TYPES, closed_ids=swapped_ids)
            for path, value in parts:
                is_skipped = id(value) in swapped_ids or isinstance(value, _SKIPPED_TYPES)
                if not is_skipped:
                    yield path, value


def _comparable_states(value: object) -> list[ObjectState]:
    """Return the states of an object that can be compared with later ones."""
    if isinstance(value, Tensor):
        if value.numel() > _MAX_COMPARED_ENTRIES:
            return [_NormState(value)]
        return [TensorState(value)]
    states = list(states_of(value))
    hidden_state = None
    with suppress(Exception):  # an object's own __reduce__ may raise any error
        hidden_state = hidden_state_of(value)
    if hidden_state is not None:
        states.append(hidden_state)
    return states


class _NormState(ObjectState):
    """A large tensor's norm and sum. Nothing is copied."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._norm_and_sum = self._current_norm_and_sum()

    def is_unchanged(self) -> bool:
        return torch.equal(self._current_norm_and_sum(), self._norm_and_sum)

    def restore(self) -> None:
        pass

    def _current_norm_and_sum(self) -> Tensor:
        values = self._tensor.detach()
        if values.is_complex():
            values = torch.view_as_real(values)
        return norms_and_sums([values.double()])


@torch.no_grad()
def norms_and_sums(tensors: Iterable[Tensor]) -> Tensor:
    """Return the tensors' norms and sums ``[2, n]``, by which a later change is detected."""
    float_tensors = []
    for tensor in tensors:
        if tensor.is_floating_point():
            float_tensors.append(tensor)
        else:  # only real numbers are compared
            placeholder = tensor.new_zeros(1, dtype=torch.float32)
            float_tensors.append(placeholder)
    if not float_tensors:
        return torch.empty(2, 0)
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(float_tensors)])
    sums = torch.stack([tensor.sum().double() for tensor in float_tensors])
    return torch.stack([norms, sums]).nan_to_num()  # NaN equals NaN in a comparison of these
