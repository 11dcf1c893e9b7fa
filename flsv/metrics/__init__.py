"""Contribution metrics: stateful torchmetrics, one per function in ``flsv.functional``."""

from flsv.metrics.base import ContributionMetric
from flsv.metrics.calibrated_ot_gradient import CalibratedOTGradient
from flsv.metrics.class_specific_shapley import ClassSpecificShapley
from flsv.metrics.coalitions import (
    CoalitionValue,
    CumulativeShapley,
    DecayedShapley,
    LeaveOneOut,
    LowerBoundShapley,
    OneRoundShapley,
    PartialFederatedShapley,
    SurrogateFederatedShapley,
)
from flsv.metrics.collaborative_fairness import CollaborativeFairness
from flsv.metrics.communication_cost import CommunicationCost
from flsv.metrics.contribution_estimation import ContributionEstimation
from flsv.metrics.cosine_gradient_shapley import CosineGradientShapley
from flsv.metrics.domain_relevance import DomainRelevance
from flsv.metrics.everybody_else import EverybodyElse
from flsv.metrics.gradient_agreement import GradientAgreement
from flsv.metrics.gradient_agreement_game import GradientAgreementGame
from flsv.metrics.gradient_shapley import GradientShapley
from flsv.metrics.in_run_shapley import InRunShapley
from flsv.metrics.mean_test_accuracy import MeanTestAccuracy
from flsv.metrics.privacy_loss import PrivacyLoss
from flsv.metrics.wasserstein_contribution import WassersteinContribution

__all__ = [
    "CalibratedOTGradient",
    "ClassSpecificShapley",
    "CoalitionValue",
    "CollaborativeFairness",
    "CommunicationCost",
    "ContributionEstimation",
    "ContributionMetric",
    "CosineGradientShapley",
    "CumulativeShapley",
    "DecayedShapley",
    "DomainRelevance",
    "EverybodyElse",
    "GradientAgreement",
    "GradientAgreementGame",
    "GradientShapley",
    "InRunShapley",
    "LeaveOneOut",
    "LowerBoundShapley",
    "MeanTestAccuracy",
    "OneRoundShapley",
    "PartialFederatedShapley",
    "PrivacyLoss",
    "SurrogateFederatedShapley",
    "WassersteinContribution",
]
