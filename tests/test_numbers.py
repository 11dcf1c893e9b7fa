"""Numbers that are not finite never get past a constructor, whoever's constructor it is."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flsv import ConfigurationError
from flsv.arguments import check_number
from flsv.data import IIDPartitioner, SizePartitioner
from flsv.functional import shapley, transport

PACKAGES = (
    *("flsv", "flsv.aggregation", "flsv.attacks", "flsv.data", "flsv.features", "flsv.filters"),
    "flsv.functional.transport",
    *(
        "flsv.clients.algorithms",
        "flsv.metrics",
        "flsv.models",
        "flsv.personalization",
        "flsv.privacy",
        "flsv.sampling",
    ),
    "flsv.valuation",
)
#: What a class cannot be made without, beside the numbers that are tested.
NEEDED: dict[str, dict[str, Any]] = {
    "CopyFilter": {"threshold": 0.7, "gap": 0.4},
    "NormCap": {"cap": 1.25},
    "SampleCap": {"cap": 1.25},
    "CharacterData": {"path": "tales.csv"},
    "TableData": {"path": "table.csv", "target": "y"},
    "TextData": {"path": "news.csv"},
    "BernoulliSampler": {"expected_cohort": 2},
    "DirichletPartitioner": {"num_clients": 3, "alpha": 1.0},
    "FalseReports": {"loss": 1.0},
    "GaussianPrivacy": {"clip": 1.0, "noise_multiplier": 2.0},
    "LongTail": {"partitioner": IIDPartitioner(3), "imbalance_ratio": 10},
    "MoreauSGD": {"params": [nn.Parameter(torch.zeros(1))]},
    "OpenSetLabelNoise": {"unknown_classes": [0]},
    "ShapleyImportanceSampler": {"expected_cohort": 2},
    "SoftmaxSampler": {"cohort_size": 2},
    "TransportClient": {"x": torch.zeros(2, 1)},
    "TransportServer": {"x2": torch.zeros(2, 1)},
}
#: Made by the package itself, with numbers that it has worked out.
RECORDS = {"ClientUpdate", "Cohort", "CSVData", "Round"}  # CSVData is a base class


def float_arguments(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()  # annotations are strings here
    return [p.name for p in parameters if "float" in str(p.annotation).split(" | ")]


def classes() -> list[tuple[type, str]]:
    found: dict[type, list[str]] = {}
    for package in map(importlib.import_module, PACKAGES):
        for name in package.__all__:
            item = getattr(package, name)
            if inspect.isclass(item) and not inspect.isabstract(item) and name not in RECORDS:
                found[item] = float_arguments(item.__init__)
    return [(item, argument) for item, arguments in found.items() for argument in arguments]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("cls", "argument"), classes(), ids=lambda part: getattr(part, "__name__", part))
def test_no_constructor_takes_a_number_that_is_not_finite(cls: type, argument: str, bad: float) -> None:
    needed = NEEDED.get(cls.__name__, {})
    cls(**needed)  # without the bad number all is well
    with pytest.raises(ConfigurationError, match=f"{argument}.*{bad}"):
        cls(**{**needed, argument: bad})


def test_every_part_of_the_package_is_looked_at() -> None:
    named = {cls.__name__ for cls, _ in classes()}
    assert {"ALittleIsEnough", "MoreauSGD", "TransportClient"} <= named


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("proportions", [[1.0, 2.0], [0.5, 0.5]])
def test_lists_of_numbers(proportions: list[float], bad: float) -> None:
    from flsv import ClassifierClient

    with pytest.raises(ConfigurationError, match="proportions"):
        SizePartitioner([*proportions, bad])
    with pytest.raises(ConfigurationError, match="class_weights"):
        ClassifierClient(num_classes=3, input_shape=(4,), class_weights=[*proportions, bad])


def game(masks: torch.Tensor) -> torch.Tensor:
    return masks.float().sum(1)


def estimators() -> list[tuple[Callable[..., Any], str]]:
    sampled = [f for f in shapley.ESTIMATORS.values() if f is not shapley.exact_shapley]  # which has no error
    return [(f, argument) for f in sampled for argument in float_arguments(f)]


@pytest.mark.parametrize(("estimator", "argument"), estimators(), ids=lambda part: getattr(part, "__name__", part))
def test_no_estimator_takes_a_threshold_that_is_not_a_number(estimator: Callable[..., Any], argument: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{argument}=nan"):
        estimator(game, 3, **{argument: float("nan")})


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        (transport.wasserstein_distance, {"p": 0.5}, "p="),
        (transport.wasserstein_distance, {"p": float("inf")}, "p="),
        (transport.interpolating_measure, {"t": float("nan"), "support": 2}, "t=nan"),
        (transport.interpolating_measure, {"p": float("inf"), "support": 2}, "p=inf"),
        (transport.debiased_potential, {"blur": float("nan")}, "blur|eps"),
        (transport.debiased_potential, {"scaling": float("nan")}, "scaling=nan"),
    ],
)
def test_functions_of_transport(function: Callable[..., Any], arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        function(torch.eye(3), torch.eye(3), **arguments)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_label_weights(weight: float) -> None:
    x, y = torch.eye(4), torch.tensor([0, 0, 1, 1])
    with pytest.raises(ConfigurationError, match="label_weight="):
        transport.label_augmented_cost(x, y, x, y, label_weight=weight)
    with pytest.raises(ConfigurationError, match="label_weight="):
        transport.label_embedding(x, y, label_weight=weight)


@pytest.mark.parametrize(
    ("value", "bounds", "expected"),
    [
        (0.0, {"above": 0}, "a finite number above 0"),
        (1.0, {"least": 0, "below": 1}, "a finite number in [0, 1)"),
        (1.5, {"above": 0, "most": 1}, "a finite number in (0, 1]"),
        (2.5, {"least": 1, "whole": True}, "a whole number of at least 1"),
        (float("inf"), {}, "a finite number"),
        ("much", {}, "a finite number"),
        (None, {"least": 0}, "a finite number of at least 0"),
    ],
)
def test_what_a_bound_says(value: Any, bounds: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        check_number("Owner", "x", value, **bounds)
    assert str(error.value) == f"Owner(x={value!r}): expected {expected}."


@pytest.mark.parametrize(
    ("value", "bounds"),
    [(0, {"least": 0, "most": 0}), (1e-300, {"above": 0}), (torch.tensor(0.5), {"below": 1}), (3, {"whole": True})],
)
def test_numbers_within_their_bounds(value: Any, bounds: dict[str, Any]) -> None:
    check_number("Owner", "x", value, **bounds)
