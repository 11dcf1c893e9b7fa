"""Functions that check arguments against annotations such as ``Annotated[float, Ge(0), Lt(1)]``."""
# The design follows sklearn/utils/_param_validation.py, with the markers of annotated-types. Unlike `if lr <= 0:
# raise`, the checks refuse NaN.

from __future__ import annotations

import contextlib
import copy
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
    Concatenate,
    Literal,
    ParamSpec,
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
_Arguments = ParamSpec("_Arguments")
#: One kind of values that an annotation allows, as a pair: a function that converts a value of this kind, or raises an
#: error for other values, and a description of the kind.
_Choice = tuple[Callable[[Any], Any], str]
#: For each marker: its attribute with the bound, the comparison, and how a message says it.
_COMPARISONS: Mapping[type, tuple[str, Callable[[Any, Any], bool], str]] = {
    Gt: ("gt", operator.gt, "above"),
    Ge: ("ge", operator.ge, "of at least"),
    Lt: ("lt", operator.lt, "below"),
    Le: ("le", operator.le, "of at most"),
}


def checked(function_or_class: _T) -> _T:
    """Decorate a function or a class to check the arguments of each call against their annotations."""
    if not isinstance(function_or_class, type):
        return _add_checks(function_or_class, ())
    checked_class = function_or_class
    rules = vars(checked_class).get("rules", ())
    # mypy: a class's constructor
    checked_class.__init__ = _add_checks(checked_class.__init__, rules)  # type: ignore[misc]
    return checked_class


def name_places(owner: type, **groups: type) -> None:
    """Let errors for an unknown argument say where it belongs: to ``owner``, or to a group of its options.

    ``groups`` has the class of each argument that is a group of options. Errors of these classes say it, too.
    """
    place_by_argument: dict[str, str] = {}
    for group, group_class in groups.items():
        for name in inspect.signature(group_class).parameters:
            place = f"{owner.__name__}({group}={group_class.__name__}({name}=...))"
            place_by_argument.setdefault(name, place)
    for name in inspect.signature(owner).parameters:
        place_by_argument[name] = f"{owner.__name__}({name}=...)"

    for options_class in (owner, *groups.values()):
        # mypy: a class's constructor
        constructor = _with_places(options_class.__init__, place_by_argument)  # type: ignore[misc]
        options_class.__init__ = constructor  # type: ignore[misc]


def _with_places(constructor: Any, place_by_argument: Mapping[str, str]) -> Any:
    names = inspect.signature(constructor).parameters

    @functools.wraps(constructor)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in names and name in place_by_argument:
                raise TypeError(
                    f"{type(self).__name__}() got an unexpected keyword argument {name!r}, which belongs elsewhere: "
                    f"{place_by_argument[name]}."
                )
        constructor(self, *args, **kwargs)

    return construct


def with_arguments_of(
    constructor: Callable[Concatenate[Any, _Arguments], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, _Arguments], None]]:
    """Decorate a constructor that passes all arguments on to show the arguments of ``constructor``."""
    return functools.wraps(constructor)


def _add_checks(function: Any, rules: Rules) -> Any:
    """Return a function that checks its arguments, and then calls ``function``."""
    signature = inspect.signature(function)
    is_constructor = function.__name__ == "__init__"

    @functools.wraps(function)
    def call_with_checks(*args: Any, **kwargs: Any) -> Any:
        if is_constructor:
            owner = type(args[0]).__name__  # of the object, perhaps a subclass
        else:
            owner = function.__name__
        try:
            call = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{owner}() {error}") from None
        converted_arguments = check_arguments(owner, function, call.arguments)
        call.arguments.update(converted_arguments)
        if rules:
            _check_rules(owner, rules, call)
        return function(*call.args, **call.kwargs)

    return call_with_checks


def _check_rules(owner: str, rules: Rules, call: inspect.BoundArguments) -> None:
    # Rules may read the defaults of arguments that the call leaves out.
    call_with_defaults = copy.copy(call)
    call_with_defaults.apply_defaults()
    arguments = call_with_defaults.arguments
    for holds, message in rules:
        if not holds(types.SimpleNamespace(**arguments)):
            changed_arguments = _format_changed(call.signature, arguments)
            raise ConfigurationError(f"{owner}({changed_arguments}): {message.format(**arguments)}")


