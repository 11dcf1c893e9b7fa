"""Pickled: an object as bytes, of which each load is a copy that shares data and classes with it."""

from __future__ import annotations

import copy
import copyreg
import io
import os
import pickle
import random
import sys
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePath
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

import cloudpickle
import lightning as L
import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.data import DataLoader, Dataset

from flsv.isolation.reachable import CACHE_TYPE
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.plain_values import is_large

if TYPE_CHECKING:
    from flsv.isolation.program_state import ProgramState, Reference

#: How an object is pickled, as ``__reduce__`` returns it.
Reduction = tuple[Any, ...]
#: A reference of the program to a copy, and the original.
Redirection = tuple["Reference", Any]
#: Marks what a copy has in common with the run.
SHARED = "shared"
#: Marks a path in a folder of the run.
PATH = "path"
#: By what locks of a type are made. The types themselves have no names that pickle finds.
_LOCK_MAKERS = {type(make()): make for make in (threading.Lock, threading.RLock)}
#: Types of values of which only marked ones are pickled otherwise than by Python.
_BUILTIN_TYPES = frozenset({type(None), bool, int, float, dict, list, tuple, set})
#: In place of data to which a pickled object refers.
_NO_DATA = object()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickler that refers to the data, and knows parts that refuse pickling.

    Args:
        file: gets the bytes.
        data: an object to which copies refer.
        reductions: ``{id of an object: how it is pickled}``.
        shared_ids: ids of objects that copies have in common with the original.
        shared_types: types of such objects.
        copied_ids: ids of objects of such types that are copied.
        blank_storages: keys of memory that is not copied. All loads have one blank memory in its place, to be written.
        stand_ins: ``{id of an object: what copies have in its place}``.
        locations: ``{a folder: its path below the folder in which a copy is loaded}``.
    """

    def __init__(
        self,
        file: io.BytesIO,
        data: Any,
        reductions: Mapping[int, Reduction] = {},
        shared_ids: Collection[int] = (),
        shared_types: tuple[type, ...] = (),
        copied_ids: Collection[int] = (),
        blank_storages: Collection[int] = (),
        stand_ins: Mapping[int, StandIn] = {},
        locations: Mapping[str, str] = {},
    ) -> None:
        super().__init__(file)
        # {folder: its path below the folder in which a copy is loaded}
        self._locations = locations
        self._run_data = data
        # The wrapped data module, which the Trainer shows.
        self._users_data = getattr(data, "users_module", None) or _NO_DATA
        self._reductions = reductions
        self._shared_ids = shared_ids
        self._copied_ids = copied_ids
        self._blank_storages = blank_storages
        self._stand_ins = stand_ins
        self._marked_ids = {*stand_ins, *shared_ids, id(data), id(self._users_data)}
        # A metaclass may answer for a class, so that objects are not asked with isinstance.
        self._shared_types = (type, *shared_types)
        # The memory of tensors. Those that share it do so in a copy, too.
        self.storages: list[torch.Tensor] = []
        # Positions of the memory that is blank, which all loads use.
        self.blank_positions: set[int] = set()
        # Objects to which a copy refers, such as classes and functions.
        self.shared: list[Any] = []
        self._position_of_shared: dict[int, int] = {}
        self._position_of_storage: dict[int, int] = {}

    def dump_references(self, program: ProgramState, has_own_caches: bool) -> list[Reference]:
        """Pickle the values of the program's references to the objects that are copied, and return the references."""
        program.include_classes(self.shared)
        ids_of_copied = self.memo.copy().keys()
        references = program.references_to(ids_of_copied, with_caches=has_own_caches)
        self.dump([reference.value for reference in references])
        return references

    def persistent_id(self, value: Any) -> Any:
        # What the pickle has in place of an object, None for the object itself.
        kind = type(value)
        if kind is str:
            return self._persistent_path(value)
        if kind in _BUILTIN_TYPES and id(value) not in self._marked_ids:
            return None  # most objects, which need no further question
        if value is self._run_data:
            return "data"
        if value is self._users_data:
            return "users data"
        if id(value) in self._stand_ins:
            return SHARED, self._share(self._stand_ins[id(value)])
        # Of a copy that is copied again. First, since isinstance reads an attribute, which a stand-in refuses.
        if kind is StandIn:
            return SHARED, self._share(value)
        if isinstance(value, torch.TypedStorage):
            storage = value._untyped_storage
            return self._position(storage), storage.device, value.dtype
        if kind is _Original:
            return SHARED, self._share(value.function)
        if self._is_shared(value, kind):
            return SHARED, self._share(value)
        return None

    def _is_shared(self, value: Any, kind: type) -> bool:
        """Return whether copies have an object in common with the original."""
        if id(value) in self._shared_ids:
            return True
        # By value, cloudpickle would set the attributes of classes again, also of the run's own classes.
        if issubclass(kind, self._shared_types) and id(value) not in self._copied_ids:
            return True
        if kind is FunctionType:
            return not _has_state(value)
        return kind is torch.jit.ScriptFunction  # it has no state

    def _persistent_path(self, text: str) -> tuple[str, str] | None:
        """Return where a path in one of the run's folders leads, below the folder in which a copy is loaded."""
        for folder, location in self._locations.items():
            if text == folder or text.startswith(folder + os.sep):
                return PATH, location + text.removeprefix(folder)
        return None

    def _share(self, value: Any) -> int:
        """Return the position of an object that is shared."""
        key = id(value)
        if key not in self._position_of_shared:
            self._position_of_shared[key] = len(self.shared)
            self.shared.append(value)
        return self._position_of_shared[key]

    def _position(self, storage: torch.UntypedStorage) -> int:
        """Return the position of a copy of memory."""
        key = storage._cdata
        if key not in self._position_of_storage:
            self._position_of_storage[key] = len(self.storages)
            raw_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device)
            raw_bytes.set_(storage)
            if key in self._blank_storages:
                self.blank_positions.add(len(self.storages))
                self.storages.append(torch.empty_like(raw_bytes))
            else:
                self.storages.append(raw_bytes.clone())
        return self._position_of_storage[key]

    def reducer_override(self, value: Any) -> Any:
        reduction = self._reductions.get(id(value))
        if reduction is not None:
            return reduction
        kind = type(value)
        reduction = _reduction_of_python(value, kind) or _reduction_of_torch(value, kind)
        if reduction is not None:
            return reduction
        return super().reducer_override(value)


