"""ProgramState: what a program keeps outside of its objects: globals, attributes of classes, environment variables."""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from flsv.isolation.reachable import CACHE_TYPE, LIBRARIES, attributes_of, package_of
from flsv.utilities.plain_values import CONSTANT_TYPES
from flsv.utilities.seeding import global_rngs, restore_global_rngs

#: Types of collections whose entries are put back. Entries of other collections are not looked at.
_COLLECTIONS = (dict, OrderedDict, defaultdict, Counter, list, deque, set)
_CONSTANTS = frozenset(CONSTANT_TYPES)
#: Parts of the paths of modules that are installed.
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
#: Types of a run's own objects, which copies do not share, and of data.
_CLOSED_TYPES = (
    nn.Module,
    L.Trainer,
    L.Callback,
    L.LightningDataModule,
    Dataset,
    DataLoader,
)


class Reference(NamedTuple):
    """A place where a program keeps an object: a name or a key of a namespace or a collection."""

    holder: Any
    key: Any
    value: Any

    def write(self, value: Any) -> None:
        """Let the holder have another object in its place."""
        kind: Any = type(self.holder)
        if kind is set:
            self.holder.discard(self.value)
            self.holder.add(value)
        elif kind in _COLLECTIONS:
            self.holder[self.key] = value
        else:
            _write_name(self.holder, self.key, value)


class Namespace(NamedTuple):
    """A module, a class or an object with its names and values at one time, without those of Python."""

    owner: Any
    values: dict[str, Any]
    # All names, and the ids of their values.
    names_and_ids: tuple[list[str], list[int]]

    def is_same(self) -> bool:
        """Return whether all names refer to the same objects as then."""
        return _names_and_ids(self.owner) == self.names_and_ids


