"""Every metric of ``flsv.metrics``, and what it needs to be checked by :mod:`flsv.testing`."""

from __future__ import annotations

from typing import Any

from own_metrics import OwnMetricCase

from flsv import metrics
from flsv.clients.algorithms import InRunValues
from flsv.personalization import PFedSV
from flsv.privacy import GaussianPrivacy
from flsv.testing.checks import PartCheck, checks_of


def of(metric: Any, **options: Any) -> list[PartCheck]:
    return checks_of(OwnMetricCase(metric, **options))


METRICS = [
    of(metrics.BlendedContribution(decay=0.7)),
    of(metrics.CalibratedOTGradient(features="pixels", support=1, iterations=1, pictures=0)),
    of(metrics.ClassSpecificShapley(momentum=0.6)),
    of(metrics.ClassSpecificShapley(weighting="samples")),
    of(metrics.CoalitionValue(value="banzhaf", fold="sum")),
    of(metrics.CommunicationCost()),
    of(metrics.ContributionEstimation(combine="plus")),
    of(metrics.CosineGradientShapley(alpha=0.7)),
    of(metrics.CumulativeShapley()),
    of(metrics.DecayedShapley(decay=0.7)),
    of(metrics.DomainRelevance(alpha=0.4), personalizer=PFedSV("mine")),
    of(metrics.GradientAgreement()),
    of(metrics.GradientAgreement(balanced=True)),
    of(metrics.GradientShapley(momentum=0.5)),
    of(
        metrics.InRunShapley(),
        given={"in_run_values": lambda round: round.client_updates[:, :3].double()},
        client_algorithm=InRunValues(),
    ),
    of(metrics.LeaveOneOut(momentum=0.3)),
    of(metrics.LowerBoundShapley()),
    of(metrics.OneRoundShapley(2, coalition_weights="fixed")),
    of(metrics.PartialFederatedShapley(momentum=0.5)),
    of(metrics.PrivacyLoss(GaussianPrivacy(clip=1.0, noise_multiplier=2.0))),
    of(metrics.ShadowShapley()),
    of(metrics.ShadowShapley(performance="negative_loss")),
    of(metrics.SurrogateFederatedShapley()),
    of(metrics.WassersteinContribution(features="pixels", support=1, iterations=1)),
]

#: By its class' name; of two of a class the first.
CASES: dict[str, OwnMetricCase] = {}
for checks in METRICS:
    CASES.setdefault(checks[0].case.name, checks[0].case)  # type: ignore[arg-type]
