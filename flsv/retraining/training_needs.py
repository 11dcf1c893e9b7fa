"""What training may read beside batches: validations, and Lightning's callbacks that save checkpoints or stop.

It is decided from the program's code before a coalition is trained. Code that is not seen here, such as a function of
another module, raises an error in a fit without validations, which is then repeated with all that the run has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping

from flsv._lightning.patches import callbacks_of, is_loop, is_watcher

#: Packages whose classes are not the program's.
_LIBRARIES = ("flsv", "lightning", "torch", "builtins")
_PREFIXES_OF_VALIDATION_HOOKS = ("on_validation_", "on_sanity_check_")
#: Attributes of a Trainer that have other values in a fit without validations.
_VALIDATION_ATTRIBUTES = frozenset(
    {"callback_metrics", "logged_metrics", "progress_bar_metrics"}
    | {"num_val_batches", "val_dataloaders", "enable_validation"}
)
#: Attributes of a Trainer that return callbacks which only watch a run.
_CHECKPOINT_ATTRIBUTES = frozenset(
    {"checkpoint_callback", "checkpoint_callbacks"}
    | {"early_stopping_callback", "early_stopping_callbacks"}
)


def depends_on_validations(trainer: L.Trainer, module: L.LightningModule) -> bool:
    """Return whether validations may change training: a learning-rate schedule reads a logged value, there is a
    callback of the program's own, or the module overrides validation hooks or reads what validations log.
    """
    if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        return True
    callbacks = _callbacks_that_act(trainer)
    if any(_is_of_program(callback) for callback in callbacks):
        return True
    for owner in (module, *callbacks):
        for attributes in _namespaces_of_program(owner):
            if any(name.startswith(_PREFIXES_OF_VALIDATION_HOOKS) for name in attributes):
                return True
    return not _names_in_code(module, *callbacks).isdisjoint(_VALIDATION_ATTRIBUTES)


def reads_checkpoints(trainer: L.Trainer, module: L.LightningModule) -> bool:
    """Return whether training may read Lightning's callbacks that save checkpoints or stop a run: the module or a
    callback holds one, or names an attribute of the Trainer that returns one.
    """
    owners = [module, *_callbacks_that_act(trainer)]
    for owner in owners:
        for value in _values_of(owner):
            if isinstance(value, Checkpoint | EarlyStopping):
                return True
    return not _names_in_code(*owners).isdisjoint(_CHECKPOINT_ATTRIBUTES)


def only_watches_the_run(callback: L.Callback) -> bool:
    """Return whether a callback only observes or ends a run: its class is a watcher or says so, or it does nothing, as
    in copies an excluded one.
    """
    if getattr(callback, "only_watches", False) or type(callback) is L.Callback:
        return True
    return is_watcher(type(callback))


def _callbacks_that_act(trainer: L.Trainer) -> list[L.Callback]:
    """Return the callbacks that may change training."""
    return [
        callback
        for callback in callbacks_of(trainer)
        if not is_loop(callback) and not only_watches_the_run(callback)
    ]


def _is_of_program(value: Any) -> bool:
    return _package_of(type(value)) not in _LIBRARIES


def _package_of(kind: type) -> str:
    package, _, _ = kind.__module__.partition(".")
    return package


def _namespaces_of_program(owner: Any) -> list[Mapping[str, Any]]:
    """Return the attributes of an object, and of its classes that do not belong to a library."""
    namespaces: list[Mapping[str, Any]] = [vars(owner)]
    for kind in type(owner).__mro__:
        if _package_of(kind) not in _LIBRARIES:
            namespaces.append(vars(kind))
    return namespaces


def _values_of(owner: Any) -> Iterator[Any]:
    """Yield the values of an object's attributes, and the entries of those that are collections."""
    for value in vars(owner).values():
        yield value
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, list | tuple):
            yield from value


def _names_in_code(*owners: Any) -> set[str]:
    """Return the names of all attributes that the functions of objects and of their classes read."""
    names: set[str] = set()
    for owner in owners:
        for attributes in _namespaces_of_program(owner):
            for value in attributes.values():
                for code in _codes_of(value):
                    names.update(code.co_names)
    return names


def _codes_of(value: Any) -> Iterator[CodeType]:
    """Yield the code of a function, a method or a property, and of the functions that it defines."""
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)  # of a method
    if not isinstance(value, FunctionType):
        return
    package, _, _ = value.__module__.partition(".")
    if package in _LIBRARIES:
        return
    codes = [value.__code__]
    while codes:
        code = codes.pop()
        yield code
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
