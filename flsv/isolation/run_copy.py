"""RunCopy: a Trainer and its module before their fit, as bytes of which each load is a run of its own."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

from lightning.pytorch.profilers import PassThroughProfiler
from torch import nn

from flsv.isolation.pickles import Pickled, Reduction, StandIn, contents_of_cell, pickled
from flsv.isolation.program_state import (
    ProgramState,
    restored_program,
)
from flsv.isolation.silent_logger import silent_arguments, silent_logger
from flsv.utilities.errors import ConfigurationError


class RunCopy:
    """The state of a Trainer and a module, taken before their fit.

    Data, classes and functions without a state are shared. All else is copied, with the references that its objects
    have to each other. Where the program's globals refer to one of them, they refer to the copy's once it is loaded.
    Loggers become ones that log nothing. Paths in the run's folders lead into the folder in which a copy is loaded.

    Args:
        trainer: a Trainer that has not been fitted, which may be in the ``setup`` of its fit.
        module: its module, or what makes the module.
        data: its data module.
        reductions: ``{id of an object: how it is pickled}``, for objects that copies have in another form.
        locations: ``{a folder of the run: its path below the folder in which a copy is loaded}``.

    Raises:
        ConfigurationError: a part cannot be pickled and loaded. The message has its path.

    Example:
        >>> import lightning as L
        >>> trainer, module = L.Trainer(logger=False, barebones=True), L.LightningModule()
        >>> run_copy = RunCopy(trainer, module, data=L.LightningDataModule())
        >>> other_trainer, other_module, _ = run_copy.load()
        >>> other_module is module, type(other_trainer)
        (False, <class 'lightning.pytorch.trainer.trainer.Trainer'>)
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        *,
        data: Any,
        reductions: Mapping[int, Reduction] | None = None,
        locations: Mapping[str, str] | None = None,
    ) -> None:
        # A fit changes attributes of the data module until its end.
        self._data = copy.copy(data)
        self._data.trainer = None
        self._program = ProgramState()

        dump = partial(
            _loadable_pickle,
            data=data,
            program=self._program,
            has_own_caches=True,
            reductions={**(reductions or {}), **_reductions_of_parts(trainer)},
            locations=locations or {},
        )
        try:
            self._pickled: Pickled = dump((trainer, module))
        except Exception as error:
            reason = "the run cannot be copied, and a coalition is a fit of a copy"
            parts = _named_parts(trainer, module)
            raise pickle_error(reason, parts, dump) from error

    def __getstate__(self) -> dict[str, Any]:
        # For a worker, which has no data yet.
        pickled_data = pickled(self._data)
        return {**vars(self), "_data": pickled_data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        data = state["_data"].load()
        vars(self).update(state, _data=data)

    def load(self) -> tuple[Any, Any, Any]:
        """Return a new Trainer, module and data module, and set generators and the program's globals as they were."""
        self._program.restore()
        data = copy.copy(self._data)
        trainer, module = self._pickled.load(data, redirected=[])
        return trainer, module, data


def _loadable_pickle(value: Any, data: Any, **options: Any) -> Pickled:
    """Return a value's pickle, after a load has shown that it can be loaded."""
    pickled_value = pickled(value, data=data, **options)
    with restored_program():
        pickled_value.load(data)
    return pickled_value


class UnpicklablePart(NamedTuple):
    """A part of an object that cannot be copied, though its own parts can."""

    path: str
    part: Any
    error: Exception
    #: The attribute of a layer that is the part, or holds it. None: no layer has it.
    attribute: Any = None

    def describe(self, reason: str) -> str:
        """Return a message that begins with ``reason``."""
        return (
            f"{reason}: {self.path} ({type(self.part).__name__}) cannot be pickled and loaded "
            f"({type(self.error).__name__}: {self.error}). Make it where it is used, or give its class a __getstate__ "
            "that leaves it out and a __setstate__ that makes it again."
        )


def pickle_error(
    reason: str,
    roots: Mapping[str, Any],
    dump: Callable[[Any], Any],
) -> ConfigurationError:
    """Return the error for ``roots`` that cannot be pickled, with the path of the part that fails."""
    return ConfigurationError(find_unpicklable_part(roots, dump).describe(reason))


#: Attributes of layers with other layers and tensors.
_PARTS_OF_LAYERS = ("._modules", "._parameters", "._buffers")


def _reductions_of_parts(trainer: Any) -> dict[int, Reduction]:
    """Return how the parts of a Trainer that write are pickled: without what they write to."""
    reductions: dict[int, Reduction] = {id(trainer.profiler): (PassThroughProfiler, ())}
    for logger in trainer.loggers:
        reductions[id(logger)] = (silent_logger, silent_arguments(logger))
    return reductions


def _named_parts(trainer: Any, module: Any) -> dict[str, Any]:
    parts = {"the module": module}
    for callback in trainer.callbacks:
        parts[type(callback).__name__] = callback
    parts["the Trainer"] = trainer
    return parts


def find_unpicklable_part(roots: Mapping[str, Any], dump: Callable[[Any], Any]) -> UnpicklablePart:
    """Return a part of ``roots``, by name, that fails in ``dump`` though its parts do not."""
    # Each part has its path, and the attribute of a layer that it is in.
    pending = deque((path, root, None) for path, root in roots.items())
    looked_at = set(map(id, roots.values()))
    while pending:
        path, part, attribute = pending.popleft()
        error = _error_of(part, dump)
        if error is None:
            continue
        unpicklable_parts = _unpicklable_parts(part, dump)
        if not unpicklable_parts:
            return UnpicklablePart(path, part, error, attribute)
        for name, nested_part in unpicklable_parts:
            if id(nested_part) in looked_at:
                continue
            looked_at.add(id(nested_part))
            nested_attribute = attribute
            if isinstance(part, nn.Module):
                is_attribute = name not in _PARTS_OF_LAYERS
                nested_attribute = nested_part if is_attribute else None
            pending.append((path + name, nested_part, nested_attribute))
    error = RuntimeError("each by itself can be pickled")
    return UnpicklablePart("a combination of its parts", roots, error)


def _unpicklable_parts(part: Any, dump: Callable[[Any], Any]) -> list[tuple[str, Any]]:
    return [
        (name, nested_part)
        for name, nested_part in _parts_of(part)
        if _error_of(nested_part, dump) is not None
    ]


def _error_of(part: Any, dump: Callable[[Any], Any]) -> Exception | None:
    try:
        dump(part)
    except Exception as error:
        return error
    return None


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries and attributes of an object with how they are written."""
    yield from _entries_of(value)
    try:
        # As vars(value), which an object with a __class__ of its own can deceive.
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has none
        return
    if isinstance(attributes, dict):
        for name, attribute in attributes.items():
            yield f".{name}", attribute


def _entries_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a collection, a weak reference or a function's closure holds, with how it is written."""
    if type(value) is StandIn:
        return
    if type(value) is weakref.ref:
        yield "()", value()
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield f"[{key!r}]", entry
    elif isinstance(value, list | tuple):
        for position, entry in enumerate(value):
            yield f"[{position}]", entry
    elif type(value) is FunctionType:
        cells = value.__closure__ or ()
        for name, cell in zip(value.__code__.co_freevars, cells):
            for content in contents_of_cell(cell):
                yield f".{name}", content
