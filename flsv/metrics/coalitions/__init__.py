"""Values of coalition games over the rounds of a run: one class, and the papers' choices as presets of it."""

from flsv.metrics.coalitions.blended import BlendedContribution
from flsv.metrics.coalitions.folds import (
    FOLDS,
    Decay,
    Fold,
    LowerBound,
    MovingAverage,
    Sum,
    SurrogateAverage,
)
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

__all__ = [
    "FOLDS",
    "BlendedContribution",
    "CoalitionValue",
    "CumulativeShapley",
    "Decay",
    "DecayedShapley",
    "Fold",
    "LeaveOneOut",
    "LowerBound",
    "LowerBoundShapley",
    "MovingAverage",
    "OneRoundShapley",
    "PartialFederatedShapley",
    "Sum",
    "SurrogateAverage",
    "SurrogateFederatedShapley",
]
