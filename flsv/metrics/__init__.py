"""Contribution metrics: stateful torchmetrics that call the functions of ``flsv.functional`` and store their results.

By the question that they answer:

- Whose updates agree with the majority? ClassSpecificShapley, CosineGradientShapley.
- How much does a round lose without a client? CoalitionValue and its presets PartialFederatedShapley,
  CumulativeShapley, SurrogateFederatedShapley, DecayedShapley, OneRoundShapley, LeaveOneOut. Mixed
  with agreement, BlendedContribution.
- How much does each client add to coalitions of others, by training each alone? ShadowShapley.
- Whose updates lower the validation loss? GradientShapley, InRunShapley, GradientAgreement.
- Whose data resemble the validation data? WassersteinContribution, CalibratedOTGradient.
- Who is useful to the other clients? ContributionEstimation, DomainRelevance.
- How much does taking part cost a client? CommunicationCost, PrivacyLoss.
"""

from flsv.metrics.base import ContributionMetric
from flsv.metrics.class_specific_shapley import ClassSpecificShapley
from flsv.metrics.coalitions.blended_contribution import BlendedContribution
from flsv.metrics.coalitions.one_round_shapley import OneRoundShapley
from flsv.metrics.coalitions.presets import (
    CumulativeShapley,
    DecayedShapley,
    LeaveOneOut,
    PartialFederatedShapley,
    SurrogateFederatedShapley,
)
from flsv.metrics.coalitions.value import CoalitionValue
from flsv.metrics.contribution_estimation import ContributionEstimation
from flsv.metrics.cosine_gradient_shapley import CosineGradientShapley
from flsv.metrics.costs import CommunicationCost, PrivacyLoss
from flsv.metrics.domain_relevance import DomainRelevance
from flsv.metrics.fedbary import CalibratedOTGradient, WassersteinContribution
from flsv.metrics.gradient_agreement import GradientAgreement
from flsv.metrics.gradient_shapley import GradientShapley, InRunShapley
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
    "OneRoundShapley",
    "PartialFederatedShapley",
    "PrivacyLoss",
    "ShadowShapley",
    "SurrogateFederatedShapley",
    "WassersteinContribution",
]
