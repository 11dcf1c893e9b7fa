"""Functions that check arguments by annotations such as ``Annotated[float, Ge(0), Lt(1)]``."""
# The design follows sklearn/utils/_param_validation.py, with the markers of annotated-types. Unlike `if lr <= 0:
# raise`, the checks refuse NaN.

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
import reprlib
import types
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt

from flsv.utilities.errors import ConfigurationError

Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
Momentum = Annotated[float, Ge(0), Lt(1)]
Count = Annotated[int, Ge(1)]
#: Conditions on a call's arguments. Each comes with the message for a call that fails it, in which ``{name}`` stands
#: for the argument of this name.
Rules = Sequence[tuple[Callable[[Any], bool], str]]

_T = TypeVar("_T")
#: One kind of values that an annotation allows, as a pair: a function that converts a value of this kind, or raises an
#: error for other values, and a description of the kind.
_Choice = tuple[Callable[[Any], Any], str]
_BOUNDS: Mapping[type, tuple[str, Callable[[Any, Any], bool], str]] = {
    Gt: ("gt", operator.gt, "above"),
    Ge: ("ge", operator.ge, "of at least"),
    Lt: ("lt", operator.lt, "below"),
    Le: ("le", operator.le, "of at most"),
}


def checked(thing: _T) -> _T:
    """Decorate a function or a class to check the arguments of each call by their annotations."""
    if isinstance(thing, type):
        # mypy: a class's constructor
        thing.__init__ = _checking(thing.__init__, vars(thing).get("rules", ()))  # type: ignore[misc]
        return thing
    return _checking(thing, ())


def _checking(function: Any, rules: Rules) -> Any:
    signature = inspect.signature(function)
    of_class = function.__name__ == "__init__"

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # raises Python's own message on a wrong signature
        owner = type(args[0]).__name__ if of_class else function.__name__
        bound.arguments |= check_arguments(owner, function, bound.arguments)
        args, kwargs = bound.args, bound.kwargs
        bound.apply_defaults()
        for holds, message in rules:
            if not holds(types.SimpleNamespace(**bound.arguments)):
                shown = _shown(signature, bound.arguments)
                raise ConfigurationError(f"{owner}({shown}): {message.format(**bound.arguments)}")
        return function(*args, **kwargs)

    return call


class ValidatedArguments:
    """Mixin that checks a constructor's arguments by their annotations."""

    rules: ClassVar[Rules] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if vars(cls).keys() & {"__init__", "rules"}:
            checked(cls)

    def __repr__(self) -> str:
        """Show the arguments that differ from their defaults."""
        signature = inspect.signature(type(self))
        held = {name: getattr(self, name) for name in signature.parameters if hasattr(self, name)}
        return f"{type(self).__name__}({_shown(signature, held)})"


def _shown(signature: inspect.Signature, arguments: Mapping[str, Any]) -> str:
    held = {name: default for name, default in _defaults(signature).items() if name in arguments}
    changed = {
        name: repr(arguments[name]) for name in held if repr(arguments[name]) != repr(held[name])
    }
    return ", ".join(f"{name}={text}" for name, text in changed.items())


def _defaults(signature: inspect.Signature) -> dict[str, Any]:
    """Return ``{name: default}`` of the named parameters, without ``self``."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = [
        p for p in signature.parameters.values() if p.kind not in variable and p.name != "self"
    ]
    return {p.name: p.default for p in parameters}


def check_arguments(
    owner: str, function: Callable[..., Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Check arguments by the annotations of ``function``, and return them as plain Python values."""
    return {
        name: default
        if arguments[name] is default
        else check_argument(owner, name, arguments[name], hint)
        for name, (hint, default) in checked_parameters(function).items()
        if name in arguments
    }


