"""Attributes of a round that a component reads, what the server needs for them, and the component's view of a round."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from flsv.core.round import Round
from flsv.core.vocabulary import REQUIREMENTS, STAGES, VOCABULARY, Stage
from flsv.utilities.arguments import attribute_of
from flsv.utilities.errors import ConfigurationError

Field = str | Callable[[Round], Any]
"""Source of an argument of a metric's ``update``: an attribute of the round, or a function of the round."""


def fields_of(metric: Any) -> dict[str, Field]:
    """Return the field of each argument of a metric's ``update``, ``{argument: field}``."""
    translation: Mapping[str, Field | None] = attribute_of(metric, "round_fields", {})
    fields = {}
    for parameter in _parameters_of(metric):
        field = translation.get(parameter.name, parameter.name)
        if field is not None:
            fields[parameter.name] = field
    return fields


def reads_of(
    part: Any,
    only_required: bool = False,
) -> tuple[str, ...]:
    """Return the names of the attributes of a round that a part reads, in the order of the vocabulary.

    They are the part's ``needs`` and, for a metric, the attributes that its ``update`` takes as arguments. With
    ``only_required`` arguments that have a default are excluded.
    """
    names = set(attribute_of(part, "needs") or ())
    if _is_metric(part):
        skipped_arguments = set()
        if only_required:
            skipped_arguments = _optional_arguments_of(part)
        for argument, field in fields_of(part).items():
            # The attributes that a function of the round reads are among the declared needs.
            if isinstance(field, str) and argument not in skipped_arguments:
                names.add(field)
    return tuple(name for name in VOCABULARY if name in names)  # in the vocabulary's order


def requirements_of(
    part: Any,
    only_required: bool = False,
) -> tuple[str, ...]:
    """Return what the server must have or receive for a part, as keys of :data:`flsv.core.vocabulary.REQUIREMENTS`."""
    # The vocabulary has those of each attribute of a round. Attributes of the part declare the others.
    keywords: set[str] = set()
    for name in reads_of(part, only_required):
        keywords.update(VOCABULARY[name].requires)
    if getattr(part, "evaluates", False):
        if _is_metric(part):
            # Clients return scores only, and their validation samples replace the server's validation set.
            keywords -= {"responses", "validation"}
            keywords.add("client validation")
        else:
            keywords.add("responses")
    if getattr(part, "needs_classes", False):
        keywords.add("classes")
    if getattr(part, "uses_ground_truth", False):
        keywords.add("counts")
    if getattr(part, "reports", ()) or getattr(part, "reported_by", None):
        keywords.add("reports")
    return tuple(
        keyword for keyword in REQUIREMENTS if keyword in keywords
    )  # in the order of display


def check_declared(part: Any, reader: str) -> None:
    """Raise ConfigurationError if a part, called ``reader``, declares unknown attributes in ``needs``, or has functions
    of the round but no ``needs``.
    """
    declared = attribute_of(part, "needs")
    has_functions = _is_metric(part) and any(callable(field) for field in fields_of(part).values())
    if has_functions and declared is None:
        raise ConfigurationError(
            f"{reader}: round_fields has functions of a round, but the class does not declare which attributes they "
            'read. Add them to the class, as in needs = ("game",), or needs = () for no attribute.'
        )
    unknown = [name for name in declared or () if name not in VOCABULARY]
    if unknown:
        raise ConfigurationError(
            f"{reader}: needs = {unknown}, but a round has no such attributes. Choose from {sorted(VOCABULARY)}."
        )


def _is_metric(part: Any) -> bool:
    return hasattr(type(part), "update") and hasattr(type(part), "compute")


def _parameters_of(metric: Any) -> list[inspect.Parameter]:
    signature = inspect.signature(type(metric).update)
    _, *parameters = signature.parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [parameter for parameter in parameters if parameter.kind not in variadic]


def _optional_arguments_of(part: Any) -> set[str]:
    parameters = _parameters_of(part)
    return {parameter.name for parameter in parameters if parameter.default is not parameter.empty}


class ReadRound:
    """View of a round for one part. Reading an attribute that the part has not declared raises an error.

    Args:
        round: the round.
        part: the part.
        stage: the stage after which the part reads.
        reader: the part's name, for messages. None: its ``repr``.
    """

    __slots__ = ("_reader", "_requirements", "_round", "_stage")

    def __init__(
        self,
        round: Round,
        part: Any,
        stage: Stage,
        reader: str | None = None,
    ) -> None:
        self._round = round
        self._reader = reader or repr(part)
        self._stage = stage
        self._requirements = set[str]()
        if not _is_metric(part):
            self._requirements.add("updates")  # all aggregators and personalizers use updates
        for name in reads_of(part):
            self._requirements.update(VOCABULARY[name].requires)

    def __len__(self) -> int:
        return len(self._round)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in VOCABULARY:
            self._check(name)
        return getattr(self._round, name)

    def _check(self, name: str) -> None:
        attribute = VOCABULARY[name]
        is_known = STAGES.index(attribute.stage) <= STAGES.index(self._stage)
        if not is_known or not self._requirements.issuperset(attribute.requires):
            raise AttributeError(
                f"{self._reader} reads Round.{name}, known after {attribute.stage}, but has not declared it. Add to "
                f"its class: needs = ({name!r},)"
            )


def read_by(
    part: Any,
    round: Round,
    stage: Stage,
    reader: str | None = None,
) -> Round:
    """Return the view of the round for ``part`` after ``stage``. ``reader`` is the part's name in messages."""
    return cast(Round, ReadRound(round, part, stage, reader=reader))
