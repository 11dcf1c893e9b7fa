"""Random generators to which an object refers, and the attributes of any object."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Set
from functools import lru_cache
from io import IOBase
from itertools import chain
from types import (
    CodeType,
    FrameType,
    FunctionType,
    MemberDescriptorType,
    ModuleType,
    TracebackType,
)
from typing import Any

import numpy as np
import torch

from flsv.utilities.plain_values import CONSTANT_TYPES
from flsv.utilities.seeding import generator_state

#: The type of functions with a cache, in which they keep what they have returned.
CACHE_TYPE: Any = type(lru_cache(len))
#: Types of values that refer to nothing.
_PLAIN_TYPES: frozenset[type] = frozenset(
    {*CONSTANT_TYPES, type(...), range, slice, torch.layout, torch.Size}
)
#: Types of random generators.
GENERATORS = (
    torch.Generator,
    np.random.Generator,
    np.random.RandomState,
    random.Random,
)
# For mypy: the stubs do not declare the private classes of random generators.
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
#: Collections of more entries are tested for plain data.
_COLLECTIONS = frozenset({dict, list, tuple, deque, set, frozenset})
_MAX_UNTESTED_ENTRIES = 1000
#: Number of levels of collections that are tested.
_NUM_LEVELS = 5
_CLOSED_TYPES = (ModuleType, CodeType, FrameType, TracebackType, weakref.ref, IOBase)


def find_generators(*roots: Any, closed: tuple[type, ...] = ()) -> list[Any]:
    """Find the random generators to which objects refer, directly or through others, depth first.

    What an object refers to is what Python's garbage collector finds, but for the globals of functions. Classes of
    libraries, modules of Python, files, weak references, loggers, threads, locks and a run's own machinery are not
    entered. The global generators of Python, NumPy and torch are not among the results.

    Args:
        roots: the objects to begin with.
        closed: types of further objects that are not entered.

    Example:
        >>> generator = random.Random(1)
        >>> holder = {"draw": [generator.random]}
        >>> find_generators(holder) == [generator]
        True
    """
    generators = []
    visited = {}
    skipped_types = _PLAIN_TYPES.union(closed)  # as a set, to skip most parts fast
    pending = list(reversed(roots))
    while pending:
        value = pending.pop()
        if id(value) in visited:
            continue
        visited[id(value)] = value  # an object that is gone would leave its id to another one
        # The type is asked, not the object, whose __class__ may raise an error.
        kind = type(value)
        if issubclass(kind, GENERATORS):
            if not is_global(value) and _has_state(value):
                generators.append(value)
            continue
        if issubclass(kind, closed) or _is_closed(value):
            continue
        for part in reversed(_parts_of(value, skipped_types)):  # the last is visited first
            if type(part) not in skipped_types:
                pending.append(part)
    return generators


def _has_state(generator: Any) -> bool:
    """Return whether a generator's state can be read, unlike that of the operating system's entropy."""
    try:
        generator_state(generator)
    except NotImplementedError:
        return False
    return True


def is_global(generator: Any) -> bool:
    """Return whether a random generator is a global one of Python, NumPy or torch."""
    return any(generator is member for member in _GLOBAL_GENERATORS)


def _parts_of(value: Any, skipped_types: Set[type]) -> list[Any]:
    """List the objects to which an object refers directly, none of a large collection that has nothing to enter."""
    if type(value) is FunctionType:
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
    if issubclass(type(value), np.ndarray) and value.dtype.hasobject:
        return [value.tolist()]
    is_large = type(value) in _COLLECTIONS and len(value) > _MAX_UNTESTED_ENTRIES
    if is_large and _holds_only(value, skipped_types):
        return []
    return gc.get_referents(value)


def _holds_only(collection: Any, types: Set[type]) -> bool:
    """Return whether a collection holds nothing but values of these types, nested or not."""
    collections = [collection]
    for _ in range(_NUM_LEVELS):  # the entries of all collections of a level at once
        entries = list(chain.from_iterable(map(_entries_of, collections)))
        other_types = set(map(type, entries)) - types
        if not other_types:
            return True
        if not other_types <= _COLLECTIONS:
            return False
        collections = [entry for entry in entries if type(entry) in other_types]
    return False


def _entries_of(collection: Any) -> Iterable[Any]:
    if type(collection) is dict:
        return chain(collection, collection.values())
    entries: Iterable[Any] = collection
    return entries


def _is_closed(value: Any) -> bool:
    """Return whether the search does not follow a value's references, as of classes of libraries and of loggers."""
    kind: Any = type(value)
    if issubclass(kind, type):
        return package_of(value) in LIBRARIES
    if kind is FunctionType:
        return f"{value.__module__}.".startswith(_CLOSED_PREFIXES)
    try:
        return _has_closed_objects(kind)
    except Exception:  # of a metaclass whose classes cannot be hashed
        return False


@lru_cache(maxsize=10_000)
def _has_closed_objects(kind: type) -> bool:
    """Return whether a class, or a base, is one of those whose objects' references are not followed."""
    if issubclass(kind, _CLOSED_TYPES):
        return True
    for base in kind.__mro__:
        module_name = (
            f"{base.__module__}."  # with a dot, since "logging." is no prefix of "logging_tools."
        )
        if module_name.startswith(_CLOSED_PREFIXES):
            return True
    return False


# ---- attributes


def attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's ``__dict__``, or an empty dictionary if it has none or does not show it."""
    try:
        attributes = value.__dict__
    except Exception:  # of the object's own __getattribute__, or of a weak proxy
        return {}
    if issubclass(type(attributes), dict):
        return attributes
    return {}


def slots_of_object(value: Any) -> list[tuple[str, Any]]:
    """Return the names and values of the attributes of an object that are in ``__slots__`` and are set."""
    values = []
    for base in type(value).__mro__:
        if "__slots__" not in vars(base):
            continue
        for name, item in vars(base).items():
            if not isinstance(item, MemberDescriptorType):
                continue
            try:
                values.append((name, object.__getattribute__(value, name)))
            except AttributeError:
                continue  # it is not set
    return values


def attributes_and_slots(value: Any) -> dict[str, Any]:
    """Return an object's attributes by name, those in ``__slots__``, too. A list or a tensor may have none."""
    return {**attributes_of(value), **dict(slots_of_object(value))}


def package_of(kind: type) -> str:
    """Return the name of the package of a class, or an empty text if the class does not say it."""
    try:
        return str(kind.__module__).partition(".")[0]
    except Exception:  # of the class's metaclass
        return ""
