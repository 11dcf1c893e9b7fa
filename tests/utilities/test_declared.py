"""What arguments may be is declared beside the constructors: all public classes, and the mechanism itself."""

import contextlib
import copy
import dataclasses
import importlib
import inspect
import json
import math
import pickle
import types
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import numpy as np
import pytest
import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import nn
from torchmetrics import Metric

from flsv import ConfigurationError
from flsv.aggregation import Aggregator, FedAvg, TrimmedMean
from flsv.configuration.identity import described
from flsv.core.strategy import Strategy
from flsv.data import IIDPartitioner
from flsv.filters import UpdateFilter
from flsv.metrics import ContributionMetric
from flsv.privacy import GaussianPrivacy
from flsv.scores import FromOutputs
from flsv.training.algorithms import MoreauSGD
from flsv.uploads import Upload
from flsv.utilities.declared import (
    Count,
    NonNegative,
    Positive,
    Share,
    ValidatedArguments,
    check_argument,
    checked_parameters,
)
from helpers import refused

PACKAGES = (
    "flsv", "flsv.aggregation", "flsv.attacks", "flsv.contrib", "flsv.data", "flsv.filters",
    "flsv.training.algorithms", "flsv.metrics", "flsv.models", "flsv.personalization", "flsv.privacy", "flsv.sampling",
    "flsv.tables", "flsv.uploads", "flsv.valuation", "flsv.valuation.features",
)  # fmt: skip
#: What a class cannot be made without, beside numbers.
NEEDED = {
    "Backbone": {"name": "lenet5"},
    "HeldOut": {"column": "split"},
    "CSVData": {"path": "table.csv"},
    "CharacterData": {"path": "tales.csv"},
    "TextData": {"path": "news.csv"},
    "LongTail": {"partitioner": IIDPartitioner(3)},
    "ProportionPartitioner": {"matrix": [[1.0, 1.0]]},
    "SizePartitioner": {"proportions": [1.0, 1.0]},
    "Stream": {"dataset": range(3)},
    "Bucketing": {"aggregator": FedAvg()},
    "MoreauSGD": {"params": [nn.Parameter(torch.zeros(1))]},
    "OpenSetLabelNoise": {"unknown_classes": [0]},
    "PrivacyLoss": {"privacy": GaussianPrivacy(clip=1.0, noise_multiplier=1.0)},
    "ServerOptimizer": {"optimizer": partial(torch.optim.SGD, lr=1.0)},
}
STEP = 1e-6
#: Each part's description, by the code that makes the part.
DESCRIPTIONS = Path(__file__).with_name("descriptions.json")


def public_classes(packages):
    classes = {}
    for name in packages:
        package = importlib.import_module(name)
        for item_name in package.__all__:
            item = getattr(package, item_name)
            if inspect.isclass(item) and not inspect.isabstract(item):
                classes[item] = None
    return list(classes)


def declared_classes():
    return [cls for cls in public_classes(PACKAGES) if hasattr(cls.__init__, "__wrapped__")]


def alternatives_of(hint):
    """Types of a union, each with its markers."""
    if get_origin(hint) in (Union, types.UnionType):
        for part in get_args(hint):
            yield from alternatives_of(part)
    elif get_origin(hint) is Annotated:
        base, *markers = get_args(hint)
        for kind, _ in alternatives_of(base):
            yield kind, tuple(markers)
    else:
        yield hint, ()


class BoundValues(NamedTuple):
    """The last value that a bound refuses, and the first that it admits."""

    beyond: float
    admitted: float


def values_around_bound(kind, marker):
    (bound,) = dataclasses.astuple(marker)
    step = 1 if kind is int else STEP
    return {
        Gt: BoundValues(beyond=bound, admitted=bound + step),
        Ge: BoundValues(beyond=bound - step, admitted=bound),
        Lt: BoundValues(beyond=bound, admitted=bound - step),
        Le: BoundValues(beyond=bound + step, admitted=bound),
    }[type(marker)]


def bounds_of(markers):
    """The markers but sentences on what a value is for."""
    return [marker for marker in markers if not isinstance(marker, str)]


def refused_numbers(kind, markers):
    """Numbers that one alternative, int or float, refuses."""
    numbers = [math.nan, math.inf, -math.inf]
    if kind is int:
        numbers.append(1.5)
    for bound in bounds_of(markers):
        numbers.append(values_around_bound(kind, bound).beyond)
    return numbers


