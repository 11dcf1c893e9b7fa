"""Numbers that are not finite get past no constructor and no function; test_declared.py has all that are declared."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from utilities.test_declared import CASES, PACKAGES, public_classes

from flsv import ConfigurationError, functional
from flsv.training.algorithms import MoreauSGD
from flsv.utilities.arguments import check_number

#: Whose constructors check by hand, and what they are made of.
BY_HAND: dict[type, Any] = {MoreauSGD: [nn.Parameter(torch.zeros(1))]}
#: Made by the package itself, with numbers that it has worked out.
RECORDS = {"ClientUpdate", "Cohort", "CSVData", "Round"}  # CSVData is a base class


def float_arguments(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()  # annotations are strings here
    return [p.name for p in parameters if "float" in str(p.annotation).split(" | ")]


def test_every_constructor_with_a_number_declares_its_bounds_or_is_listed() -> None:
    checked = {(cls, name) for cls, name, _ in CASES}
    taken = {
        (cls, name)
        for cls in public_classes(PACKAGES)
        if cls.__name__ not in RECORDS
        for name in float_arguments(cls.__init__)
    }
    assert {cls for cls, _ in taken - checked} == set(BY_HAND)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("cls", BY_HAND)
def test_constructors_that_check_numbers_by_hand_refuse_bad_ones(cls: type, bad: float) -> None:
    for argument in float_arguments(cls.__init__):
        with pytest.raises(ConfigurationError, match=f"{argument}.*{bad}"):
            cls(BY_HAND[cls], **{argument: bad})


def game(masks: torch.Tensor) -> torch.Tensor:
    return masks.float().sum(1)


def estimators() -> list[tuple[Callable[..., Any], str]]:
    sampled = [f for f in functional.ESTIMATORS.values() if f is not functional.exact_shapley]  # which has no error
    return [(f, argument) for f in sampled for argument in float_arguments(f)]


@pytest.mark.parametrize(("estimator", "argument"), estimators(), ids=lambda part: getattr(part, "__name__", part))
def test_no_estimator_takes_a_threshold_that_is_not_a_number(estimator: Callable[..., Any], argument: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{argument}=nan"):
        estimator(game, 3, **{argument: float("nan")})


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        (functional.wasserstein_distance, {"p": 0.5}, "p="),
        (functional.interpolating_measure, {"t": float("nan")}, "t=nan"),
        (functional.client_values, {"gamma": torch.eye(3), "blur": float("nan")}, "blur=nan"),
        (functional.client_values, {"gamma": torch.eye(3), "scaling": float("nan")}, "scaling=nan"),
    ],
)
def test_transport_functions_refuse_wrong_numbers(
    function: Callable[..., Any], arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        function(torch.eye(3), torch.eye(3), **arguments)


def test_check_number_says_what_was_expected() -> None:
    with pytest.raises(ConfigurationError, match=r"^Owner\(x=1.0\): expected a finite number in \[0, 1\)\.$"):
        check_number("Owner", "x", 1.0, least=0, below=1)
