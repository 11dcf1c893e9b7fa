"""ModuleSnapshot: copies the state of a module that is not in its model vector, and restores it.

It includes the attributes of the user's data module, except its data. Plain values are copied, other objects are
referenced. Torchmetrics metrics are not included: they describe the round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from flsv._lightning.private import trainer_of
from flsv.data import FederatedDataModule
from flsv.isolation.reachable import LIBRARIES, attributes_and_slots, package_of
from flsv.training.swapped_optimizer import is_optimizer
from flsv.utilities.plain_values import (
    CONSTANT_TYPES,
    are_equal,
    copied,
    has_floats,
    is_dense,
    is_large,
    is_plain,
    packed,
    unpacked,
)

#: Plain values by path, such as ``"encoder.temperature"``.
ValuesByPath = dict[str, Any]
#: ``{"buffers": values, "attributes": values, "structure": {path: [flag, description]}}``.
SnapshotState = dict[str, dict[str, Any]]

_CONSTANTS = frozenset(CONSTANT_TYPES)
#: Names of the dictionaries and sets in which torch stores a layer's parameters, buffers, layers and hooks.
_TABLES = [_name for _name, _value in vars(nn.Module()).items() if isinstance(_value, dict | set)]
#: Attributes in which torch stores a parameter's hooks.
HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
#: Attributes that every LightningModule has: they are not a model's state.
_LIGHTNINGS_ATTRIBUTES = frozenset(vars(L.LightningModule()))
#: Path of the user's data module.
DATA_PATH = "trainer.datamodule"
#: Attributes that every data module has, or has in a fit.
_ATTRIBUTES_OF_DATA_MODULES = frozenset({*vars(L.LightningDataModule()), "train_dataloader"})
#: Types of objects whose attributes are not a client's.
_TYPES_WITHOUT_CLIENT_STATE = (
    nn.Module,
    Tensor,
    type,
    L.Trainer,
    L.Callback,
    L.LightningDataModule,
    Dataset,
    DataLoader,
)
_MISSING = object()


class ModuleSnapshot:
    """Copy of the module's state outside its vector. :meth:`restore` writes it back.

    Attributes:
        values: copies of buffers outside of the vector, and of plain values in attributes, by path.
        structure: ``[flag, description]`` of layers (training mode) and parameters (``requires_grad``), by path.
        owners: layers, parameters and objects by path.
        buffers: ``(layer, name)`` of buffers outside of the vector, by path.
        originals: attributes by path. Plain ones may have changed since.
        visited: ids of the layers, parameters and objects whose content is restored.
    """

    def __init__(self, module: nn.Module) -> None:
        # By path: copies of plain values, [flag, description] of each layer and parameter, the objects that have
        # attributes, (layer, name) of each buffer, and the attributes themselves.
        self.values: ValuesByPath = {}
        self.structure: dict[str, list[Any]] = {}
        self.owners: dict[str, Any] = {}
        self.buffers: dict[str, Any] = {}
        self.originals: dict[str, Any] = {}
        self.visited: set[int] = set()  # the ids of these objects
        self._module = module
        self._module_addresses: set[int] | None = None  # of its tensors, None until they are needed
        # Each (layer's attributes, its dictionaries and sets by name), since a client may assign new ones.
        self._tables_of_layers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        # Each (dictionary or set of a layer or parameter, copy of it).
        self._table_copies: list[Any] = []
        # Each (parameter, name of an attribute with hooks, hooks).
        self._hooks: list[Any] = []
        self._containers: list[_Container] = []
        self._leaves_out_large_values = False
        # These fill the collections above.
        self._add_layer("", module)
        self._add_data_module()

    def _add_data_module(self) -> None:
        """Record the attributes of the user's data module. A FederatedDataModule has no state."""
        data = getattr(trainer_of(self._module), "datamodule", None)
        if data is None or isinstance(data, FederatedDataModule):
            return
        self._leaves_out_large_values = True
        self.owners[DATA_PATH] = data
        self._add_container(vars(data), f"{DATA_PATH}.", names_to_skip=_ATTRIBUTES_OF_DATA_MODULES)

    def _add_layer(self, path: str, layer: nn.Module) -> None:
        """Record a layer and the layers in it: their tables, hooks, buffers, parameters and attributes."""
        self.visited.add(id(layer))
        num_hooks = self._add_tables(layer)
        description = f"{type(layer).__name__} with {num_hooks} hooks"
        self.structure[path] = [layer.training, description]
        self.owners[path] = layer

        prefix = f"{path}." if path else ""
        self._add_buffers(prefix, layer)
        for name, parameter in layer._parameters.items():
            if parameter is not None and id(parameter) not in self.visited:
                self._add_parameter(prefix + name, parameter)
        self._add_container(vars(layer), prefix, names_to_skip=_LIGHTNINGS_ATTRIBUTES)
        for name, child in layer._modules.items():
            if child is None or isinstance(child, Metric):
                continue
            if id(child) not in self.visited:
                self._add_layer(prefix + name, child)

    def _add_tables(self, layer: nn.Module) -> int:
        """Record torch's own tables of a layer, and return how many hooks are in them."""
        num_hooks = 0
        tables: dict[str, Any] = {}
        self._tables_of_layers.append((vars(layer), tables))
        for name in _TABLES:
            table = vars(layer).get(name)
            # A scripted layer has some of them in its compiled code, where they never change.
            if isinstance(table, dict | set):
                tables[name] = table
                self._table_copies.append((table, table.copy()))
                if name.endswith("_hooks"):
                    num_hooks += len(table)
        return num_hooks

    def _add_buffers(self, prefix: str, layer: nn.Module) -> None:
        for name, buffer in layer._buffers.items():
            is_saved = name not in layer._non_persistent_buffers_set
            if is_saved and (buffer is None or has_floats(buffer)):
                continue  # it is part of the vector
            self.buffers[prefix + name] = (layer, name)
            self.values[prefix + name] = None if buffer is None else copied(buffer)

    def _add_parameter(self, path: str, parameter: nn.Parameter) -> None:
        self.visited.add(id(parameter))
        num_hooks = 0
        for name in HOOKS_OF_PARAMETERS:
            hooks = dict(getattr(parameter, name, None) or {})
            self._hooks.append((parameter, name, hooks))
            num_hooks += len(hooks)
        description = f"{type(parameter).__name__} with {num_hooks} hooks"
        self.structure[path] = [parameter.requires_grad, description]
        self.owners[path] = parameter
        attributes = vars(parameter)
        self._table_copies.append((attributes, attributes.copy()))
        if attributes:
            self._add_container(attributes, f"{path}.")

    def _add_container(
        self, owner: Any, prefix: str, names_to_skip: Set[str] = frozenset()
    ) -> None:
        items = owner.copy() if type(owner) is dict else attributes_and_slots(owner)
        for name in names_to_skip & items.keys():
            del items[name]
        paths = {name: f"{prefix}{name}" for name in items}
        self._containers.append(_Container(owner, names_to_skip, originals=items, paths=paths))
        for name, value in items.items():
            if self._leaves_out_large_values and is_large(value):
                continue
            path = paths[name]
            self.originals[path] = value
            if type(value) in _CONSTANTS:  # as most values are
                self.values[path] = value
            else:
                self._add_value(path, value)

    def _add_value(self, path: str, value: Any) -> None:
        kind: Any = type(value)
        if kind is tuple and _CONSTANTS.issuperset(map(type, value)):
            self.values[path] = value
        elif is_plain(value) and not self._shares_memory(value):
            self.values[path] = copied(value)
        elif id(value) in self.visited:
            return
        elif _is_class_of_program(kind) and not is_optimizer(value):
            self.visited.add(id(value))
            self.owners[path] = value
            self._add_container(value, f"{path}.")

    def _shares_memory(self, value: Any) -> bool:
        """Return whether a value has tensors in the memory of a parameter or buffer."""
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        if not tensors:
            return False
        if self._module_addresses is None:
            parameters = self._module.parameters()
            module_tensors = chain(parameters, self._module.buffers())
            self._module_addresses = set(map(_memory_address, module_tensors))
        return any(_memory_address(tensor) in self._module_addresses for tensor in tensors)

    def state(self) -> SnapshotState:
        """Return values and structure by path, without copying them."""
        attributes = dict(self.values)
        buffers = {path: attributes.pop(path) for path in self.buffers}
        return {"buffers": buffers, "attributes": attributes, "structure": self.structure}

    def _restore_tables(self) -> None:
        for attributes, tables in self._tables_of_layers:
            attributes.update(tables)
        for table, table_copy in self._table_copies:
            is_unchanged = list(table) == list(table_copy)
            if is_unchanged and isinstance(table, dict):
                is_unchanged = all(table[name] is item for name, item in table_copy.items())
            if not is_unchanged:
                table.clear()
                table.update(table_copy)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the module's layers, hooks and attributes from the snapshot, with the present ``values``."""
        self._restore_tables()
        for parameter, name, initial_hooks in self._hooks:
            hooks = getattr(parameter, name, None)
            if hooks is not None:
                hooks.clear()
                hooks.update(initial_hooks)
        for container in self._containers:
            container.restore(self.values)
        self._restore_flags()
        for path, (layer, name) in self.buffers.items():
            layer._buffers[name] = _copied_into(layer._buffers[name], self.values[path])

    def _restore_flags(self) -> None:
        """Restore layers' training modes, and whether parameters require gradients."""
        for path, (flag, _) in self.structure.items():
            part = self.owners[path]
            if isinstance(part, torch.jit.ScriptModule):
                part.training = flag
            elif isinstance(part, nn.Module):
                vars(part)["training"] = flag
            elif part.requires_grad != flag:
                part.requires_grad = flag


