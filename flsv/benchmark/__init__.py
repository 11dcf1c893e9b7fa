"""``flsv bench``: contribution metrics compared with Shapley values from retraining.

Tier: provisional.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
