"""Contribution metrics: stateful torchmetrics, one per function in ``flsv.functional``."""

from flsv.metrics.base import ContributionMetric
from flsv.metrics.class_specific_shapley import ClassSpecificShapley
from flsv.metrics.collaborative_fairness import CollaborativeFairness
from flsv.metrics.cosine_gradient_shapley import CosineGradientShapley
from flsv.metrics.cumulative_shapley import CumulativeShapley
from flsv.metrics.federated_shapley import LeaveOneOut, PartialFederatedShapley
from flsv.metrics.gradient_shapley import GradientShapley
from flsv.metrics.surrogate_federated_shapley import SurrogateFederatedShapley

__all__ = [
    "ClassSpecificShapley",
    "CollaborativeFairness",
    "ContributionMetric",
    "CosineGradientShapley",
    "CumulativeShapley",
    "GradientShapley",
    "LeaveOneOut",
    "PartialFederatedShapley",
    "SurrogateFederatedShapley",
]
