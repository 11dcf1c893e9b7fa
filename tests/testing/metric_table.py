"""Every metric of ``flsv.metrics``, and what it needs to be checked by :mod:`flsv.testing`."""

from __future__ import annotations

from typing import Any

from own_metrics import AXIOMS, OwnMetricCase

from flsv.clients.algorithms import InRunValues
from flsv.metrics import (
    BlendedContribution,
    CalibratedOTGradient,
    ClassSpecificShapley,
    CoalitionValue,
    CommunicationCost,
    ContributionEstimation,
    CosineGradientShapley,
    CumulativeShapley,
    DecayedShapley,
    DomainRelevance,
    GradientAgreement,
    GradientShapley,
    InRunShapley,
    LeaveOneOut,
    LowerBoundShapley,
    OneRoundShapley,
    PartialFederatedShapley,
    PrivacyLoss,
    ShadowShapley,
    SurrogateFederatedShapley,
    WassersteinContribution,
)
from flsv.personalization import PFedSV
from flsv.privacy import GaussianPrivacy
from flsv.testing.checks import PartCheck, checks_of

LINEAR = ("symmetry", "null player", "linearity")


def of(metric: Any, **options: Any) -> list[PartCheck]:
    return checks_of(OwnMetricCase(metric, **options))


METRICS = [
    of(BlendedContribution(decay=0.7)),
    of(CalibratedOTGradient(features="pixels", support=1, iterations=1, pictures=0)),
    of(ClassSpecificShapley(momentum=0.6)),
    of(ClassSpecificShapley(weighting="samples")),
    of(CoalitionValue(value="banzhaf", fold="sum"), axioms=LINEAR),
    of(CommunicationCost()),
    of(ContributionEstimation(combine="plus")),
    of(CosineGradientShapley(alpha=0.7)),
    of(CumulativeShapley(), axioms=AXIOMS),
    of(DecayedShapley(decay=0.7), axioms=("symmetry", "null player")),
    of(DomainRelevance(alpha=0.4), personalizer=PFedSV("mine")),
    of(GradientAgreement()),
    of(GradientAgreement(balanced=True)),
    of(GradientShapley(momentum=0.5)),
    of(
        InRunShapley(),
        given={"in_run_values": lambda round: round.client_updates[:, :3].double()},
        client_algorithm=InRunValues(),
    ),
    of(LeaveOneOut(momentum=0.3), axioms=LINEAR),
    of(LowerBoundShapley(), axioms=AXIOMS),
    of(OneRoundShapley(2, coalition_weights="fixed")),
    of(PartialFederatedShapley(momentum=0.5), axioms=AXIOMS),
    of(PrivacyLoss(GaussianPrivacy(clip=1.0, noise_multiplier=2.0))),
    of(ShadowShapley(), axioms=("efficiency", "symmetry")),
    of(ShadowShapley(performance="negative_loss")),
    of(SurrogateFederatedShapley(), axioms=("symmetry",)),
    of(WassersteinContribution(features="pixels", support=1, iterations=1)),
]

#: By its class' name; of two of a class the first.
CASES: dict[str, OwnMetricCase] = {}
for checks in METRICS:
    CASES.setdefault(checks[0].case.name, checks[0].case)  # type: ignore[arg-type]
