"""Contribution metrics: stateful torchmetrics, one per function in ``flsv.functional``."""

from flsv.metrics.base import ContributionMetric
from flsv.metrics.class_specific_shapley import ClassSpecificShapley

__all__ = ["ClassSpecificShapley", "ContributionMetric"]
