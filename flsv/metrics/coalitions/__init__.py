"""Values of coalition games over the rounds of a run: one class, and the papers' choices as presets of it."""

from flsv.metrics.coalitions.folds import Decay, LowerBound, MovingAverage, Sum, SurrogateAverage

__all__ = ["Decay", "LowerBound", "MovingAverage", "Sum", "SurrogateAverage"]
