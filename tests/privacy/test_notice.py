"""One warning at the start of a private run whose metrics see the noise."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from toys import Plain, fit, network

from flsv import Reporting
from flsv.loop import FederatedLoop
from flsv.metrics import (
    ClassSpecificShapley,
    CommunicationCost,
    CosineGradientShapley,
    CumulativeShapley,
    DecayedShapley,
    GradientShapley,
    LeaveOneOut,
    OneRoundShapley,
    SurrogateFederatedShapley,
    WassersteinContribution,
)
from flsv.privacy import GaussianPrivacy

FROM_UPDATES: dict[str, Any] = {
    "cssv": ClassSpecificShapley,
    "cgsv": CosineGradientShapley,
    "fedsv": CumulativeShapley,
    "ssv": SurrogateFederatedShapley,
    "decayed": DecayedShapley,
    "once": lambda: OneRoundShapley(rounds=2),
    "loo": LeaveOneOut,
    "gradient": GradientShapley,
}


def said(folder: Path, rounds: int = 2, **loop: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(
            FederatedLoop(reporting=Reporting(figures=0), seed=0, **loop),
            folder,
            Plain(network(batch_norm=False)),
            rounds=rounds,
        )
    return [str(each.message) for each in caught if "privacy_contributions" in str(each.message)]


def test_it_is_one_line_that_names_the_metrics_and_the_page(tmp_path: Path) -> None:
    metrics = {"cssv": ClassSpecificShapley(), "fedsv": CumulativeShapley(), "cost": CommunicationCost()}
    (line,) = said(tmp_path, metrics=metrics, uploads=[GaussianPrivacy(1.0, 0.5)])
    assert "\n" not in line
    assert "metrics ['cssv', 'fedsv'] are computed from noised updates (noise_multiplier=0.5)" in line
    assert "Spearman" in line
    assert line.endswith("See docs/results/privacy_contributions.md.")


@pytest.mark.parametrize(
    "loop",
    [
        {"metrics": {"cssv": ClassSpecificShapley()}},
        {"uploads": [GaussianPrivacy(1.0, 0.5)]},
        {"metrics": {"cssv": ClassSpecificShapley()}, "uploads": [GaussianPrivacy(1.0, 0.0)]},
        {"metrics": {"cost": CommunicationCost()}, "uploads": [GaussianPrivacy(1.0, 0.5)]},
    ],
    ids=["no privacy", "epsilon only", "clipping only", "nothing of the updates"],
)
def test_there_is_none_without_noise_or_without_a_metric_that_sees_it(loop: Any, tmp_path: Path) -> None:
    assert said(tmp_path, rounds=1, **loop) == []


def test_which_metrics_follow_from_updates() -> None:
    apart = {"ot": WassersteinContribution(), "cost": CommunicationCost()}
    loop = FederatedLoop(metrics={**{name: metric() for name, metric in FROM_UPDATES.items()}, **apart})
    assert loop.board.update_metrics == list(FROM_UPDATES)
