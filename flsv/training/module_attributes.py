"""ModuleAttributes: plain state in the attributes of a module, its layers and the objects that these hold.

Each client starts with the values of the round's start, and the next round starts with those of the cohort's first
client, as for buffers. A list that grows is often a record, such as the outputs of an epoch: between two rounds it
shows what all clients of this process have added.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from flsv.training.swapped_optimizer import is_optimizer
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.plain_values import are_equal, copied, is_plain, packed, unpacked
from flsv.utilities.reachable import LIBRARIES, facts_of

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


#: Values of attributes by path.
Values = dict[str, Any]
#: Paths and objects.
ObjectsByPath = Iterator[tuple[str, Any]]


class Attribute(NamedTuple):
    """An attribute ``name`` of a layer or an object, ``owner``. The path begins at the module."""

    path: str
    owner: Any
    name: str
    value: Any


class ModuleAttributes:
    """Plain attributes of a module, its layers and the objects that these hold."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._records: dict[str, _Record] = {}
        self._paths: set[str] = set()

    def read(self) -> Values:
        """Return copies of the values by path."""
        values = {}
        for attribute in self._plain_attributes():
            values[attribute.path] = copied(attribute.value)
        return values

    def objects(self) -> list[Attribute]:
        """Return the attributes that hold objects with attributes of their own."""
        attributes = _attributes(self._module)
        return [attribute for attribute in attributes if _is_object(attribute.value)]

    def restore_objects(self, objects: Sequence[Attribute]) -> None:
        """Set the attributes that :meth:`objects` has returned, and delete those of other objects."""
        paths = {attribute.path for attribute in objects}
        for attribute in self.objects():
            if attribute.path not in paths:
                delattr(attribute.owner, attribute.name)
        for attribute in objects:
            if getattr(attribute.owner, attribute.name, None) is not attribute.value:
                setattr(attribute.owner, attribute.name, attribute.value)

    def write(self, values: Values, keeps_others: bool = False) -> None:
        """Write values from :meth:`read` into the module. Unless ``keeps_others``, delete other plain attributes."""
        unwritten = dict(values)
        for attribute in list(self._plain_attributes()):
            if attribute.path in unwritten:
                _set_value(attribute, unwritten.pop(attribute.path))
            elif attribute.path not in self._paths and not keeps_others:
                delattr(attribute.owner, attribute.name)  # new since the round's start
        if not unwritten:
            return

        # The module has no such attributes now.
        owners = dict(_objects_by_path(self._module))
        for path, value in unwritten.items():
            owner_path, _, name = path.rpartition(".")
            if owner_path in owners:
                setattr(owners[owner_path], name, copied(value))
            elif value is not None and not keeps_others:
                raise ConfigurationError(
                    f"{owner_path} is an object that {type(self._module).__name__} makes while a client trains, so "
                    "that another process does not have it. Make it in __init__."
                )

    def ids(self) -> set[int]:
        """Return the ids of the objects whose content each client finds as the round's start had it."""
        object_ids = set()
        for _, layer_or_object in _objects_by_path(self._module):
            object_ids.add(id(layer_or_object))
        for attribute in _attributes(self._module):
            if is_plain(attribute.value):
                object_ids.add(id(attribute.value))
        return object_ids

    def hidden_values(self, module_name: str) -> Iterator[tuple[str, Any]]:
        """Yield ``(path, value)`` of the attributes that are neither plain nor objects with attributes of their own.

        Paths begin with ``module_name``.
        """
        for attribute in _attributes(self._module):
            if not is_plain(attribute.value) and not _is_object(attribute.value):
                yield f"{module_name}.{attribute.path}", attribute.value

    # ---- lists that grow

    def begin_round(self) -> None:
        """Take out of each list what clients other than the cohort's first have added in earlier rounds."""
        self._paths = {attribute.path for attribute in _attributes(self._module)}
        for path, entries in self._lists_by_path():
            record = self._records.get(path)
            if record is None or len(entries) != record.length_at_end:
                # The list is new, or a hook has changed it since the last round.
                record = _Record(list(entries))
                self._records[path] = record
            else:
                entries[:] = record.entries_of_first_client
            record.length_at_start = len(entries)

    def end_client(self) -> None:
        """Remember what a client has added to each list."""
        for path, entries in self._lists_by_path():
            record = self._records.setdefault(path, _Record([]))
            record.entries_of_all += entries[record.length_at_start :]

    def end_round(self) -> None:
        """Give each list, for hooks of the round's end, what all clients have added."""
        for path, entries in self._lists_by_path():
            record = self._records.get(path)
            if record is not None:
                # At this point the module has the lists of the cohort's first client, which the next round starts with.
                record.entries_of_first_client = list(entries)
                # `end_client` has added each client's entries to those of all.
                record.length_at_end = len(record.entries_of_all)
                entries[:] = record.entries_of_all  # in place: the module holds this list

    def values_for_next_round(self, values: Values) -> Values:
        """Return ``values`` with the lists as the next round starts with them."""
        values_of_first_client = {}
        for attribute_path, value in values.items():
            if isinstance(value, list | dict):
                value = copied(value)
            # The lists within the copy are changed in place.
            for path, entries in _lists_in(attribute_path, value):
                record = self._records.get(path)
                if record is None or len(entries) != record.length_at_end:
                    continue  # the list is new, or a hook has changed it since the round's end
                entries[:] = record.entries_of_first_client
            values_of_first_client[attribute_path] = value
        return values_of_first_client

    def _lists_by_path(self) -> list[tuple[str, list[Any]]]:
        """Return the lists in attributes, and in dictionaries in attributes, by path."""
        lists: list[tuple[str, list[Any]]] = []
        for attribute in _attributes(self._module):
            lists += _lists_in(attribute.path, attribute.value)
        return lists

    def _plain_attributes(self) -> Iterator[Attribute]:
        """Yield the plain attributes, without those that share the memory of a parameter or buffer."""
        module_addresses: set[int] = set()
        for attribute in _attributes(self._module):
            if not is_plain(attribute.value):
                continue
            tensors = _tensors_in(attribute.value)
            # The addresses are collected at the first need, since most modules have no attribute with tensors.
            if tensors and not module_addresses:
                for module_tensor in (*self._module.parameters(), *self._module.buffers()):
                    module_addresses.add(_memory_address(module_tensor))
            shares_memory = any(_memory_address(tensor) in module_addresses for tensor in tensors)
            if not shares_memory:
                yield attribute