def _reduction_of_python(value: Any, kind: type) -> Any:
    """Return how an object of Python's own types is pickled, None if as usual."""
    # As __reduce__ of an object: a function and its arguments, then a state and the function that sets it.
    if kind is FunctionType:
        cells = value.__closure__ or ()
        state = value.__defaults__, value.__kwdefaults__, vars(value)
        return _empty_function, (_Original(value), cells), state, None, None, _fill_function
    if kind is CellType:
        return CellType, (), contents_of_cell(value), None, None, _fill_cell
    if kind is CACHE_TYPE:
        return _empty_cache, (value.__wrapped__, value.cache_parameters())
    if kind is random.SystemRandom:  # it has no state
        return kind, ()
    if kind in _LOCK_MAKERS:  # free in a copy, whoever holds the original
        return _LOCK_MAKERS[kind], ()
    if issubclass(kind, PurePath):
        return kind, (str(value),)
    if kind is weakref.ref:
        return _reference, (value(),)
    return None


def _reduction_of_torch(value: Any, kind: type) -> Any:
    """Return how a tensor or module that torch pickles wrongly or refuses is pickled, None if as usual."""
    if isinstance(value, torch.Tensor) and _has_hooks(value):
        # torch leaves them out. As a state they may refer to the tensor.
        make_tensor, arguments, *_ = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        hooks = (value._backward_hooks, value._post_accumulate_grad_hooks)
        return make_tensor, arguments, hooks, None, None, _set_hooks
    if issubclass(kind, torch.jit.ScriptModule):
        return _load_scripted, (_saved_scripted(value),)
    # torch refuses these, since a class is made for each. Here it is pickled, too.
    if issubclass(kind, nn.Module) and is_parametrized(value):
        return copyreg.__newobj__, (kind,), vars(value)  # type: ignore[attr-defined]
    return None


