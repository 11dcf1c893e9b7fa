"""What is said to those who are measured, of every metric, and that it is true."""

from __future__ import annotations

import pytest
import torch

import flsv.metrics
from flsv.metrics import ContributionMetric
from flsv.report.facts import caveats
from flsv.report.text import WORDS

KINDS = [
    name
    for name in flsv.metrics.__all__
    if isinstance(kind := vars(flsv.metrics).get(name), type) and issubclass(kind, ContributionMetric)
]


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "ContributionMetric"])
def test_every_metric_has_caveats(kind: str) -> None:
    said = caveats({"class": kind}, errors=True)
    assert said
    assert all(text.endswith(".") for text in said)
    assert caveats({"class": kind}, errors=False) == [*said, WORDS["no_error"]]


def test_which_rounds_count_more() -> None:
    """The same round's value, first and second."""
    metric = flsv.metrics.DecayedShapley(num_clients=2, decay=0.5, normalize=False)
    counted = []
    for index in range(2):
        metric.reset()
        metric.update(torch.arange(2), lambda masks: masks.double().sum(1), round_index=index)
        counted.append(float(metric.compute()[0]))
    assert counted[0] > counted[1]
    assert "Earlier rounds count more than later ones" in " ".join(WORDS["caveats"]["DecayedShapley"])