class _Container(NamedTuple):
    """Items of a dictionary, or attributes of an object, except those named in ``names_to_skip``."""

    owner: Any
    names_to_skip: Set[str]
    originals: dict[str, Any]
    paths: dict[str, str]  # by name; the snapshot has plain values by path

    def restore(self, values: ValuesByPath) -> None:
        """Write the items, with plain ``values`` by path. Delete items that are new."""
        if type(self.owner) is dict:
            items_now: dict[str, Any] = self.owner.copy()
            set_item: Any = dict.__setitem__
            delete_item: Any = dict.__delitem__
        else:
            items_now = attributes_and_slots(self.owner)
            set_item = object.__setattr__
            delete_item = object.__delattr__
        restored = self._restored_items(items_now, values)

        for name in items_now.keys() - restored.keys() - self.names_to_skip:
            if not is_optimizer(items_now[name]):
                delete_item(self.owner, name)
        for name, item in restored.items():
            if item is not items_now.get(name, _MISSING):
                set_item(self.owner, name, item)

    def _restored_items(self, items_now: dict[str, Any], values: ValuesByPath) -> dict[str, Any]:
        """Return the items to have. Those that have not changed are the objects that they are now."""
        restored = {}
        for name, original in self.originals.items():
            item_now = items_now.get(name, _MISSING)
            saved_value = values.get(self.paths[name], _MISSING)
            if saved_value is _MISSING:  # the snapshot has no copy of it
                is_new_optimizer = item_now is not original and is_optimizer(item_now)
                # Optimizers are swapped by name elsewhere.
                restored[name] = item_now if is_new_optimizer else original
            elif item_now is saved_value or are_equal(item_now, saved_value):
                restored[name] = item_now
            else:
                restored[name] = _with_items_of(original, saved_value)
        return restored