class ValidatedArguments:
    """Mixin that checks a constructor's arguments against their annotations."""

    rules: ClassVar[Rules] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if vars(cls).keys() & {"__init__", "rules"}:
            checked(cls)

    def __repr__(self) -> str:
        """Show the arguments that differ from their defaults."""
        signature = inspect.signature(type(self))
        arguments = {}
        for name in signature.parameters:
            if hasattr(self, name):
                arguments[name] = getattr(self, name)
        return f"{type(self).__name__}({_format_changed(signature, arguments)})"


def _format_changed(signature: inspect.Signature, arguments: Mapping[str, Any]) -> str:
    """Format the arguments that differ from their defaults."""
    assignments = []
    for name, default in _defaults(signature).items():
        if name not in arguments:
            continue
        text = repr(arguments[name])
        if text != repr(default):
            assignments.append(f"{name}={text}")
    return ", ".join(assignments)


def _defaults(signature: inspect.Signature) -> dict[str, Any]:
    """Return ``{name: default}`` of the named parameters, without ``self``."""
    unnamed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    defaults = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind not in unnamed and name != "self":
            defaults[name] = parameter.default
    return defaults


def check_arguments(
    owner: str,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """Check arguments against the annotations of ``function``, and return them as plain Python values."""
    checked_arguments = {}
    for name, (hint, default) in checked_parameters(function).items():
        if name not in arguments:
            continue
        value = arguments[name]
        if value is not default:
            value = check_argument(owner, name, value, hint)
        checked_arguments[name] = value
    return checked_arguments


@functools.cache
def checked_parameters(function: Callable[..., Any]) -> Mapping[str, tuple[Any, Any]]:
    """Return ``{parameter: (annotation, default)}`` of parameters whose annotation says what values are allowed."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError:  # another package's function, with names that only a type checker knows
        return {}
    parameters = {}
    for name, default in _defaults(inspect.signature(function)).items():
        if _is_checked(hints.get(name)):
            parameters[name] = hints[name], default
    return parameters


def check_argument(
    owner: str,
    name: str,
    value: Any,
    hint: Any,
) -> Any:
    """Convert a value to a plain Python value, or raise ConfigurationError if ``hint`` does not allow it."""
    choices = _choices(hint)
    try:
        return _convert_by_first(choices, value)
    except ValueError:
        sentences = [f"expected {_in_words(choices)}.", *_advice_in(hint)]
        raise ConfigurationError(
            f"{owner}({name}={reprlib.repr(value)}): {' '.join(sentences)}"
        ) from None


def _in_words(choices: Sequence[_Choice]) -> str:
    return " or ".join(description for _, description in choices)


def _convert_by_first(choices: Sequence[_Choice], value: Any) -> Any:
    """Convert a value by the first of ``choices`` that allows it."""
    for convert, _ in choices:
        with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
            return convert(value)
    raise ValueError


def _is_checked(hint: Any) -> bool:
    kind = get_origin(hint)
    if _is_list(hint) or kind in _UNIONS:
        return any(_is_checked(part) for part in get_args(hint))
    return hint in (bool, int, float) or kind in (Literal, Annotated)


def _is_list(hint: Any) -> bool:
    is_homogeneous_tuple = get_args(hint)[1:] == (Ellipsis,)
    return is_homogeneous_tuple or get_origin(hint) in (list, Sequence)


def _choices(hint: Any) -> list[_Choice]:
    """Return a converter and its description for each kind of values that an annotation allows."""
    # A choice is a function that converts or refuses a value, and a description.
    kind = get_origin(hint)
    type_arguments = get_args(hint)
    if kind is Annotated:
        inner_hint, *metadata = type_arguments
        markers = [marker for marker in metadata if type(marker) in _COMPARISONS]
        return [_within_bounds(choice, markers) for choice in _choices(inner_hint)]
    if kind in _UNIONS:
        choices = []
        for member in type_arguments:
            choices += _choices(member)
        return choices
    if kind is Literal:
        return [_one_of(option) for option in type_arguments]
    if _is_list(hint):
        hint_of_entries = type_arguments[0]
        return [_list_of(_choices(hint_of_entries))]
    return [_single_choice(hint)]


def _single_choice(hint: Any) -> _Choice:
    """Return a converter and its description for an annotation that allows one kind of values."""
    # A function that converts or refuses a value, and a description of what is expected.
    kind = get_origin(hint)
    require_object = _require(lambda value: not isinstance(value, str | Number | None))
    if kind is dict:
        _name_hint, value_hint = get_args(hint)
        return require_object, f"a mapping of names to {_in_words(_choices(value_hint))}"
    if kind is Callable:
        return _require(callable), "a function"
    if hint in _PLAIN_CHOICES:
        return _PLAIN_CHOICES[hint]

    is_protocol = getattr(hint, "_is_protocol", False)
    if isinstance(hint, type) and hint is not Any and not is_protocol:
        require_instance = _require(lambda value: isinstance(value, hint))
        return require_instance, f"a {hint.__name__}"
    return require_object, str(hint)


def _require(holds: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """Return a function that raises ValueError unless ``holds`` is true of its argument."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError
        return value

    return check


_require_int64 = _require(lambda value: abs(value) < 2**63)


def _require_number(value: Any) -> Any:
    """Return the value, or raise TypeError if it is a bool."""
    dtype = str(getattr(value, "dtype", ""))
    if isinstance(value, bool) or dtype.endswith("bool"):
        raise TypeError
    return value


def _to_finite_number(value: Any) -> int | float:
    if not math.isfinite(_require_number(value)):
        raise ValueError
    with contextlib.suppress(TypeError):
        return operator.index(value)
    return float(value)


_UNIONS = (Union, types.UnionType)


def _to_whole_number(value: Any) -> int:
    number = operator.index(_require_number(value))
    return _require_int64(number)


_require_bool = _require(lambda value: isinstance(value, bool))
_require_none = _require(lambda value: value is None)
_PLAIN_CHOICES: Mapping[Any, _Choice] = {
    float: (_to_finite_number, "a finite number"),
    int: (_to_whole_number, "a whole number"),
    bool: (_require_bool, "True or False"),
    types.NoneType: (_require_none, "None"),
    str: (_require(lambda value: isinstance(value, str)), "a text"),
}


def _one_of(option: Any) -> _Choice:
    description = f'"{option}"' if isinstance(option, str) else repr(option)

    def is_option(value: Any) -> bool:
        return isinstance(value, type(option)) and value == option

    return _require(is_option), description


def _list_of(choices: Sequence[_Choice]) -> _Choice:
    def convert_entries(values: Any) -> Any:
        if hasattr(values, "tolist"):  # arrays of NumPy, torch and pandas
            entries = values.tolist()
        else:
            entries = values
        if isinstance(entries, str | bytes):
            raise TypeError  # a text is no list
        converted = [_convert_by_first(choices, entry) for entry in entries]
        if isinstance(values, list | tuple):
            needs_no_change = all(new is old for new, old in zip(converted, values))
            if needs_no_change:
                return values
        return converted

    return convert_entries, f"a list (each: {_in_words(choices)})"


def _within_bounds(choice: _Choice, markers: Sequence[Any]) -> _Choice:
    """Return the kind of values of ``choice`` that lie within bounds."""
    # A marker is annotated_types' Gt, Ge, Lt or Le.
    convert, description = choice

    def convert_and_check(value: Any) -> Any:
        converted = convert(value)
        for marker in markers:
            _attribute, is_within, _word = _COMPARISONS[type(marker)]
            if not is_within(converted, _limit(marker)):
                raise ValueError
        return converted

    if len(markers) == 2:
        return convert_and_check, f"{description} in {_interval(*markers)}"
    for marker in markers:
        _attribute, _is_within, word = _COMPARISONS[type(marker)]
        description += f" {word} {_limit(marker):g}"
    return convert_and_check, description


def _limit(marker: Any) -> float:
    attribute, _is_within, _word = _COMPARISONS[type(marker)]
    limit: float = getattr(marker, attribute)
    return limit


def _interval(low: Any, high: Any) -> str:
    opening = "[" if isinstance(low, Ge) else "("
    closing = "]" if isinstance(high, Le) else ")"
    return f"{opening}{_limit(low):g}, {_limit(high):g}{closing}"


def _advice_in(hint: Any) -> list[str]:
    """Return the sentences of advice in an annotation such as ``Annotated[str, "Say a name."]``, and within it."""
    metadata = getattr(hint, "__metadata__", ())  # of Annotated
    sentences = [item for item in metadata if isinstance(item, str) and item]
    inner_hints = get_args(hint)
    if get_origin(hint) is Literal:
        inner_hints = ()  # its arguments are values
    for inner_hint in inner_hints:
        sentences += _advice_in(inner_hint)
    return sentences
