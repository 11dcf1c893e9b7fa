"""Every metric of ``flsv.metrics``, and what it needs to be checked by :mod:`flsv.testing`."""

from __future__ import annotations

from typing import Any

from own_metrics import AXIOMS, OwnMetricCase

from flsv import metrics
from flsv.clients.algorithms import InRunValues
from flsv.personalization import PFedSV
from flsv.privacy import GaussianPrivacy
from flsv.testing.checks import PartCheck, checks_of

LINEAR = ("symmetry", "null player", "linearity")


def of(metric: Any, **options: Any) -> list[PartCheck]:
    return checks_of(OwnMetricCase(metric, **options))


METRICS = [
    of(metrics.BlendedContribution(decay=0.7)),
    of(metrics.CalibratedOTGradient(features="pixels", support=1, iterations=1, pictures=0)),
    of(metrics.ClassSpecificShapley(momentum=0.6)),
    of(metrics.ClassSpecificShapley(weighting="samples")),
    of(metrics.CoalitionValue(value="banzhaf", fold="sum"), axioms=LINEAR),
    of(metrics.CommunicationCost()),
    of(metrics.ContributionEstimation(combine="plus")),
    of(metrics.CosineGradientShapley(alpha=0.7)),
    of(metrics.CumulativeShapley(), axioms=AXIOMS),
    of(metrics.DecayedShapley(decay=0.7), axioms=("symmetry", "null player")),
    of(metrics.DomainRelevance(alpha=0.4), personalizer=PFedSV("mine")),
    of(metrics.GradientAgreement()),
    of(metrics.GradientAgreement(balanced=True)),
    of(metrics.GradientShapley(momentum=0.5)),
    of(
        metrics.InRunShapley(),
        given={"in_run_values": lambda round: round.client_updates[:, :3].double()},
        client_algorithm=InRunValues(),
    ),
    of(metrics.LeaveOneOut(momentum=0.3), axioms=LINEAR),
    of(metrics.LowerBoundShapley(), axioms=AXIOMS),
    of(metrics.OneRoundShapley(2, coalition_weights="fixed")),
    of(metrics.PartialFederatedShapley(momentum=0.5), axioms=AXIOMS),
    of(metrics.PrivacyLoss(GaussianPrivacy(clip=1.0, noise_multiplier=2.0))),
    of(metrics.ShadowShapley(), axioms=("efficiency", "symmetry")),
    of(metrics.ShadowShapley(performance="negative_loss")),
    of(metrics.SurrogateFederatedShapley(), axioms=("symmetry",)),
    of(metrics.WassersteinContribution(features="pixels", support=1, iterations=1)),
]

#: By its class' name; of two of a class the first.
CASES: dict[str, OwnMetricCase] = {}
for checks in METRICS:
    CASES.setdefault(checks[0].case.name, checks[0].case)  # type: ignore[arg-type]