# ---- checkpoints and other processes


def write_state(module: nn.Module, state: SnapshotState) -> list[str]:
    """Write a state of :meth:`ModuleSnapshot.state` into another module. Describe the parts that are missing there."""
    _register_buffers(module, state["buffers"])
    snapshot = ModuleSnapshot(module)
    differences = _write_flags(snapshot.structure, state["structure"])
    new_values = {}  # those that the module does not have yet
    for path, value in {**state["attributes"], **state["buffers"]}.items():
        if path in snapshot.originals or path in snapshot.buffers:
            snapshot.values[path] = value
        else:
            new_values[path] = value
    snapshot.restore()

    for path, value in new_values.items():
        owner_path, _, name = path.rpartition(".")
        owner = snapshot.owners.get(owner_path)
        if owner is None:
            differences.append(f"{path} is missing")
        else:
            object.__setattr__(owner, name, copied(value))
    return differences


def _register_buffers(module: nn.Module, buffers: ValuesByPath) -> None:
    """Register buffers by path that the module's layers do not have yet."""
    layers = dict(module.named_modules())
    for path, buffer in buffers.items():
        owner_path, _, name = path.rpartition(".")
        layer = layers.get(owner_path)
        if layer is not None and name not in layer._buffers:
            layer.register_buffer(name, buffer, persistent=False)


def _write_flags(structure: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """Write the flags of a saved structure into another one. Describe the parts that differ."""
    differences = []
    for path, (flag, saved_description) in saved.items():
        part = structure.get(path, [flag, "missing"])
        _, description = part
        if description == saved_description:
            part[0] = flag
        else:
            name = path or "the module"
            differences.append(f"{name} was {saved_description} and is {description}")
    return differences


def saved_state(state: SnapshotState) -> SnapshotState:
    """Return the values that a checkpoint can hold, in types that can be loaded as weights only."""
    attributes = {}
    for path, value in state["attributes"].items():
        try:
            attributes[path] = packed(value)
        except TypeError:
            continue  # a resumed module has the value that its __init__ sets
    return {**state, "attributes": attributes}


def loaded_state(saved: SnapshotState, device: torch.device) -> SnapshotState:
    """Undo :func:`saved_state`, on a device."""
    attributes = {path: unpacked(value) for path, value in saved["attributes"].items()}
    state = {**saved, "attributes": attributes}
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), state)


# ---- objects and tensors


@lru_cache(maxsize=10_000)
def _is_class_of_program(kind: Any) -> bool:
    if issubclass(kind, _TYPES_WITHOUT_CLIENT_STATE):
        return False
    return package_of(kind) not in LIBRARIES


def _copied_into(buffer: Tensor | None, value: Tensor | None) -> Tensor | None:
    """Return ``value`` in the memory of ``buffer``, or a copy of it if shapes or types differ."""
    if value is None or value is buffer:
        return value
    if buffer is None or not is_dense(value) or not is_dense(buffer):
        return copied(value)
    if buffer.shape == value.shape and buffer.dtype == value.dtype:
        return buffer.copy_(value)
    return value.to(buffer.device, copy=True)


def _with_items_of(original: Any, value: Any) -> Any:
    """Replace the items of the collection ``original`` by copies of those of ``value``, and return it. For objects of
    other types, which may be in use elsewhere, such as a batch of the data, return a copy of ``value``.
    """
    new_value = copied(value)
    is_collection = isinstance(original, list | dict | set | deque)
    if not is_collection or type(original) is not type(value):
        return new_value
    original.clear()
    if isinstance(original, dict | set):
        original.update(new_value)
    else:
        original.extend(new_value)
    return original


def _memory_address(tensor: Tensor) -> int:
    is_dense = tensor.layout == torch.strided
    if is_dense:
        return tensor.untyped_storage().data_ptr()
    return id(tensor)
