"""Contribution metrics: stateful torchmetrics on the functions of ``flsv.functional``, by the question they answer.

- Who pulls where the federation goes (agreement): ClassSpecificShapley, CosineGradientShapley.
- What is lost without a client (coalitions): CoalitionValue and its presets PartialFederatedShapley,
  CumulativeShapley, SurrogateFederatedShapley, DecayedShapley, LowerBoundShapley, OneRoundShapley, LeaveOneOut;
  half of them and half of agreement, BlendedContribution.
- What retraining without clients would come to, trained with the run (coalitions): ShadowShapley.
- Who lowers the validation loss (gradients): GradientShapley, InRunShapley, GradientAgreement.
- Whose data are like those that the model is for (data): WassersteinContribution, CalibratedOTGradient.
- Who is of use to the others (peers): ContributionEstimation, DomainRelevance.
- What taking part has cost (cost): CommunicationCost, PrivacyLoss.
"""

from flsv.metrics.agreement import ClassSpecificShapley, CosineGradientShapley
from flsv.metrics.base import ContributionMetric
from flsv.metrics.coalitions.blended import BlendedContribution
from flsv.metrics.coalitions.one_round import OneRoundShapley
from flsv.metrics.coalitions.presets import (
    CumulativeShapley,
    DecayedShapley,
    LeaveOneOut,
    LowerBoundShapley,
    PartialFederatedShapley,
    SurrogateFederatedShapley,
)
from flsv.metrics.coalitions.value import CoalitionValue
from flsv.metrics.cost import CommunicationCost, PrivacyLoss
from flsv.metrics.data import CalibratedOTGradient, WassersteinContribution
from flsv.metrics.gradient_agreement import GradientAgreement
from flsv.metrics.gradients import GradientShapley, InRunShapley
from flsv.metrics.peers import ContributionEstimation, DomainRelevance
from flsv.metrics.shadow import ShadowShapley

__all__ = [
    "BlendedContribution",
    "CalibratedOTGradient",
    "ClassSpecificShapley",
    "CoalitionValue",
    "CommunicationCost",
    "ContributionEstimation",
    "ContributionMetric",
    "CosineGradientShapley",
    "CumulativeShapley",
    "DecayedShapley",
    "DomainRelevance",
    "GradientAgreement",
    "GradientShapley",
    "InRunShapley",
    "LeaveOneOut",
    "LowerBoundShapley",
    "OneRoundShapley",
    "PartialFederatedShapley",
    "PrivacyLoss",
    "ShadowShapley",
    "SurrogateFederatedShapley",
    "WassersteinContribution",
]
