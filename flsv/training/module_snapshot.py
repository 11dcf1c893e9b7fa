"""ModuleSnapshot: what a module holds beside its model vector at one time, and the way back to it.

Plain values are copied, other objects are referred to. A torchmetrics metric is left as it is: it describes the round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Set
from functools import lru_cache
from itertools import chain
from operator import is_
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from flsv.training.swapped_optimizer import is_optimizer
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.plain_values import (
    CONSTANT_TYPES,
    are_equal,
    copied,
    is_plain,
    packed,
    unpacked,
)
from flsv.utilities.reachable import LIBRARIES, attributes_of, facts_of, package_of, slots_of_object

#: Plain values by path, such as ``"encoder.temperature"``.
Values = dict[str, Any]
#: ``{"buffers": values, "attributes": values, "structure": {path: [flag, description]}}``.
State = dict[str, dict[str, Any]]

#: Entries of a dictionary or list by key or position.
Entries = dict[Any, Any]

_CONSTANTS = frozenset(CONSTANT_TYPES)
#: Names of the dictionaries and sets in which torch stores a layer's parameters, buffers, layers and hooks.
_TABLES: list[str] = []
for _name, _value in vars(nn.Module()).items():
    if isinstance(_value, dict | set):
        _TABLES.append(_name)
#: Attributes in which torch stores a parameter's hooks.
_HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
#: Attributes that every LightningModule has: they are not a model's state.
_LIGHTNINGS_ATTRIBUTES = frozenset(vars(L.LightningModule()))
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
    """What a module holds beside its vector, at the time when this is made. :meth:`restore` writes it back.

    Attributes:
        values: copies of buffers outside of the vector, and of plain values in attributes, by path.
        structure: ``[flag, description]`` of layers (training mode) and parameters (``requires_grad``), by path.
        owners: layers, parameters and objects by path.
        buffers: ``(layer, name)`` of buffers outside of the vector, by path.
    """

    def __init__(self, module: nn.Module) -> None:
        self.values: Values = {}
        self.structure: dict[str, list[Any]] = {}
        self.owners: dict[str, Any] = {}
        self.buffers: dict[str, Any] = {}
        self._module = module
        self._visited: set[int] = set()
        self._addresses: set[int] | None = None
        # Dictionaries and sets of layers and parameters, with their entries.
        self._tables: list[Any] = []
        # Each (parameter, name of an attribute with hooks, hooks).
        self._hooks: list[Any] = []
        self._namespaces: list[_Namespace] = []
        self._add_layer("", module)

    def _add_layer(self, path: str, layer: nn.Module) -> None:
        self.owners[path] = layer
        self._visited.add(id(layer))
        attributes = vars(layer)
        num_hooks = 0
        for name in _TABLES:
            table = attributes.get(name, {})  # a scripted layer lacks some
            self._tables.append((table, table.copy()))
            if name.endswith("_hooks"):
                num_hooks += len(table)
        description = f"{type(layer).__name__} with {num_hooks} hooks"
        self.structure[path] = [layer.training, description]

        prefix = f"{path}." if path else ""
        self._add_buffers(prefix, layer)
        for name, parameter in layer._parameters.items():
            if parameter is not None and id(parameter) not in self._visited:
                self._add_parameter(prefix + name, parameter)
        namespace = _Namespace(attributes, _LIGHTNINGS_ATTRIBUTES)
        self._add_namespace(namespace, prefix)
        for name, child in layer._modules.items():
            if child is None or isinstance(child, Metric):
                continue
            if id(child) not in self._visited:
                self._add_layer(prefix + name, child)

    def _add_buffers(self, prefix: str, layer: nn.Module) -> None:
        for name, buffer in layer._buffers.items():
            is_saved = name not in layer._non_persistent_buffers_set
            if is_saved and (buffer is None or _has_floats(buffer)):
                continue  # a part of the vector
            path = prefix + name
            self.buffers[path] = (layer, name)
            self.values[path] = None if buffer is None else copied(buffer)

    def _add_parameter(self, path: str, parameter: nn.Parameter) -> None:
        self.owners[path] = parameter
        self._visited.add(id(parameter))
        num_hooks = 0
        for name in _HOOKS_OF_PARAMETERS:
            hooks = dict(getattr(parameter, name, None) or {})
            self._hooks.append((parameter, name, hooks))
            num_hooks += len(hooks)
        description = f"{type(parameter).__name__} with {num_hooks} hooks"
        self.structure[path] = [parameter.requires_grad, description]

        attributes = vars(parameter)
        self._tables.append((attributes, attributes.copy()))
        if attributes:
            self._add_namespace(_Namespace(attributes), f"{path}.")

    def _add_namespace(
        self,
        namespace: _Namespace,
        prefix: str,
        suffix: str = "",
    ) -> None:
        self._namespaces.append(namespace)
        for name, value in namespace.originals.items():
            path = f"{prefix}{name!r}{suffix}" if suffix else f"{prefix}{name}"
            namespace.paths[name] = path
            self._add_value(path, value)

    def _add_value(self, path: str, value: Any) -> None:
        """Add a plain value, or the content of an object of the program or of a collection of such objects."""
        kind = type(value)
        if kind in _CONSTANTS:
            self.values[path] = value
        elif is_plain(value) and not self._shares_memory(value):
            self.values[path] = copied(value)
        elif id(value) not in self._visited:
            self._add_content(path, value)

    def _add_content(self, path: str, value: Any) -> None:
        """Add the content of an object of the program, or of a collection of such objects."""
        kind = type(value)
        is_collection = kind is dict or kind is list
        if is_collection:
            self._visited.add(id(value))
            namespace = _List(value) if kind is list else _Namespace(value)
            self._add_namespace(namespace, f"{path}[", suffix="]")
        elif _is_class_of_program(kind) and not is_optimizer(value):
            self._visited.add(id(value))
            self.owners[path] = value
            self._add_namespace(_Namespace(attributes_of(value)), f"{path}.")
            if facts_of(kind).slots:
                self._add_namespace(_Slots(value), f"{path}.")

    def _shares_memory(self, value: Any) -> bool:
        """Return whether a value has tensors in the memory of a parameter or buffer."""
        tensors = _tensors_in(value)
        if not tensors:
            return False
        if self._addresses is None:
            parameters = self._module.parameters()
            module_tensors = chain(parameters, self._module.buffers())
            self._addresses = set(map(_memory_address, module_tensors))
        return any(_memory_address(tensor) in self._addresses for tensor in tensors)

    def state(self) -> State:
        """Return values and structure by path, without copying them."""
        buffers = {}
        attributes = {}
        for path, value in self.values.items():
            if path in self.buffers:
                buffers[path] = value
            else:
                attributes[path] = value
        return {
            "buffers": buffers,
            "attributes": attributes,
            "structure": self.structure,
        }

    def references(self) -> Iterator[tuple[str, Any]]:
        """Yield ``(path, value)`` of attributes whose content the snapshot does not cover."""
        for namespace in self._namespaces:
            for name, path in namespace.paths.items():
                value = namespace.originals[name]
                if path not in self.values and id(value) not in self._visited:
                    yield path, value

    def ids(self) -> set[int]:
        """Return the ids of the objects whose content :meth:`restore` restores."""
        object_ids = set(self._visited)
        for namespace in self._namespaces:
            for name, path in namespace.paths.items():
                if path in self.values:
                    object_ids.add(id(namespace.originals[name]))
        return object_ids

    @torch.no_grad()
    def restore(self) -> None:
        """Let the module hold again what it held when the snapshot was made, with ``values``."""
        for table, entries in self._tables:
            if table or entries:
                _restore_table(table, entries)
        for parameter, name, entries in self._hooks:
            hooks = getattr(parameter, name, None)
            if hooks is not None:
                _restore_table(hooks, entries)
        self._restore_flags()
        for path, (layer, name) in self.buffers.items():
            _write_buffer(layer, name, self.values[path])
        for namespace in self._namespaces:
            namespace.restore(self.values)

    def _restore_flags(self) -> None:
        for path, (flag, _) in self.structure.items():
            owner = self.owners[path]
            if isinstance(owner, nn.Module):
                vars(owner)["training"] = flag
            elif owner.requires_grad != flag:
                owner.requires_grad = flag


class _Namespace:
    """Entries of a dictionary, by reference, without those of ``unswapped`` names."""

    def __init__(
        self,
        container: Any,
        unswapped: Set[str] = frozenset(),
    ) -> None:
        self._container = container
        self._unswapped = unswapped
        self.originals = self._entries()
        # Paths by name. The snapshot has plain values by path.
        self.paths: Entries = {}

    def restore(self, values: Values) -> None:
        """Write the entries, with plain ``values`` by path. Delete new ones."""
        present = self._entries()
        restored = {}
        for name, original in self.originals.items():
            entry = present.get(name, _MISSING)
            value = values.get(self.paths[name], _MISSING)
            if value is _MISSING:
                # An optimizer is swapped by its name.
                is_kept = entry is original or is_optimizer(entry)
                restored[name] = entry if is_kept else original
            elif entry is value or are_equal(entry, value):
                restored[name] = entry
            else:
                restored[name] = _refilled(original, value)
        self._write(present, restored)

    def _entries(self) -> Entries:
        entries = dict(self._container)
        for name in self._unswapped & entries.keys():
            del entries[name]
        return entries

    def _write(self, present: Entries, restored: Entries) -> None:
        for name, entry in present.items():
            if name not in restored and not is_optimizer(entry):
                self._delete(name)
        for name, entry in restored.items():
            if entry is not present.get(name, _MISSING):
                self._set(name, entry)

    def _set(self, name: Any, entry: Any) -> None:
        self._container[name] = entry

    def _delete(self, name: Any) -> None:
        del self._container[name]


class _Slots(_Namespace):
    """Attributes of an object that are in ``__slots__``."""

    def _entries(self) -> Entries:
        return dict(slots_of_object(self._container))

    def _set(self, name: Any, entry: Any) -> None:
        object.__setattr__(self._container, name, entry)

    def _delete(self, name: Any) -> None:
        object.__delattr__(self._container, name)


class _List(_Namespace):
    """Entries of a list by their positions."""

    def _entries(self) -> Entries:
        return dict(enumerate(self._container))

    def _write(self, present: Entries, restored: Entries) -> None:
        self._container[:] = restored.values()


# ---- values from checkpoints and other processes


def saved_state(state: State) -> State:
    """Return the values that a checkpoint can hold, in types that can be loaded as weights only."""
    attributes = {}
    for path, value in state["attributes"].items():
        try:
            attributes[path] = packed(value)
        except TypeError:
            continue  # a resumed module has what its __init__ sets
    return {**state, "attributes": attributes}


def resume_state(module: nn.Module, saved: State) -> list[str]:
    """Write a saved state into a module. Name the layers and hooks that this lacks."""
    device = _device_of(module)
    attributes = {}
    for path, value in saved["attributes"].items():
        attributes[path] = tree_map_only(
            Tensor,
            lambda tensor: tensor.to(device),
            unpacked(value),
        )
    state = {**saved, "attributes": attributes}
    return write_state(module, state, is_resumed=True)


def write_state(
    module: nn.Module,
    state: State,
    *,
    is_resumed: bool,
) -> list[str]:
    """Write a checkpoint's or another process's state into a module. Name the layers and hooks that this lacks."""
    snapshot = ModuleSnapshot(module)
    differences = []
    structure = state.get("structure", {})  # version 2.0.0 saves none
    for path, (flag, description) in structure.items():
        present = snapshot.structure.get(path, [flag, "missing"])
        _, present_description = present
        if present_description == description:
            present[0] = flag
        else:
            name = path or "the module"
            differences.append(f"{name} was {description} and is {present_description}")

    values = {**state["attributes"], **state["buffers"]}
    known_paths = snapshot.values.keys()
    new_paths = [path for path in values if path not in known_paths]
    for path in known_paths & values.keys():
        snapshot.values[path] = values[path]
    snapshot.restore()

    for path in new_paths:
        value = values[path]
        owner_path, _, name = path.rpartition(".")
        owner = snapshot.owners.get(owner_path)
        is_entry = name.endswith("]")
        if owner is None or is_entry:
            if value is not None and not is_resumed:
                raise ConfigurationError(
                    f"{owner_path} is an object that {type(module).__name__} makes while a client trains, so that "
                    "another process does not have it. Make it in __init__."
                )
        elif path in state["buffers"]:
            owner.register_buffer(name, None, persistent=False)
            _write_buffer(owner, name, value)
        else:
            object.__setattr__(owner, name, copied(value))
    return differences


# ---- objects and tables


def lists_in(values: Values) -> dict[str, list[Any]]:
    """Return the lists among plain values, and in dictionaries there, by path."""
    lists: dict[str, list[Any]] = {}
    pending = list(values.items())
    while pending:
        path, value = pending.pop()
        if type(value) is list:
            lists[path] = value
        elif isinstance(value, dict):
            for key, entry in value.items():
                pending.append((f"{path}[{key!r}]", entry))
    return lists


@lru_cache(maxsize=10_000)
def _is_class_of_program(kind: Any) -> bool:
    """Return whether a class is no library's, and its objects may hold a client's state."""
    if issubclass(kind, _TYPES_WITHOUT_CLIENT_STATE):
        return False
    return package_of(kind) not in LIBRARIES


def _has_floats(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _restore_table(table: Any, entries: Any) -> None:
    """Let a dictionary or set hold ``entries`` again, in their order."""
    is_unchanged = list(table) == list(entries)
    if is_unchanged and isinstance(table, dict):
        is_unchanged = all(map(is_, table.values(), entries.values()))
    if not is_unchanged:
        table.clear()
        table.update(entries)


def _write_buffer(
    layer: nn.Module,
    name: str,
    value: Tensor | None,
) -> None:
    buffer = layer._buffers[name]
    if value is None:
        layer._buffers[name] = None
        return
    has_place = buffer is not None and buffer.shape == value.shape
    if buffer is not None and has_place and buffer.dtype == value.dtype:
        buffer.copy_(value)
    else:
        device = _device_of(layer)
        layer._buffers[name] = value.to(device, copy=True)


def _refilled(original: Any, value: Any) -> Any:
    """Return a copy of a plain value. If it is a collection, the original one gets its entries."""
    new_value = copied(value)
    is_refillable = isinstance(original, list | dict | set | deque)
    if not is_refillable or type(original) is not type(value):
        # Other objects are not changed in place: they may be in use elsewhere, such as a batch of the data.
        return new_value
    original.clear()
    if isinstance(original, dict | set):
        original.update(new_value)
    else:
        original.extend(new_value)
    return original


def _device_of(module: nn.Module) -> torch.device:
    for tensor in chain(module.parameters(), module.buffers()):
        return tensor.device
    return torch.device("cpu")


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the value if it is a tensor, or the tensors in a collection, nested or not."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    tensors = []
    for entry in value:
        if type(entry) not in _CONSTANTS:
            tensors += _tensors_in(entry)
    return tensors


def _memory_address(tensor: Tensor) -> int:
    is_dense = tensor.layout == torch.strided
    if is_dense:
        return tensor.untyped_storage().data_ptr()
    return id(tensor)