@functools.cache
def checked_parameters(function: Callable[..., Any]) -> Mapping[str, tuple[Any, Any]]:
    """Return ``{parameter: (annotation, default)}`` of parameters whose annotation says what values are allowed."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError:  # another package's function, with names that only a type checker knows
        return {}
    named = _defaults(inspect.signature(function)).items()
    return {name: (hints[name], default) for name, default in named if _is_checked(hints.get(name))}


def check_argument(owner: str, name: str, value: Any, hint: Any) -> Any:
    """Convert a value to a plain Python value, or raise ConfigurationError if ``hint`` does not allow it."""
    choices = _choices(hint)
    try:
        return _first(choices, value)
    except ValueError:
        expected = " ".join([f"{' or '.join(words for _, words in choices)}.", *_remarks(hint)])
        raise ConfigurationError(
            f"{owner}({name}={reprlib.repr(value)}): expected {expected}"
        ) from None


def _first(choices: Sequence[_Choice], value: Any) -> Any:
    """Convert a value by the first of ``choices`` that allows it."""
    for read, _ in choices:
        with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
            return read(value)
    raise ValueError


def _is_checked(hint: Any) -> bool:
    if _is_list(hint) or get_origin(hint) in _UNIONS:
        return any(_is_checked(part) for part in get_args(hint))
    return hint in (bool, int, float) or get_origin(hint) in (Literal, Annotated)


def _is_list(hint: Any) -> bool:
    """Return whether an annotation is ``list[int]`` or the like."""
    return get_origin(hint) in (list, Sequence) or get_args(hint)[1:] == (Ellipsis,)


def _choices(hint: Any) -> list[_Choice]:
    """Return a converter and its description for each kind of values that an annotation allows."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return [
            _bounded(choice, [marker for marker in parts[1:] if type(marker) in _BOUNDS])
            for choice in _choices(parts[0])
        ]
    if kind in _UNIONS:
        return [choice for part in parts for choice in _choices(part)]
    if kind is Literal:
        return [_one_of(part) for part in parts]
    if _is_list(hint):
        return [_each(_choices(parts[0]))]
    if kind is Callable:
        return [(_that(callable), "a function")]
    if hint in _PLAIN:
        return [_PLAIN[hint]]
    if isinstance(hint, type) and hint is not Any and not getattr(hint, "_is_protocol", False):
        return [(_that(lambda value: isinstance(value, hint)), f"a {hint.__name__}")]
    return [(_that(lambda value: not isinstance(value, str | Number | None)), str(hint))]


def _that(holds: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """Return a function that returns its argument, or raises ValueError unless ``holds`` is true of it."""

    def read(value: Any) -> Any:
        if not holds(value):
            raise ValueError
        return value

    return read


_int64 = _that(lambda value: abs(value) < 2**63)


def _number(value: Any) -> Any:
    """Return the value, or raise TypeError if it is a bool."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        raise TypeError
    return value


def _finite(value: Any) -> int | float:
    if not math.isfinite(_number(value)):
        raise ValueError
    with contextlib.suppress(TypeError):
        return operator.index(value)
    return float(value)


_UNIONS = (Union, types.UnionType)
_PLAIN: Mapping[Any, _Choice] = {
    float: (_finite, "a finite number"),
    int: (lambda value: _int64(operator.index(_number(value))), "a whole number"),
    bool: (_that(lambda value: isinstance(value, bool)), "True or False"),
    types.NoneType: (_that(lambda value: value is None), "None"),
}


def _one_of(option: Any) -> _Choice:
    words = f'"{option}"' if isinstance(option, str) else repr(option)
    return _that(lambda value: isinstance(value, type(option)) and value == option), words


def _each(choices: Sequence[_Choice]) -> _Choice:
    def read(values: Any) -> Any:
        held = (
            values.tolist() if hasattr(values, "tolist") else values
        )  # arrays of NumPy, torch and pandas
        if isinstance(held, str | bytes):
            raise TypeError
        found = [_first(choices, value) for value in held]
        return (
            values
            if isinstance(values, list | tuple) and all(map(operator.is_, found, values))
            else found
        )

    return read, f"a list (each: {' or '.join(words for _, words in choices)})"


def _bounded(choice: _Choice, markers: Sequence[Any]) -> _Choice:
    read, words = choice
    bounds = [
        (*_BOUNDS[type(marker)][1:], getattr(marker, _BOUNDS[type(marker)][0]))
        for marker in markers
    ]
    if len(bounds) == 2:
        (low, high), (least, most) = markers, (bound for *_, bound in bounds)
        words += f" in {'[' if isinstance(low, Ge) else '('}{least:g}, {most:g}{']' if isinstance(high, Le) else ')'}"
    else:
        words += "".join(f" {word} {bound:g}" for _, word, bound in bounds)
    within = _that(lambda value: all(holds(value, bound) for holds, _, bound in bounds))
    return lambda value: within(read(value)), words


def _remarks(hint: Any) -> list[str]:
    own = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, str) and each]
    parts = () if get_origin(hint) is Literal else get_args(hint)
    return own + [text for part in parts for text in _remarks(part)]