def values_beyond(hint):
    """Values that no alternative admits."""
    markers_by_kind = dict(alternatives_of(hint))
    is_number_or_fraction = int in markers_by_kind and float in markers_by_kind
    for kind in (int, float):
        if kind not in markers_by_kind:
            continue
        for number in refused_numbers(kind, markers_by_kind[kind]):
            # If an argument is a number or a fraction of samples, one of these may admit 0 or 1 if the other does not.
            if is_number_or_fraction and number in (0, 1):
                continue
            yield number

    admits_text = str in markers_by_kind
    admits_lists = any(get_origin(kind) in (list, Sequence) for kind in markers_by_kind)
    is_text_refused = not admits_text and not admits_lists  # a text is a sequence of texts
    if is_text_refused:
        yield "nonsense"


def values_at_bounds(hint):
    """Values that are just admitted."""
    for kind, markers in alternatives_of(hint):
        for bound in bounds_of(markers):
            yield values_around_bound(kind, bound).admitted

        if get_origin(kind) is Literal:
            yield from get_args(kind)
        elif kind is bool:
            yield True


CASES = [
    (cls, name, hint)
    for cls in declared_classes()
    for name, (hint, _) in checked_parameters(cls.__init__).items()
]


def required_arguments(cls):
    plain = {}
    for name, (hint, default) in checked_parameters(cls.__init__).items():
        if default is inspect.Parameter.empty:
            plain[name] = next(values_at_bounds(hint), 1.0)
    return {**plain, **NEEDED.get(cls.__name__, {})}


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("cls", "name", "hint"), CASES, ids=lambda part: part if isinstance(part, str) else ""
)
def test_argument_beyond_its_bounds_is_refused(cls, name, hint):
    for value in values_beyond(hint):
        with pytest.raises(ConfigurationError) as error:
            cls(**{**required_arguments(cls), name: value})
        assert str(error.value).startswith(f"{cls.__name__}({name}={value!r}): expected ")
    for value in values_at_bounds(hint):
        check_argument(cls.__name__, name, value, hint)
        with contextlib.suppress(ConfigurationError):  # beside the other arguments it may be wrong
            cls(**{**required_arguments(cls), name: value})


@pytest.mark.parametrize(
    "cls", [cls for cls in declared_classes() if issubclass(cls, ValidatedArguments)]
)
def test_parts_that_differ_in_an_argument_have_different_descriptions(cls):
    """A resumed run, a table of runs and run.json go by it."""
    values_by_argument = {}
    for name, (hint, _) in checked_parameters(cls.__init__).items():
        values_by_argument[name] = [*values_at_bounds(hint), 0.25, 2, 3, 4]
    if "metric" in inspect.signature(cls).parameters:
        values_by_argument["metric"] = ["sv", "another"]
    # What a federation gives, and what changes no number, may be missing in a description.
    for name in ("num_clients", "num_classes", "workers"):
        values_by_argument.pop(name, None)

    for name, values in values_by_argument.items():
        value_by_description = {}
        for value, part in parts_with(cls, name, values):
            description = f"{described(part)} {part!r}"
            # Equal values, such as 1 and 1.0, may have one description.
            described_value = value_by_description.setdefault(description, value)
            assert described_value == value, name


#: Classes of a federation's parts.
PART_CLASSES = (Strategy, ContributionMetric, Upload, UpdateFilter)
#: What these parts cannot be made without, beside NEEDED.
NEEDED_BY_PARTS = {
    "FalseReports": {"loss": 1.0},
    "FixedCohort": {"clients": [0]},
    "PowerOfChoice": {"candidates": 2},
}


class OwnScore(Metric):
    """A metric whose attributes do not depend on torchmetrics' version."""

    higher_is_better = True

    def update(self, outputs, labels):
        pass

    def compute(self):
        return torch.zeros(())


#: Performance measures of each kind, of which more is better.
MEASURES = (
    {"performance": "balanced_accuracy"},
    {"performance": "auroc"},
    {"performance": "val_score", "mode": "max"},
    {"performance": OwnScore()},
    {"performance": FromOutputs("auroc", logits=False)},
)


def parts_by_code():
    """Return all public parts with their defaults, and parts with other measures, by the code that makes them."""
    parts = {}
    for cls in public_classes(PACKAGES):
        if not issubclass(cls, PART_CLASSES):
            continue
        required = {**required_arguments(cls), **NEEDED_BY_PARTS.get(cls.__name__, {})}
        changes = [{}]
        parameters = inspect.signature(cls).parameters
        if "performance" in parameters:
            changes += MEASURES
        if "evaluators" in parameters:
            changes += [{"evaluators": "clients"}]
        if "loss" in parameters and not required:
            changes += [{"loss": "val_loss"}]
        for changed in changes:
            arguments = ", ".join(f"{name}={value!r}" for name, value in changed.items())
            parts[f"{cls.__name__}({arguments})"] = cls(**{**required, **changed})
    return parts


