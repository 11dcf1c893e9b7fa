"""Checks that all parts of a federation share: copies, pickles, and the words that a run is told apart by."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from flsv.server.identity import described
from flsv.testing.checks import Case, expect

_MISSING = object()
#: Arguments that a federation gives.
_SIZES = {"num_clients", "num_classes"}


def is_one(case: Any) -> None:
    """It is a subclass of what it is checked as."""
    kind = type(case.part).__name__
    expect(
        isinstance(case.part, case.base),
        f"a subclass of {case.base.__name__}; got {kind}",
        f"Write class {kind}({case.base.__name__}).",
    )


def pickles(case: Case) -> None:
    """A copy and a pickle are what the part is."""
    part = case.new()
    try:
        pickled = pickle.loads(pickle.dumps(part))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise AssertionError(
            f"expected a part that can be pickled, as ranks and copies of a loop need it; got {error}. Define its "
            "class and functions at the top of a module."
        ) from error
    for how, other in (("pickle", pickled), ("copy", case.new())):
        expect(
            described(other) == described(part),
            f"the part's {how} to be described as the part is, {described(part)}; got {described(other)}",
            "Keep the arguments as attributes.",
        )


def settings_are_described(case: Case) -> None:
    """What differs in an argument is described otherwise: a resumed run, a table of runs and ``run.json`` go by it."""
    part = case.new()
    text = _words(part)
    for name, value in arguments_of(part).items():
        for other in [each for each in _others(part, name, value) if each != value]:
            changed = _made(part, {name: other})
            if changed is None:
                continue
            expect(
                _words(changed) != text,
                f"{type(part).__name__}({name}={value!r}) and ({name}={other!r}) to be described differently; both are "
                f"{text}",
                f"Keep the argument as self.{name}.",
            )
            break


def repr_is_code(case: Case) -> None:
    """``repr`` shows the class and no address in memory."""
    text = repr(case.new())
    expect(
        text.startswith(type(case.part).__name__ + "(") and " at 0x" not in text,
        f"repr to be {type(case.part).__name__}(argument=value, ...); got {text}",
        "Leave __repr__ to the base class, and keep arguments as attributes.",
    )


def arguments_of(part: Any) -> dict[str, Any]:
    """A part's constructor arguments, as it holds them.

    Raises:
        AssertionError: one that it does not hold, and that has no default.
    """
    found = {}
    for name, parameter in inspect.signature(type(part)).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in _SIZES:
            continue
        value = _held(part, name)
        if value is _MISSING:
            value = parameter.default
        expect(
            value is not inspect.Parameter.empty,
            f"{type(part).__name__} to keep its argument {name!r}",
            f"Say self.{name} = {name} in the constructor.",
        )
        found[name] = value
    return found


def _held(part: Any, name: str) -> Any:
    holders = [part, *(value for value in vars(part).values() if is_dataclass(value))]
    for holder in holders:
        for attribute in (name, f"_{name}"):
            if hasattr(holder, attribute):
                return getattr(holder, attribute)
    return _MISSING


def _words(part: Any) -> str:
    return f"{described(part)} {part!r}"


def _made(part: Any, changes: dict[str, Any]) -> Any:
    """Another of its class; None where it does not go with the rest."""
    sizes = {name: getattr(part, name) for name in _SIZES if name in inspect.signature(type(part)).parameters}
    try:
        return type(part)(**{**sizes, **arguments_of(part), **changes})
    except ValueError:
        return None


def _others(part: Any, name: str, value: Any) -> Iterator[Any]:
    """Other values that an argument may have; none where it was not given."""
    if value is None:
        return
    hints = get_type_hints(type(part).__init__)
    options = _literals(hints.get(name))
    if options:
        yield from options
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1, 2 * value)
    elif isinstance(value, float):
        yield from (value / 2, (value + 1) / 2, 2 * value)
    elif isinstance(value, str) and name == "metric":
        yield f"{value}_of_another"


def _literals(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(each for part in get_args(hint) for each in _literals(part)) if get_origin(hint) is not None else ()
