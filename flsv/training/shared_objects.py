"""SharedObjectCheck: warns of objects that clients share through the module and that a local training changes."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from flsv._lightning.patches import callbacks_of
from flsv.isolation.pickles import Pickled, pickled
from flsv.isolation.reachable import GENERATORS, LIBRARIES, package_of
from flsv.training.module_snapshot import ModuleSnapshot
from flsv.training.swapped_optimizer import find_optimizers
from flsv.utilities.errors import listed
from flsv.utilities.plain_values import digest

#: Types of objects that do not belong to a client, or that are shared on purpose.
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
    torch.jit.ScriptModule,  # its tensors are the module's
)
#: Digest and number of bytes of a tensor's memory.
Memory = tuple[bytes, int]


class SharedObjectCheck:
    """Check that a process's first local training does not change objects that are not swapped between clients.

    These are the objects that closures, library objects, classes and modules outside the model hold. Their pickles
    before and after the training are compared. Objects that cannot be pickled are not checked.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._module = trainer.lightning_module
        self._optimizers = find_optimizers(trainer)
        snapshot = ModuleSnapshot(self._module)
        # Training may replace attributes of the module, so the objects from before the training are compared.
        self._objects = unswapped_objects(snapshot)
        self._swapped_ids = swapped_ids(snapshot, self._module)
        self._initial_contents = self._contents()
        self._callbacks: list[L.Callback] = []
        self._initial_weights: list[Memory] = []
        self._initial_memory: set[Memory] = set()
        for callback in callbacks_of(trainer):
            if package_of(type(callback)) not in LIBRARIES:
                self._add_callback(callback)

    def _add_callback(self, callback: L.Callback) -> None:
        """Record the memory of a callback's tensors, and of the module's weights."""
        if not self._callbacks:
            self._initial_weights = _memory_of([w.detach() for w in self._module.parameters()])
            self._initial_memory.update(self._initial_weights)
        self._callbacks.append(callback)
        self._initial_memory.update(_memory_of(vars(callback), self._swapped_ids))

    def warn_of_changes(self) -> None:
        """Warn of the objects that the local training has changed."""
        contents = self._contents()
        changed_paths = [
            path
            for path, initial_content in self._initial_contents.items()
            if contents.get(path) != initial_content
        ]
        if changed_paths:
            rank_zero_warn(
                f"flsv: training changes {listed(changed_paths)} of {type(self._module).__name__}. All clients share "
                "this (at a site, all rounds), so a client's result may depend on what was trained before in this "
                "process. Keep it in an attribute that holds numbers, tensors, layers or collections of these. To "
                "share it on purpose, keep it in a types.SimpleNamespace."
            )

        self._warn_of_averages()

    def _warn_of_averages(self) -> None:
        """Warn of callbacks that have got copies of all weights which are not the initial ones, such as an average."""
        # How many tensors have each size.
        weight_sizes = Counter(size for _, size in self._initial_weights)
        for callback in self._callbacks:
            memory_now = _memory_of(vars(callback), self._swapped_ids)
            new_memory = [memory for memory in memory_now if memory not in self._initial_memory]
            new_sizes = Counter(size for _, size in new_memory)
            has_changed_weights = weight_sizes <= new_sizes  # a new tensor for each weight
            if has_changed_weights:
                name = type(callback).__name__
                rank_zero_warn(
                    f"flsv: {name} changes weights of its own while a client trains, such as an average. They are one "
                    "chain over all clients, in the order in which they train, and clients' values score the models "
                    "without them. To average global models, use Lightning's EMAWeightAveraging in place of "
                    f"{name}, or change the weights in on_train_epoch_end, once a round."
                )

    def _contents(self) -> dict[str, Any]:
        """Return the contents of everything that is not swapped between clients, by path."""
        objects = dict(self._objects)
        for swapped_optimizer in self._optimizers:
            objects |= swapped_optimizer.hidden_values()
        for layer in self._module.modules():
            objects |= _values_of_class(type(layer))
        return {path: content_of(value, self._swapped_ids) for path, value in objects.items()}


def unswapped_objects(snapshot: ModuleSnapshot) -> dict[str, Any]:
    """Return the objects in attributes of the module that are not swapped between clients, by path."""
    objects = {}
    for path, value in snapshot.originals.items():
        is_swapped = path in snapshot.values or id(value) in snapshot.visited
        if not is_swapped:
            objects[f"module.{path}"] = value
    return objects


def swapped_ids(snapshot: ModuleSnapshot, module: nn.Module) -> set[int]:
    """Return the ids of what is swapped between clients: what a snapshot of the module restores, and its tensors."""
    return {*snapshot.visited, *map(id, module.parameters()), *map(id, module.buffers())}


def _values_of_class(kind: type) -> dict[str, Any]:
    """Return the class attributes of a user's class and its bases, without functions, by path."""
    values = {}
    for base in kind.__mro__:
        if package_of(base) in LIBRARIES:
            continue
        for name, value in vars(base).items():
            is_descriptor = hasattr(type(value), "__get__")
            if not is_descriptor and not name.startswith("__"):
                values[f"{base.__name__}.{name}"] = value
    return values


def content_of(
    value: Any,
    swapped_ids: Collection[int],
    shared_types: tuple[type, ...] = (*SHARED_TYPES, *GENERATORS),
) -> Any:
    """Return a digest of an object without what is swapped or shared in it. None if it cannot be pickled."""
    pickled_value = _pickled_without(value, swapped_ids, shared_types)
    if pickled_value is None:
        return None
    shared_ids = list(map(id, pickled_value.shared))
    return pickled_value.bytes, digest(pickled_value.storages), shared_ids


def _memory_of(value: Any, swapped_ids: Collection[int] = ()) -> list[Memory]:
    """Return the memory of each tensor in an object. Nothing if the object cannot be pickled."""
    pickled_value = _pickled_without(value, swapped_ids)
    if pickled_value is None:
        return []
    return [(digest([storage]), storage.numel()) for storage in pickled_value.storages]


def _pickled_without(
    value: Any,
    swapped_ids: Collection[int],
    shared_types: tuple[type, ...] = (*SHARED_TYPES, *GENERATORS),
) -> Pickled | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # iterators warn that their pickling is deprecated
        try:
            return pickled(value, shared_ids=swapped_ids, shared_types=shared_types)
        except Exception:  # whatever an object's own code raises
            return None
