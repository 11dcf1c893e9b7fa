"""Metrics of coalition games over the rounds of a run: the class CoalitionValue, and published methods as presets of
it. Estimators are in ``flsv.functional``, games in ``flsv.games``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
