"""Metrics of coalition games over the rounds of a run: the class CoalitionValue, and published methods as presets of
it. Estimators are in ``flsv.functional``, games in ``flsv.games``.
"""

from flsv.metrics.coalitions.folds import Decay, MovingAverage, Sum, SurrogateAverage

__all__ = ["Decay", "MovingAverage", "Sum", "SurrogateAverage"]
