"""Walk over everything that an object refers to: attributes, containers, closures, partials and methods."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from io import IOBase
from itertools import chain
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

#: Types of values that refer to nothing.
PLAIN_TYPES = frozenset(
    {
        type(None),
        type(...),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        range,
        slice,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.Size,
    }
)
#: Types of random generators.
GENERATORS = (
    torch.Generator,
    np.random.Generator,
    np.random.RandomState,
    random.Random,
)
# For mypy: the stubs declare no private generators.
_GLOBAL_GENERATORS = (
    torch.default_generator,
    np.random.mtrand._rand,
    random._inst,
)
#: Packages whose classes have no attributes that a program changes.
LIBRARIES = frozenset(
    {
        *sys.stdlib_module_names,
        "torch",
        "lightning",
        "lightning_utilities",
        "pytorch_lightning",
        "torchmetrics",
        "torchvision",
        "timm",
        "numpy",
        "flsv",
    }
)
#: Packages whose objects and functions are not entered: they lead to the whole process, or to a compiler.
_CLOSED_PACKAGES = (
    "logging",
    "threading",
    "_thread",
    "weakref",
    "multiprocessing",
    "concurrent",
    "asyncio",
    "argparse",
    "jsonargparse",
    "importlib",
    "inspect",
    "re",
    "_abc",
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch.distributed",
    "pandas",  # a table's content is memory of C code
    "flsv._lightning",
    "flsv.configuration",
    "flsv.core",
    "flsv.engines",
    "flsv.federation",
    "flsv.games",
    "flsv.results",
    "flsv.retraining",
    "flsv.server",
    "flsv.training",
)
_CLOSED_PREFIXES = tuple(f"{name}." for name in _CLOSED_PACKAGES)
_CLOSED_TYPES = (ModuleType, CodeType, FrameType, TracebackType, weakref.ref, IOBase)
_COLLECTIONS = (list, tuple, deque, set, frozenset)
_EXACT_COLLECTIONS = frozenset({*_COLLECTIONS, dict})
#: Collections of more entries are tested for plain data.
_MAX_UNTESTED_ENTRIES = 1000
#: Number of levels of inner collections that are tested.
_NUM_LEVELS = 4

#: A path, such as ``module.layers[0].noise``, and the object that is there.
Part = tuple[str, Any]
Types = tuple[type, ...]
Result = TypeVar("Result")


def by_class(function: Callable[[type], Result]) -> Callable[[type], Result]:
    """Store what a function returns for a class, for as long as the class is in use."""
    stored_results: weakref.WeakKeyDictionary[type, Result] = weakref.WeakKeyDictionary()

    @wraps(function)
    def stored_result(kind: type) -> Result:
        try:
            return stored_results[kind]
        except KeyError:
            stored_results[kind] = function(kind)
        except Exception:  # of a metaclass whose classes cannot be hashed or compared
            return function(kind)
        return stored_results[kind]

    return stored_result


def walk(
    root: Any,
    path: str = "",
    *,
    closed: Types = (),
    closed_ids: Container[int] = (),
) -> Iterator[Part]:
    """Yield ``(path, object)`` for ``root`` and each object that it refers to, depth first, each object once.

    An object refers to its attributes, in ``__dict__`` and ``__slots__``, to the entries of a collection, to what a
    function has in its closure and defaults, to what a ``partial`` or a bound method holds, and to its class, unless
    the class is of a library (:data:`LIBRARIES`). The path of a class's attribute begins with the class's name. A
    tensor refers to its gradient. What an object of C code holds is found as Python's garbage collector finds it.

    Numbers, texts and other values of :data:`PLAIN_TYPES` are not yielded. Modules of Python, files, weak references,
    loggers, threads, locks and a run's own machinery are yielded and not entered, as are large collections of plain
    data (see :func:`is_plain_data`).

    Args:
        root: the object to begin with.
        path: its name.
        closed: types of further objects that are yielded, but not entered.
        closed_ids: ids of further objects that are yielded, but not entered.

    Example:
        >>> holder = {"draw": partial(random.choice, [[1], [2]])}
        >>> [path for path, value in walk(holder, "holder") if isinstance(value, list)]
        ["holder['draw'].args[0]", "holder['draw'].args[0][0]", "holder['draw'].args[0][1]"]
    """
    visited: dict[int, Any] = {}
    pending: list[Part] = [(path, root)]
    while pending:
        path, value = pending.pop()
        if id(value) in visited:
            continue
        visited[id(value)] = value  # an object that is gone would leave its id to another one
        yield path, value
        is_excluded = id(value) in closed_ids or is_instance(value, closed)
        if not is_excluded and not is_closed(value):
            parts = list(parts_of(value, path))
            pending.extend(reversed(parts))  # the last is visited first


def find_generators(*roots: Any, closed: Types = ()) -> list[Any]:
    """Find the random generators that objects refer to, in the order of :func:`walk`.

    The global generators of Python, NumPy and torch are not among them.

    Args:
        roots: the objects to begin with.
        closed: types of objects that are not entered.
    """
    generators = []
    for _, value in walk(roots, closed=closed):
        if is_instance(value, GENERATORS) and not is_global(value):
            generators.append(value)
    return generators


def is_global(generator: Any) -> bool:
    """Return whether a random generator is a global one of Python, NumPy or torch."""
    return any(generator is member for member in _GLOBAL_GENERATORS)


def parts_of(value: Any, path: str = "") -> Iterator[Part]:
    """Yield ``(path, object)`` for each object that ``value`` refers to directly, without plain values.

    An object that raises an error when its content is read refers to what Python's garbage collector finds.
    """
    traits = traits_of(type(value))
    content_parts = traits.parts or traits_of(reported_class(value)).parts
    if content_parts is not None:
        try:
            yield from list(content_parts(value, path))
        except Exception:  # of code of the object's class
            yield from _referents(value, path)
    else:
        is_c_object = not (traits.slots or traits.is_generator or has_attributes(value))
        if is_c_object:
            yield from _referents(value, path)
    if not traits.is_metaclass:
        yield from _attributes(value, path, traits)


def _referents(value: Any, path: str) -> Iterator[Part]:
    for index, referent in enumerate(gc.get_referents(value)):
        yield f"{path}<{index}>", referent


def has_attributes(value: Any) -> bool:
    """Return whether an object has a dictionary of attributes."""
    try:
        return is_instance(value.__dict__, dict)
    except Exception:  # of the object's own __getattribute__, or of a weak proxy
        return False


def attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's ``__dict__``, or an empty dictionary if it has none or does not show it."""
    try:
        attributes = value.__dict__
    except Exception:  # of the object's own __getattribute__, or of a weak proxy
        return {}
    if is_instance(attributes, dict):
        return attributes
    return {}


