"""What an estimator is given is checked when the metric is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flsv import ConfigurationError
from flsv.functional import ESTIMATORS, ShapleyEstimate, exact_shapley
from flsv.metrics import (
    CumulativeShapley,
    DecayedShapley,
    OneRoundShapley,
    PartialFederatedShapley,
    SurrogateFederatedShapley,
)

METRICS: list[tuple[Any, dict[str, Any]]] = [
    (PartialFederatedShapley, {}),
    (SurrogateFederatedShapley, {}),
    (CumulativeShapley, {}),
    (DecayedShapley, {}),
    (OneRoundShapley, {"rounds": 2}),
]


@pytest.mark.parametrize(("metric", "needed"), METRICS)
@pytest.mark.parametrize("estimator", ["auto", *ESTIMATORS])
def test_arguments_that_no_estimator_has(metric: Any, needed: dict[str, Any], estimator: str) -> None:
    match = rf"{metric.__name__}\(estimator_args=.*does not take \['bugdet'\]. It takes \[.*'budget'"
    with pytest.raises(ConfigurationError, match=match):
        metric(**needed, estimator=estimator, estimator_args={"bugdet": 100})
    with pytest.raises(ConfigurationError, match=r"does not take \['generator', 'utility'\]"):
        metric(**needed, estimator=estimator, estimator_args={"utility": None, "generator": None})
    metric(**needed, estimator=estimator, estimator_args={"budget": 100})


def test_functions_of_ones_own() -> None:
    def mine(utility: Any, num_players: int, *, depth: int, generator: Any) -> ShapleyEstimate:
        return exact_shapley(utility, num_players)

    def open_to_all(utility: Any, num_players: int, **options: Any) -> ShapleyEstimate:
        assert options["depth"] == 3
        return exact_shapley(utility, num_players)

    def play(masks: Tensor) -> Tensor:
        return masks.float().sum(1)

    with pytest.raises(ConfigurationError, match=r"mine does not take \['width'\]. It takes \['depth'\]"):
        PartialFederatedShapley(estimator=mine, estimator_args={"width": 3})
    for estimator in (mine, open_to_all):
        metric = PartialFederatedShapley(num_clients=3, estimator=estimator, estimator_args={"depth": 3})
        metric.update(torch.arange(3), play)
        assert metric.compute().tolist() == pytest.approx([1, 1, 1])