class ProgramState:
    """The state of a program at one time. :meth:`restore` goes back to it.

    Globals of the program's modules and attributes of their classes and functions refer again to what they referred to.
    Collections and the program's own objects among these, and among defaults of arguments, hold again what they held. A
    program's modules are those that are not installed, and those with classes of what is copied. Global generators and
    torch's settings are part of the state. In another process, they alone are.

    Example:
        >>> os.environ["FLSV_EXAMPLE"] = "1"
        >>> state = ProgramState()
        >>> os.environ["FLSV_EXAMPLE"] = "2"
        >>> state.restore()
        []
        >>> os.environ.pop("FLSV_EXAMPLE")
        '1'
    """

    def __init__(self) -> None:
        self._global_rngs = global_rngs()
        self._torch_settings = torch_settings()
        self._environment: dict[str, str] | None = dict(os.environ)
        # Modules, classes and objects, whose attributes may change.
        self._namespaces: list[Namespace] = []
        # Collections, each with a copy of it.
        self._collections: list[tuple[Any, Any]] = []
        # {path: (tensor, its number of changes)}
        self._tensors: dict[str, tuple[Tensor, int]] = {}
        # {id of an object: where it is kept}
        self._references: dict[int, list[Reference]] = defaultdict(list)
        self._visited: set[int] = set()
        self._modules = _modules_of_program()
        self._module_names = frozenset(module.__name__ for module in self._modules)
        for module in self._modules:
            self._add_namespace(module, module.__name__)
        _states_in_use.add(self)

    def include_classes(self, values: Iterable[Any]) -> None:
        """Let the modules of classes among ``values``, and of their bases, be the program's, also if installed.

        Such a class may keep its instances.
        """
        names = {name for value in values for name in _modules_of_class(value)}
        names -= self._module_names
        if not names:
            return
        _NAMES_OF_CLASSES.update(names)
        _INSTALLED_NAMES.difference_update(names)
        self._modules = _modules_of_program()
        self._module_names |= names
        for name in sorted(names & sys.modules.keys()):
            self._add_namespace(sys.modules[name], name)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "_environment": None,
            "_namespaces": [],
            "_collections": [],
            "_tensors": {},
            "_references": {},
            "_modules": [],
        }

    def _add_namespace(self, namespace: Any, path: str) -> None:
        self._visited.add(id(namespace))
        values = _values_of(namespace)
        self._namespaces.append(Namespace(namespace, values, _names_and_ids(namespace)))
        for name, value in values.items():
            if type(value) not in _CONSTANTS:
                self._references[id(value)].append(Reference(namespace, name, value))
                self._add(value, f"{path}.{name}")

    def _add(self, value: Any, path: str) -> None:
        kind: Any = type(value)
        if id(value) in self._visited:
            return
        if kind in _COLLECTIONS:
            self._visited.add(id(value))
            self._collections.append((value, value.copy()))
            for key, entry in _items_of(value):
                if type(entry) not in _CONSTANTS:
                    self._references[id(entry)].append(Reference(value, key, entry))
                    self._add(entry, f"{path}[{key!r}]")
        elif kind in (tuple, frozenset):  # it stays, and what it holds may change
            for position, entry in enumerate(value):
                self._add(entry, f"{path}[{position}]")
        elif issubclass(kind, Tensor) and not value.is_inference():
            self._tensors[path] = (value, value._version)
        elif kind is FunctionType:
            self._add_function(value, path)
        elif self._is_of_program(value):
            self._add_namespace(value, path)

    def _add_function(self, function: FunctionType, path: str) -> None:
        """Add what a function of the program keeps: its attributes, and the defaults of its arguments."""
        if function.__module__ not in self._module_names:
            return
        self._add_namespace(function, path)
        for defaults in (function.__defaults__, function.__kwdefaults__):
            self._add(defaults, f"{path}'s defaults")

    def _is_of_program(self, value: Any) -> bool:
        """Return whether a value is a class of the program, or an object of such a class that no copy has."""
        kind: Any = type(value)
        if issubclass(kind, _CLOSED_TYPES):
            return False
        if issubclass(kind, type):
            kind = value
        return getattr(kind, "__module__", None) in self._module_names

    def references_to(self, ids: Collection[int], with_caches: bool = False) -> list[Reference]:
        """Return where the program keeps objects with these ids, but for holders that have such ids themselves. With
        caches, also where it keeps functions with a cache.
        """
        kept_ids = [key for key in self._references if key in ids]
        if with_caches:
            for key, (reference, *_) in self._references.items():
                if type(reference.value) is CACHE_TYPE and key not in ids:
                    kept_ids.append(key)

        references = []
        for key in kept_ids:
            for reference in self._references[key]:
                if id(reference.holder) not in ids:
                    references.append(reference)
        return references

    def is_present(self, modules: list[ModuleType] | None = None) -> bool:
        """Return whether the program is still in this state, but for generators. ``modules`` are its present ones."""
        if (modules or _modules_of_program()) != self._modules:
            return False
        if dict(os.environ) != self._environment or torch_settings() != self._torch_settings:
            return False
        if not all(namespace.is_same() for namespace in self._namespaces):
            return False
        if not all(_has_entries(collection, entries) for collection, entries in self._collections):
            return False
        return not self._changed_tensors()

    def _changed_tensors(self) -> list[str]:
        paths = []
        for path, (tensor, num_changes) in self._tensors.items():
            if tensor._version != num_changes:
                paths.append(path)
        return paths

    def restore(self) -> list[str]:
        """Go back to the state. Return the paths of tensors that have changed, which are not put back."""
        if self._environment is not None and dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        for namespace in self._namespaces:
            if not namespace.is_same():
                _restore_names(namespace.owner, namespace.values)
        for collection, entries in self._collections:
            _restore_entries(collection, entries)
        restore_torch(self._torch_settings)
        restore_global_rngs(self._global_rngs)
        return self._changed_tensors()