@pytest.mark.slow
def test_descriptions_of_parts_stay_as_they_were():
    """With another description a saved run cannot be resumed."""
    descriptions = {code: described(part) for code, part in parts_by_code().items()}

    saved_descriptions = json.loads(DESCRIPTIONS.read_text())
    assert descriptions == saved_descriptions, f"If a change is meant, write it to {DESCRIPTIONS}."


def parts_with(cls, name, values):
    """Make a part with each value of an argument that is admitted, alone and beside the other arguments."""
    for value in values:
        try:
            part = cls(**{**required_arguments(cls), name: value})
        except ConfigurationError:
            continue
        yield value, part


def test_check_argument_refuses_lists_with_wrong_numbers():
    for wrong in ([1.0, math.nan], (1.0, "2"), "12", 3.0):
        with refused(r"expected.*finite number.*least 0\)"):
            check_argument("Owner", "shares", wrong, Sequence[NonNegative])
    check_argument(
        "Owner", "shares", torch.ones(2), list[NonNegative]
    )  # whoever takes it looks into it


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1.5, Annotated[float, Gt(0), Le(1)], "a finite number in (0, 1]."),
        (0, Positive, "a finite number above 0."),
        (2.5, Count, "a whole number of at least 1."),
        (10**400, float, "a finite number."),
        ("c", Literal["a", "b"] | None, '"a" or "b" or None.'),
        (
            0,
            Annotated[float, Gt(0), "Such as 1.5."] | None,
            "a finite number above 0 or None. Such as 1.5.",
        ),
    ],
)
def test_check_argument_says_what_was_expected(value, hint, expected):
    with pytest.raises(ConfigurationError) as error:
        check_argument("Owner", "x", value, hint)
    assert str(error.value).endswith(f"): expected {expected}")


class Own(Aggregator):
    """As somebody else writes one."""

    rules = ((lambda a: a.high > a.low, "high={high}: expected more than low, {low}."),)

    def __init__(
        self, low: NonNegative = 0, high: float = 1, name: str | None = None, **kwargs: Any
    ):
        super().__init__(**kwargs)
        self.low = low
        self.high = high
        self.name = name

    weights = FedAvg.weights
    weighting = "uniform"


def test_user_subclass_has_checked_arguments_and_a_repr():
    part = Own(0.5, high=2.0)
    assert repr(part) == "Own(low=0.5, high=2.0)"
    assert repr(copy.deepcopy(part)) == repr(part)
    assert repr(pickle.loads(pickle.dumps(part))) == repr(part)

    assert list(inspect.signature(Own).parameters) == ["low", "high", "name", "kwargs"]

    with refused(r"Own\(low=-1\): expected.*at least 0"):
        Own(-1)

    with refused(r"Own\(server_lr=0\): expected.*number above 0"):
        Own(server_lr=0)  # by its base's constructor

    with refused(r"Own\(low=3\): high=1: expected more.*3\."):
        Own(3)

    with pytest.raises(TypeError, match="unexpected keyword argument 'hihg'"):
        TrimmedMean(hihg=2)


@pytest.mark.parametrize(
    ("value", "hint", "kind"),
    [
        (np.int64(3), Count, int),
        (np.float32(0.5), Share | None, float),
        (np.array([1.0, 0.5]), list[NonNegative], list),
    ],
)
def test_numbers_of_other_libraries_become_pythons(value, hint, kind):
    number = check_argument("Owner", "x", value, hint)
    assert type(number) is kind
    assert number == (value.tolist() if kind is list else value)


#: Made by the package itself, with numbers that it has worked out.
RECORDS = {"ClientUpdate", "Cohort", "CSVData", "Round"}  # CSVData is a base class


def float_arguments(function):
    parameters = inspect.signature(function).parameters.values()  # annotations are strings here
    return [p.name for p in parameters if "float" in str(p.annotation).split(" | ")]


def test_every_constructor_with_a_number_declares_its_bounds_or_is_listed():
    checked = {(cls, name) for cls, name, _ in CASES}
    classes_without_bounds = set()
    for cls in public_classes(PACKAGES):
        if cls.__name__ in RECORDS:
            continue
        for name in float_arguments(cls.__init__):
            if (cls, name) not in checked:
                classes_without_bounds.add(cls)

    assert classes_without_bounds == {MoreauSGD}


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_moreau_sgd_checks_its_numbers_by_hand(bad):
    for argument in float_arguments(MoreauSGD.__init__):
        with refused(f"{argument}.*{bad}"):
            MoreauSGD(**NEEDED["MoreauSGD"], **{argument: bad})
