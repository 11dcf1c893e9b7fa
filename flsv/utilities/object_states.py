"""States of objects: what an object holds at one time, by which a later change is seen and undone."""

from __future__ import annotations

import operator
import pickle
import random
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import _unsafe_preserve_version_counter

from flsv.utilities.reachable import (
    GENERATORS,
    PLAIN_TYPES,
    attributes_of,
    by_class,
    has_attributes,
    is_closed,
    is_plain_data,
    reported_class,
    slots_of_object,
    traits_of,
)

#: Types of objects that do not change, or whose parts are objects of their own.
_UNCHANGING_TYPES = (
    tuple,
    frozenset,
    property,
    classmethod,
    staticmethod,
    MethodType,
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
_MISSING = object()


class ObjectState(ABC):
    """What an object holds when this state is made."""

    @abstractmethod
    def is_unchanged(self) -> bool:
        """Return whether the object holds the same as then. Objects are the same if they are identical."""

    @abstractmethod
    def restore(self) -> None:
        """Let the object hold again what it held then."""


def states_of(value: Any) -> Iterator[ObjectState]:
    """Yield the states of one object, without those of the objects that it refers to."""
    kind = type(value)
    make_state = _content_state_of(kind) or _content_state_of(reported_class(value))
    if make_state is not None:
        try:
            state = make_state(value)
        except (
            Exception
        ):  # an object that claims a class, or whose own code raises an error, cannot be copied
            return
        yield state
    if is_closed(value):
        return

    traits = traits_of(kind)
    if traits.is_metaclass:
        yield _ClassState(value)
    elif has_attributes(value):
        yield _ContentState(attributes_of(value))
    if traits.slots:
        yield _SlotState(value)


@by_class
def _content_state_of(kind: type) -> Callable[[Any], ObjectState] | None:
    """Return the state class of an object's content beside attributes, or None."""
    if issubclass(kind, Tensor):
        return TensorState
    if issubclass(kind, np.ndarray) and not issubclass(kind, np.memmap):
        return _ArrayState
    if issubclass(kind, GENERATORS):
        return _GeneratorState
    if issubclass(kind, CellType):
        return _CellState
    if issubclass(kind, dict | list | set | deque):
        return _ContentState
    return None


def hidden_state_of(value: Any) -> ObjectState | None:
    """Return the state of an object whose content only its pickle shows, as of an iterator. It cannot be restored.

    Raises:
        Exception: the object cannot be pickled.
    """
    if isinstance(value, GeneratorType):
        return _PositionState(value)
    if isinstance(value, dict | list) and is_plain_data(value):
        return _PickledState(value)
    package, _, _ = type(value).__module__.partition(".")
    if package == "pandas":
        return _PickledState(value)
    if isinstance(value, _UNCHANGING_TYPES) or is_closed(value):
        return None
    has_visible_state = next(states_of(value), None) is not None
    if has_visible_state:
        return None
    return _PickledState(value)


class TensorState(ObjectState):
    """A tensor's content and memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._original = tensor.detach()  # the same memory
        self._content = tensor.detach().clone()

    def is_unchanged(self) -> bool:
        tensor = self._tensor.detach()
        content = self._content
        if tensor.shape != content.shape or tensor.dtype != content.dtype:
            return False
        if tensor.layout != torch.strided:
            tensor, content = tensor.to_dense(), content.to_dense()
        is_equal = tensor == content
        are_both_nan = (tensor != tensor) & (content != content)  # only NaN differs from itself
        return bool((is_equal | are_both_nan).all())

    def restore(self) -> None:
        tensor = self._tensor
        if tensor.is_inference():
            with torch.inference_mode():
                tensor.copy_(self._content)
            return

        if _shares_entries(tensor):
            return  # an expanded tensor is a view of another one, which is restored itself
        memory_was_replaced = _address_of(tensor) != _address_of(self._original)
        if memory_was_replaced:
            tensor.data = self._original
        with torch.no_grad(), _unsafe_preserve_version_counter(tensor):
            tensor.copy_(self._content)


class VersionState(ObjectState):
    """A tensor's memory, and the number of changes in place. Nothing is copied."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._mark = self._current_mark()

    def is_unchanged(self) -> bool:
        return self._current_mark() == self._mark

    def restore(self) -> None:
        pass

    def _current_mark(self) -> tuple[int, int]:
        version = 0
        if not self._tensor.is_inference():
            version = self._tensor._version
        return _address_of(self._tensor), version


class _ArrayState(ObjectState):
    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self._content = array.copy()

    def is_unchanged(self) -> bool:
        if self._array.shape != self._content.shape:
            return False
        return self._array.tobytes() == self._content.tobytes()

    def restore(self) -> None:
        if self._array.flags.writeable:
            self._array[...] = self._content


class _GeneratorState(ObjectState):
    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._state = self._current_state()

    def is_unchanged(self) -> bool:
        current_state = self._current_state()
        if isinstance(current_state, Tensor):
            return torch.equal(current_state, self._state)
        return pickle.dumps(current_state) == pickle.dumps(self._state)

    def restore(self) -> None:
        generator: Any = self._generator
        if isinstance(generator, torch.Generator):
            generator.set_state(self._state)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = self._state
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(self._state)
        else:
            generator.setstate(self._state)

    def _current_state(self) -> Any:
        generator: Any = self._generator
        if isinstance(generator, np.random.Generator):
            return generator.bit_generator.state
        if isinstance(generator, random.Random):
            return generator.getstate()
        return generator.get_state()


class _CellState(ObjectState):
    def __init__(self, cell: CellType) -> None:
        self._cell = cell
        self._content = self._current_content()

    def is_unchanged(self) -> bool:
        return _is_same(self._current_content(), self._content)

    def restore(self) -> None:
        if self.is_unchanged():
            return
        if self._content is _MISSING:
            del self._cell.cell_contents
        else:
            self._cell.cell_contents = self._content

    def _current_content(self) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:
            return _MISSING


class _ContentState(ObjectState):
    """The entries of a collection or a dictionary, in their order."""

    def __init__(self, collection: Any) -> None:
        self._collection = collection
        self._content = self._current_content()

    def is_unchanged(self) -> bool:
        current = self._current_content()
        if isinstance(current, set):
            return current == self._content
        if len(current) != len(self._content):
            return False
        if isinstance(current, dict):
            has_same_values = _are_same(current.values(), self._content.values())
            return has_same_values and _are_same(current.keys(), self._content.keys())
        return _are_same(current, self._content)

    def restore(self) -> None:
        if self.is_unchanged():
            return
        self._collection.clear()
        if isinstance(self._collection, dict | set):
            self._collection.update(self._content)
        else:
            self._collection.extend(self._content)

    def _current_content(self) -> Any:
        for kind in (dict, set):
            if isinstance(self._collection, kind):
                return kind(self._collection)
        return list(self._collection)


class _SlotState(ObjectState):
    def __init__(self, value: Any) -> None:
        self._object = value
        self._names = traits_of(type(value)).slots
        self._content = self._current_content()

    def is_unchanged(self) -> bool:
        return _are_same(self._current_content(), self._content)

    def restore(self) -> None:
        for name, current, content in zip(self._names, self._current_content(), self._content):
            if _is_same(current, content):
                continue
            if content is _MISSING:
                object.__delattr__(self._object, name)
            else:
                object.__setattr__(self._object, name, content)

    def _current_content(self) -> list[Any]:
        values = dict(slots_of_object(self._object))
        return [values.get(name, _MISSING) for name in self._names]


class _ClassState(ObjectState):
    def __init__(self, kind: type) -> None:
        self._class = kind
        self._content = dict(vars(kind))

    def is_unchanged(self) -> bool:
        return next(self._changed_names(), None) is None

    def restore(self) -> None:
        for name in list(self._changed_names()):
            if name in self._content:
                setattr(self._class, name, self._content[name])
            else:
                delattr(self._class, name)

    def _changed_names(self) -> Iterator[str]:
        current = dict(vars(self._class))
        for name in current.keys() | self._content.keys():
            content = self._content.get(name, _MISSING)
            if not _is_same(current.get(name, _MISSING), content):
                yield name


class _PositionState(ObjectState):
    """The position of a Python generator, and its variables."""

    def __init__(self, generator: GeneratorType[Any, Any, Any]) -> None:
        self._generator = generator
        self._position = self._current_position()

    def is_unchanged(self) -> bool:
        return _are_same(self._current_position(), self._position)

    def restore(self) -> None:
        pass

    def _current_position(self) -> list[Any]:
        frame = self._generator.gi_frame
        if frame is None:
            return [None]
        return [frame.f_lasti, *frame.f_locals.values()]


class _PickledState(ObjectState):
    def __init__(self, value: Any) -> None:
        self._object = value
        self._pickle = self._current_pickle()

    def is_unchanged(self) -> bool:
        return self._current_pickle() == self._pickle

    def restore(self) -> None:
        pass

    def _current_pickle(self) -> bytes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # iterators warn that they will not be pickled for ever
            return pickle.dumps(self._object)


def _are_same(values: Iterable[Any], originals: Iterable[Any]) -> bool:
    """Return whether each value is the same as the original at its place."""
    if all(map(operator.is_, values, originals)):  # mostly, and faster
        return True
    return all(map(_is_same, values, originals))


def _is_same(value: Any, original: Any) -> bool:
    """Return whether values are one object, or equal numbers or texts."""
    if value is original:
        return True
    if type(value) is not type(original) or type(value) not in PLAIN_TYPES:
        return False
    return bool(value == original or (value != value and original != original))


def _shares_entries(tensor: Tensor) -> bool:
    """Return whether several entries of a tensor lie at one place of the memory."""
    if tensor.layout != torch.strided:
        return False
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape))


def _address_of(tensor: Tensor) -> int:
    if tensor.layout != torch.strided:
        return 0
    return tensor.data_ptr()