def slots_of_object(value: Any) -> list[tuple[str, Any]]:
    """Return the names and values of the attributes of an object that are in ``__slots__`` and are set."""
    values = []
    for name in traits_of(type(value)).slots:
        try:
            values.append((name, object.__getattribute__(value, name)))
        except AttributeError:
            continue  # it is not set
    return values


def is_instance(value: Any, types: Any) -> bool:
    """Return whether an object is of a class, also if its own ``__class__`` raises an error."""
    try:
        return isinstance(value, types)
    except Exception:  # of the object's own __class__
        return issubclass(type(value), types)


def reported_class(value: Any) -> type:
    """Return the class that an object says it is of, for a weak proxy that of its referent."""
    try:
        reported = value.__class__
    except Exception:  # the referent is gone, or the object raises an error
        return type(value)
    if isinstance(reported, type):
        return reported
    return type(value)


def package_of(kind: type) -> str:
    """Return the name of the package of a class, or an empty text if the class does not say it."""
    try:
        return str(kind.__module__).partition(".")[0]
    except Exception:  # of the class's metaclass
        return ""


def is_plain_data(value: Any, num_levels: int = _NUM_LEVELS) -> bool:
    """Return whether a dictionary or collection is large, and holds nothing but plain values, nested or not.

    It takes some 0.1 s for a million entries.
    """
    return len(value) > _MAX_UNTESTED_ENTRIES and _are_all_plain(value, num_levels)


def _are_all_plain(entries: Any, num_levels: int) -> bool:
    types_of_entries = set(map(type, _contents(entries)))
    types_to_enter = types_of_entries - PLAIN_TYPES
    if not types_to_enter:
        return True
    has_other_types = not types_to_enter <= _EXACT_COLLECTIONS
    if num_levels == 0 or has_other_types:
        return False

    # The next level: the entries of all inner collections together.
    collections = (entry for entry in _contents(entries) if type(entry) in types_to_enter)
    inner_entries = list(chain.from_iterable(map(_contents, collections)))
    return _are_all_plain(inner_entries, num_levels - 1)


def _contents(collection: Any) -> Iterable[Any]:
    if isinstance(collection, dict):
        return chain(collection, collection.values())
    return collection


@dataclass(frozen=True)
class ClassTraits:
    """Facts on the objects of one class, by which :func:`walk` finds their parts."""

    # Yields the objects that an object's content refers to. None: such objects have attributes only.
    parts: Callable[[Any, str], Iterator[Part]] | None
    # Names of the attributes for which the class and its bases have __slots__.
    slots: tuple[str, ...]
    is_generator: bool
    # Whether the objects are classes.
    is_metaclass: bool
    is_closed: bool
    is_of_library: bool


