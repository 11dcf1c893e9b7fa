"""The folds by their names in configurations."""

from __future__ import annotations

from typing import Literal

from flsv.metrics.coalitions.fold import Fold
from flsv.metrics.coalitions.moving_average import MovingAverage, SurrogateAverage
from flsv.metrics.coalitions.sums import Decay, Sum

FoldName = Literal["last", "average", "surrogate", "sum", "decay"]
#: ``{name: fold with its default arguments}``.
FOLDS: dict[FoldName, Fold] = {
    "last": MovingAverage(0.0),
    "average": MovingAverage(),
    "surrogate": SurrogateAverage(),
    "sum": Sum(),
    "decay": Decay(),
}