class _Record:
    """A list's entries of the cohorts' first clients, which clients find, and of all."""

    def __init__(self, entries: list[Any]) -> None:
        self.entries_of_first_client = entries
        self.entries_of_all = list(entries)
        self.length_at_end = len(entries)
        self.length_at_start = len(entries)


def saved_values(values: Values) -> Values:
    """Return the values that a checkpoint can hold, in types that can be loaded as weights only."""
    saved = {}
    for path, value in values.items():
        try:
            saved[path] = packed(value)
        except TypeError:
            continue  # a resumed module has what its __init__ sets
    return saved


def loaded_values(saved: Values, device: torch.device) -> Values:
    """Return the values that :func:`saved_values` has converted, with tensors on ``device``."""
    values = {}
    for path, value in saved.items():
        values[path] = unpacked(value)
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), values)


def _lists_in(path: str, value: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield a list, or those in a dictionary and in dictionaries in it, by path."""
    if type(value) is list:
        yield path, value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _lists_in(f"{path}[{key!r}]", entry)


def _attributes(module: nn.Module) -> Iterator[Attribute]:
    for path, owner in _objects_by_path(module):
        for name, value in _named_values(owner):
            yield Attribute(f"{path}.{name}" if path else name, owner, name, value)


def _objects_by_path(module: nn.Module) -> ObjectsByPath:
    """Yield the module's layers without metrics, and the objects that they hold, by path."""
    visited: set[int] = set()
    skipped_layers: set[int] = set()
    for path, layer in module.named_modules():
        if id(layer) in skipped_layers or isinstance(layer, Metric):
            # The layer's children are skipped, too, when the loop comes to them.
            skipped_layers.update(map(id, layer.children()))
        else:
            yield path, layer
            yield from _objects_in(path, layer, visited)


def _objects_in(
    path: str,
    owner: Any,
    visited: set[int],
) -> ObjectsByPath:
    for name, value in _named_values(owner):
        if not _is_object(value) or id(value) in visited:
            continue
        visited.add(id(value))
        object_path = f"{path}.{name}" if path else name
        yield object_path, value
        yield from _objects_in(object_path, value, visited)


def _named_values(owner: Any) -> list[tuple[str, Any]]:
    """Return an object's attributes, in ``__dict__`` and ``__slots__``."""
    attributes: dict[str, Any] = getattr(owner, "__dict__", {})
    named_values = list(attributes.items())
    if isinstance(owner, nn.Module):  # layers have no slots
        return [(name, value) for name, value in named_values if name not in _LIGHTNINGS_ATTRIBUTES]
    slots = facts_of(type(owner)).slots
    for name in slots:
        if hasattr(owner, name):
            named_values.append((name, getattr(owner, name)))
    return named_values


def _is_object(value: Any) -> bool:
    """Return whether a value is an object of a class that is no library's."""
    kind: Any = type(value)
    return _is_class_of_program(kind) and not is_optimizer(value)


@lru_cache(maxsize=10_000)
def _is_class_of_program(kind: Any) -> bool:
    package = kind.__module__.partition(".")[0]
    return package not in LIBRARIES and not issubclass(kind, _TYPES_WITHOUT_CLIENT_STATE)


def _set_value(attribute: Attribute, value: Any) -> None:
    """Set an attribute to a copy of ``value``. Collections are changed in place."""
    current_value = attribute.value
    if are_equal(current_value, value):
        return
    is_same_type = type(current_value) is type(value)
    if is_same_type and isinstance(value, list):
        current_value[:] = copied(value)
    elif is_same_type and isinstance(value, dict | set):
        current_value.clear()
        current_value.update(copied(value))
    elif is_same_type and isinstance(value, deque):
        current_value.clear()
        current_value.extend(copied(value))
    else:
        # Other objects are not changed in place: they may be in use elsewhere, such as a batch of the data.
        setattr(attribute.owner, attribute.name, copied(value))


def _tensors_in(value: Any) -> list[Tensor]:
    """Return a tensor, or the tensors in a tuple, nested or not."""
    if isinstance(value, Tensor):
        return [value]
    tensors = []
    if isinstance(value, tuple):
        for entry in value:
            tensors += _tensors_in(entry)
    return tensors


def _memory_address(tensor: Tensor) -> int:
    is_dense = tensor.layout == torch.strided
    if is_dense:
        return tensor.untyped_storage().data_ptr()
    return id(tensor)
