"""Every metric says how its values are to be read."""

from __future__ import annotations

import pytest

import flsv.metrics
import flsv.privacy
from flsv.metrics import ContributionMetric
from flsv.metrics.needs import what_it_is

KINDS = [
    kind
    for kind in map(vars(flsv.metrics).get, flsv.metrics.__all__)
    if isinstance(kind, type) and issubclass(kind, ContributionMetric) and kind is not ContributionMetric
]


def made(kind: type[ContributionMetric]) -> ContributionMetric:
    if kind is flsv.metrics.OneRoundShapley:
        return kind(rounds=2)
    if kind is flsv.metrics.PrivacyLoss:
        return kind(flsv.privacy.GaussianPrivacy(clip=1.0, noise_multiplier=1.0))
    return kind()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_metric_has_a_guide_of_its_own(kind: type[ContributionMetric]) -> None:
    metric = made(kind)
    guide = metric.guide()
    assert all(guide.lines().values())
    assert guide.unit != ContributionMetric.unit
    assert guide.cost != ContributionMetric.cost
    assert len(what_it_is(metric)) > 20