def _items_of(collection: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys or positions of a collection, with its entries."""
    if isinstance(collection, dict):
        return collection.items()
    return enumerate(collection)


_states_in_use: weakref.WeakSet[ProgramState] = weakref.WeakSet()
#: Names of modules that are not the program's: there are thousands, which are looked at once.
_INSTALLED_NAMES: set[str] = set()


#: Names of modules with classes of objects that were copied.
_NAMES_OF_CLASSES: set[str] = set()


def _modules_of_program() -> list[ModuleType]:
    modules = []
    names = [name for name in list(sys.modules) if name not in _INSTALLED_NAMES]
    for name in sorted(names):
        module: Any = sys.modules.get(name)
        is_of_program = name == "__main__" or name in _NAMES_OF_CLASSES
        if is_of_program or not _is_installed(name, module):
            modules.append(module)
        else:
            _INSTALLED_NAMES.add(name)
    return modules


def _modules_of_class(kind: Any) -> set[str]:
    """Return the names of the modules of a class and its bases, but for libraries'. None if it is no class."""
    names = set()
    if issubclass(type(kind), type):
        for base in kind.__mro__:
            package = package_of(base)
            if package and package not in LIBRARIES:
                names.add(base.__module__)
    return names


def _is_installed(name: str, module: Any) -> bool:
    package, _, _ = name.partition(".")
    if package in LIBRARIES or type(module) is not ModuleType:
        return True
    file = vars(module).get("__file__")
    if not file:
        return True
    return any(folder in file for folder in _INSTALLED)


def _attributes_of(namespace: Any) -> Mapping[str, Any]:
    return vars(namespace) if isinstance(namespace, type) else attributes_of(namespace)


def _names_and_ids(namespace: Any) -> tuple[list[str], list[int]]:
    attributes = _attributes_of(namespace)
    return list(attributes), list(map(id, attributes.values()))


def _values_of(namespace: Any) -> dict[str, Any]:
    """Return the names and values of a module, a class or an object, without those of Python."""
    attributes = _attributes_of(namespace)
    return {name: value for name, value in attributes.items() if not str(name).startswith("__")}


def _restore_names(namespace: Any, values: dict[str, Any]) -> None:
    present_values = _values_of(namespace)
    for name, value in values.items():
        if name not in present_values or present_values[name] is not value:
            _write_name(namespace, name, value)
    for name in present_values.keys() - values.keys():
        if isinstance(namespace, type):
            delattr(namespace, name)
        else:
            del attributes_of(namespace)[name]


def _write_name(namespace: Any, name: str, value: Any) -> None:
    if isinstance(namespace, type):
        setattr(namespace, name, value)
    else:
        attributes_of(namespace)[name] = value


def _has_entries(collection: Any, entries: Any) -> bool:
    """Return whether a collection has these entries, the same objects, in this order."""
    if len(collection) != len(entries):
        return False
    if isinstance(collection, dict):
        has_keys = list(collection) == list(entries)
        return has_keys and all(map(is_, collection.values(), entries.values()))
    return all(map(is_, collection, entries))


def _restore_entries(collection: Any, entries: Any) -> None:
    if _has_entries(collection, entries):
        return
    collection.clear()
    if isinstance(collection, dict | set):
        collection.update(entries)
    else:
        collection.extend(entries)


def present_state() -> ProgramState:
    """Return the program's state: one that is in use, if nothing has changed since. To look at a large program takes
    longer.
    """
    modules = _modules_of_program()
    for state in list(_states_in_use):
        if state.is_present(modules):
            return state
    return ProgramState()


@contextmanager
def restored_program(program: ProgramState | None = None) -> Iterator[list[str]]:
    """Restore the program's state at the end of this context, the present one by default. The list then has the paths
    of tensors that have changed."""
    generators = global_rngs()
    settings = torch_settings()
    if program is None:
        program = present_state()
    changed_tensors: list[str] = []
    try:
        yield changed_tensors
    finally:
        changed_tensors += program.restore()
        restore_torch(settings)
        restore_global_rngs(generators)


def torch_settings() -> dict[str, Any]:
    """Return torch's settings on which numbers depend."""
    return {
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
    }


def restore_torch(settings: Mapping[str, Any]) -> None:
    """Set torch as :func:`torch_settings` describes it."""
    if settings == torch_settings():
        return
    torch.set_default_dtype(settings["dtype"])
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["warn_only"])
    torch.set_float32_matmul_precision(settings["precision"])
    torch.backends.cudnn.benchmark = settings["cudnn_benchmark"]
    torch.backends.cudnn.deterministic = settings["cudnn_deterministic"]
    torch.backends.cudnn.allow_tf32 = settings["cudnn_tf32"]