@dataclass(frozen=True, eq=False)
class _Original:
    """A function of which a copy has its code and its globals."""

    function: FunctionType


def _has_state(function: FunctionType) -> bool:
    """Return whether a function holds objects, and cannot be found by its name."""
    module = sys.modules.get(str(function.__module__))
    if getattr(module, function.__qualname__, None) is function:
        return False
    defaults = function.__defaults__ or function.__kwdefaults__
    return bool(function.__closure__ or defaults or vars(function))


def _empty_function(original: FunctionType, cells: tuple[CellType, ...]) -> FunctionType:
    return FunctionType(
        original.__code__,
        original.__globals__,
        name=original.__name__,
        closure=cells,
    )


def _fill_function(function: FunctionType, state: tuple[Any, Any, dict[str, Any]]) -> None:
    function.__defaults__, function.__kwdefaults__, attributes = state
    vars(function).update(attributes)


def _empty_cache(function: Any, parameters: dict[str, Any]) -> Any:
    return lru_cache(**parameters)(function)


def contents_of_cell(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # it is empty
        return []


def _fill_cell(cell: CellType, contents: list[Any]) -> None:
    for content in contents:
        cell.cell_contents = content


@dataclass
class Pickled:
    """Bytes of an object, the memory of its tensors, and what its copies have in common with it."""

    bytes: bytes
    storages: list[torch.Tensor]
    shared: list[Any]
    blank_positions: Collection[int] = ()
    # Where the program keeps objects that are copied.
    references: Sequence[Reference] = ()

    def __getstate__(self) -> dict[str, Any]:
        # A worker imports classes and functions, or has those of a program's main module by value.
        storages = [storage.cpu() for storage in self.storages]
        return {
            **vars(self),
            "storages": storages,
            "shared": cloudpickle.dumps(self.shared),
            "references": (),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        shared = pickle.loads(state["shared"])
        vars(self).update(state, shared=shared)

    def load(
        self,
        data: Any = None,
        *,
        copies_memory: bool = True,
        redirected: list[Redirection] | None = None,
    ) -> Any:
        """Return a copy of the object.

        Args:
            data: the data to which it refers.
            copies_memory: whether it has memory of its own. The last copy may have that of the pickle.
            redirected: if given, the program refers to the copy from now on where it kept the original. The list gets
                these references, each with the original.
        """
        unpickler = _Unpickler(self, data, copies_memory)
        value = unpickler.load()
        if redirected is not None and self.references:
            copied_values = unpickler.load()  # the second object in the pickle
            redirected += self._redirect(copied_values)
        return value

    def _redirect(self, copied_values: Sequence[Any]) -> Iterator[Redirection]:
        for reference, copied_value in zip(self.references, copied_values):
            # A member of an enumeration is its own copy, and cannot be written.
            if copied_value is not reference.value:
                reference.write(copied_value)
                yield reference._replace(value=copied_value), reference.value


def pickled(
    value: Any,
    data: Any = _NO_DATA,
    program: ProgramState | None = None,
    has_own_caches: bool = False,
    **options: Any,
) -> Pickled:
    """Pickle an object.

    Args:
        value: the object.
        data: an object to which copies refer, and which each load is given.
        program: the program's state, in which objects are looked for that are copied.
        has_own_caches: whether the program has empty caches in place of its ``functools.lru_cache``, too.
        options: further arguments of :class:`_Pickler`.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, data, **options)
    pickler.dump(value)
    references = []
    if program is not None:
        references = pickler.dump_references(program, has_own_caches)
    return Pickled(
        bytes=file.getvalue(),
        storages=pickler.storages,
        shared=pickler.shared,
        blank_positions=pickler.blank_positions,
        references=references,
    )


def copy_of_data_module(
    module: L.LightningDataModule, samples: Iterable[Any] = ()
) -> L.LightningDataModule:
    """Copy a data module. The copy shares data sets, loaders, ``samples`` and what has many entries."""
    copied = copy.copy(module)
    copied.trainer = None
    attributes = {**vars(copied)}
    data_ids = set(map(id, samples))
    data_ids |= {id(value) for value in attributes.values() if is_large(value)}
    try:
        pickled_attributes = pickled(
            attributes,
            data=module,
            shared_ids=data_ids,
            shared_types=(Dataset, DataLoader, L.Trainer),
        )
    except Exception:  # of an open file, for example, which stays common
        return copied
    vars(copied).update(pickled_attributes.load(copied))
    return copied


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: Pickled, data: Any, copies_memory: bool) -> None:
        super().__init__(io.BytesIO(pickled.bytes))
        self._copies_memory = copies_memory
        self._run_data = data
        self._pickled = pickled
        self._copied_storages: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, name: Any) -> Any:
        # A text, or a tuple that begins with SHARED, with PATH, or with the position of memory.
        if name == "data":
            return self._run_data
        if name == "users data":
            return self._run_data.users_module
        if name[0] == SHARED:
            _, position = name
            return self._pickled.shared[position]
        if name[0] == PATH:
            _, location = name
            relative_path = location.removeprefix(os.sep)
            return os.path.join(os.getcwd(), relative_path).rstrip(os.sep)
        position, device, dtype = name
        storage = self._storage(position, device)
        return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

    def _storage(self, position: int, device: torch.device) -> torch.UntypedStorage:
        """Return the copy of memory, made when it is first asked for."""
        if position not in self._copied_storages:
            raw_bytes = self._pickled.storages[position]
            if self._copies_memory and position not in self._pickled.blank_positions:
                raw_bytes = raw_bytes.clone()
            self._copied_storages[position] = raw_bytes.to(device).untyped_storage()
        return self._copied_storages[position]


class NotCopied(ConfigurationError):
    """Error: a copy is asked for a part of which it has only a stand-in."""


#: Why the stand-ins that were used refused it, since a program may catch the errors.
_refusals: list[str] = []


@contextmanager
def checked_stand_ins() -> Iterator[None]:
    """Raise :class:`NotCopied` at the end of this context if a stand-in was used, and the program caught its error."""
    _refusals.clear()
    yield
    if _refusals:
        raise NotCopied(_refusals[0])


class StandIn:
    """Stand in a copy for a part that refuses pickling. Using it raises :class:`NotCopied`."""

    def __init__(self, reason: str) -> None:
        object.__setattr__(self, "_reason", reason)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        reason = object.__getattribute__(self, "_reason")
        _refusals.append(reason)
        raise NotCopied(reason)

    __getattribute__ = __setattr__ = __delattr__ = _refuse
    __hash__ = object.__hash__


#: Python looks for these methods in classes alone.
_METHODS_OF_CLASSES = (
    "call iter next len bool contains getitem setitem delitem enter exit eq ne lt le gt ge add radd sub rsub mul rmul "
    "truediv rtruediv neg abs int float index str repr format await aiter anext aenter aexit"
)
for _name in _METHODS_OF_CLASSES.split():
    setattr(StandIn, f"__{_name}__", StandIn._refuse)


def _saved_scripted(module: torch.jit.ScriptModule) -> bytes:
    file = io.BytesIO()
    torch.jit.save(module, file)
    return file.getvalue()


def _load_scripted(saved: bytes) -> torch.jit.ScriptModule:
    return torch.jit.load(io.BytesIO(saved))


def _has_hooks(tensor: torch.Tensor) -> bool:
    return bool(tensor._backward_hooks) or bool(tensor._post_accumulate_grad_hooks)


def _set_hooks(tensor: torch.Tensor, hooks: tuple[Any, Any]) -> None:
    untyped_tensor: Any = tensor
    untyped_tensor._backward_hooks, untyped_tensor._post_accumulate_grad_hooks = hooks


def _reference(value: Any) -> Any:
    """Return a weak reference to ``value``, or one to an object that has gone."""
    if value is None:
        return weakref.ref(_Gone())
    return weakref.ref(value)


class _Gone:
    pass
