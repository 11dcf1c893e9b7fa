"""Every metric says how its values are to be read."""

from __future__ import annotations

import pytest

import flsv.metrics
import flsv.privacy
from flsv.metrics import ContributionMetric
from flsv.metrics.needs import Guide, what_it_is

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


def test_the_unit_is_that_of_what_is_measured() -> None:
    kind = flsv.metrics.PartialFederatedShapley
    assert kind().guide().unit == "gain in accuracy"
    assert kind(performance="negative_loss").guide().unit == "fall of the validation loss (nats)"
    assert kind(performance="val_f1", mode="max").guide().unit == "gain in val f1"
    assert kind(per_class=True).guide().unit == "gain in a class's accuracy"
    assert flsv.metrics.CumulativeShapley().guide().unit == "gain in accuracy, sum over rounds"
    assert flsv.metrics.LowerBoundShapley().guide().unit == "gain in accuracy a round, lower bound"
    decayed = flsv.metrics.DecayedShapley
    assert decayed().guide().unit != decayed(normalize=False).guide().unit


def test_a_metric_that_says_nothing_has_a_guide_too() -> None:
    class Own(ContributionMetric):
        """Of the user's own.

        And more.
        """

        higher_is_better = False

        def init_states(self, num_clients: int, num_classes: int | None) -> None: ...

        def update(self) -> None: ...

        def compute(self) -> None: ...

    assert what_it_is(Own()) == "Of the user's own."
    assert isinstance(Own().guide(), Guide)
    assert "less is better" in Own().guide().sign