@by_class
def traits_of(kind: type) -> ClassTraits:
    """Return the traits of a class, which are stored."""
    yield_parts = None  # a function that yields the parts of the class's objects
    for base_classes, parts_function in _PARTS_FUNCTION_BY_BASE.items():
        if issubclass(kind, base_classes):
            yield_parts = parts_function
            break
    is_metaclass = issubclass(kind, type)
    has_closed_base = any(_is_in_closed_package(base) for base in kind.__mro__)
    return ClassTraits(
        parts=yield_parts,
        slots=tuple(dict.fromkeys(slots_of(kind))),
        is_generator=issubclass(kind, GENERATORS),
        is_metaclass=is_metaclass,
        is_closed=issubclass(kind, _CLOSED_TYPES) or has_closed_base,
        is_of_library=not is_metaclass and _is_of_library(kind),
    )


def slots_of(kind: type) -> list[str]:
    """Return the names of the attributes for which a class and its bases have ``__slots__``."""
    names = []
    for base in kind.__mro__:
        if "__slots__" in vars(base):
            for name, item in vars(base).items():
                if isinstance(item, MemberDescriptorType):
                    names.append(name)
    return names


def is_closed(value: Any) -> bool:
    """Return whether :func:`walk` does not enter an object."""
    if is_instance(value, type):
        return _is_of_library(value)
    if is_instance(value, FunctionType):
        return _is_in_closed_package(value)
    return traits_of(type(value)).is_closed


def _is_in_closed_package(definition: type | FunctionType) -> bool:
    return f"{definition.__module__}.".startswith(_CLOSED_PREFIXES)


def _is_of_library(kind: type) -> bool:
    return package_of(kind) in LIBRARIES


def _attributes(value: Any, path: str, traits: ClassTraits) -> Iterator[Part]:
    """Yield an object's attributes, and its class if it is of no library."""
    for name, item in [*attributes_of(value).items(), *slots_of_object(value)]:
        if type(item) not in PLAIN_TYPES:
            yield f"{path}.{name}", item
    if not traits.is_of_library:
        yield type(value).__name__, type(value)


def _entries_of_dict(value: dict[Any, Any], path: str) -> Iterator[Part]:
    if is_plain_data(value):
        return
    for key, item in list(value.items()):
        if type(key) not in PLAIN_TYPES:
            yield f"{path}.keys", key
        if type(item) not in PLAIN_TYPES:
            yield _path_of_entry(path, key), item


def _path_of_entry(path: str, key: Any) -> str:
    layer, _, name = path.rpartition(".")
    if name in ("_modules", "_parameters", "_buffers"):
        return f"{layer}.{key}"
    if type(key) in PLAIN_TYPES:
        return f"{path}[{key!r}]"
    return f"{path}[{type(key).__name__}]"


def _entries_of_collection(value: Any, path: str) -> Iterator[Part]:
    if not is_plain_data(value):
        for index, item in enumerate(value):
            if type(item) not in PLAIN_TYPES:
                yield f"{path}[{index}]", item


def _parts_of_tensor(value: Tensor, path: str) -> Iterator[Part]:
    if value.is_leaf and value.grad is not None:
        yield f"{path}.grad", value.grad


def _parts_of_function(value: FunctionType, path: str) -> Iterator[Part]:
    names = value.__code__.co_freevars
    for name, cell in zip(names, value.__closure__ or ()):
        yield f"{path}.{name}", cell
    for index, item in enumerate(value.__defaults__ or ()):
        yield f"{path}.__defaults__[{index}]", item
    for name, item in (value.__kwdefaults__ or {}).items():
        yield f"{path}.__kwdefaults__[{name!r}]", item


def _parts_of_cell(value: CellType, path: str) -> Iterator[Part]:
    try:
        yield path, value.cell_contents
    except ValueError:
        return  # the cell is empty


def _parts_of_class(cls: type, path: str) -> Iterator[Part]:
    for name, item in list(vars(cls).items()):
        if type(item) not in PLAIN_TYPES:
            yield f"{cls.__name__}.{name}", item
    for base in cls.__bases__:
        if not _is_of_library(base):
            yield base.__name__, base


def _parts_of_array(value: np.ndarray, path: str) -> Iterator[Part]:
    if value.dtype.hasobject:
        yield path, value.tolist()


def _parts_of_method(value: MethodType | BuiltinMethodType, path: str) -> Iterator[Part]:
    yield f"{path}.__self__", value.__self__
    if isinstance(value, MethodType):
        yield f"{path}.__func__", value.__func__


def _parts_of_partial(value: partial[Any], path: str) -> Iterator[Part]:
    yield f"{path}.func", value.func
    yield f"{path}.args", value.args
    yield f"{path}.keywords", value.keywords


_PARTS_FUNCTION_BY_BASE: dict[Any, Callable[[Any, str], Iterator[Part]]] = {
    Tensor: _parts_of_tensor,
    dict: _entries_of_dict,
    _COLLECTIONS: _entries_of_collection,
    np.ndarray: _parts_of_array,
    FunctionType: _parts_of_function,
    (MethodType, BuiltinMethodType): _parts_of_method,
    partial: _parts_of_partial,
    CellType: _parts_of_cell,
    type: _parts_of_class,
}
