"""Every metric of ``flsv.metrics``, and what it needs to be checked by :mod:`flsv.testing`."""

from __future__ import annotations

import torch

from flsv.clients.algorithms import InRunValues
from flsv.metrics import (
    CalibratedOTGradient,
    ClassSpecificShapley,
    CoalitionValue,
    CollaborativeFairness,
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
    MeanTestAccuracy,
    OneRoundShapley,
    PartialFederatedShapley,
    PrivacyLoss,
    ShadowShapley,
    SurrogateFederatedShapley,
    WassersteinContribution,
)
from flsv.personalization import PFedSV
from flsv.privacy import GaussianPrivacy
from flsv.testing import AXIOMS, checks_of
from flsv.testing.metric_case import MetricCase
from flsv.testing.rounds import NUM_CLIENTS

LINEAR = ("symmetry", "null player", "linearity")
OF_TWO_RUNS = {
    "standalone": lambda round: torch.linspace(0, 1, len(round)),
    "final": lambda round: round.losses.cos(),
}
OF_A_CLIENT = {
    "client_id": lambda round: int(round.client_ids[0]),
    "preds": lambda round: round.client_vectors[:, :3],
    "target": lambda round: torch.arange(len(round)),
}


METRICS = [
    checks_of(CalibratedOTGradient(features="pixels", support=1, iterations=1, pictures=0)),
    checks_of(ClassSpecificShapley(momentum=0.6)),
    checks_of(ClassSpecificShapley(weighting="samples")),
    checks_of(CoalitionValue(value="banzhaf", fold="sum"), axioms=LINEAR),
    checks_of(CollaborativeFairness(), given=OF_TWO_RUNS),
    checks_of(CommunicationCost()),
    checks_of(ContributionEstimation(combine="plus")),
    checks_of(CosineGradientShapley(alpha=0.7)),
    checks_of(CumulativeShapley(), axioms=AXIOMS),
    checks_of(DecayedShapley(decay=0.7), axioms=("symmetry", "null player")),
    checks_of(DomainRelevance(alpha=0.4), personalizer=PFedSV("mine")),
    checks_of(GradientAgreement()),
    checks_of(GradientAgreement(balanced=True)),
    checks_of(GradientShapley(momentum=0.5)),
    checks_of(
        InRunShapley(),
        given={"in_run_values": lambda round: round.client_updates[:, :3].double()},
        client_algorithm=InRunValues(),
    ),
    checks_of(LeaveOneOut(momentum=0.3), axioms=LINEAR),
    checks_of(LowerBoundShapley(), axioms=AXIOMS),
    checks_of(MeanTestAccuracy(NUM_CLIENTS), given=OF_A_CLIENT),
    checks_of(OneRoundShapley(2, coalition_weights="fixed")),
    checks_of(PartialFederatedShapley(momentum=0.5), axioms=AXIOMS),
    checks_of(PrivacyLoss(GaussianPrivacy(clip=1.0, noise_multiplier=2.0))),
    checks_of(ShadowShapley(), axioms=("efficiency", "symmetry")),
    checks_of(ShadowShapley(part="head", performance="negative_loss")),
    checks_of(SurrogateFederatedShapley(), axioms=("symmetry",)),
    checks_of(WassersteinContribution(features="pixels", support=1, iterations=1)),
]

#: By its class' name; of two of a class the first.
CASES: dict[str, MetricCase] = {}
for checks in METRICS:
    CASES.setdefault(checks[0].case.name, checks[0].case)  # type: ignore[arg-type]
