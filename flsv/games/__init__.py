"""Coalition games: what the federation's model would be worth with only some of its clients."""

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

__all__ = [
    "METRICS",
    "CoalitionGames",
    "CoalitionTable",
    "CoalitionUtility",
    "GradientProducts",
    "ModelEvaluator",
    "Renormalized",
    "Scores",
    "UtilityMetric",
    "Weighting",
    "validation_gradient_products",
]
