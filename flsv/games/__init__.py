"""Coalition games: how good the federation's model would be with only some of its clients."""

from flsv.games.coalition import (
    METRICS,
    CoalitionGames,
    CoalitionTable,
    CoalitionUtility,
    GradientProducts,
    ModelEvaluator,
    Renormalized,
    Scores,
    UtilityMetric,
    Weighting,
    validation_gradient_products,
)
from flsv.games.evaluation.metric_of_outputs import MetricOfOutputs
from flsv.games.evaluation.validated import LoggedValues, ValidatedModels
from flsv.games.performance import ModelScore, performance_of

__all__ = [
    "METRICS",
    "CoalitionGames",
    "CoalitionTable",
    "CoalitionUtility",
    "GradientProducts",
    "LoggedValues",
    "MetricOfOutputs",
    "ModelEvaluator",
    "ModelScore",
    "Renormalized",
    "Scores",
    "UtilityMetric",
    "ValidatedModels",
    "Weighting",
    "performance_of",
    "validation_gradient_products",
]
