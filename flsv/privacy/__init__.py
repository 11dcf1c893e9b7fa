"""Differential privacy for clients' updates: clipping, noise, and the accounting of epsilon.

Tier: provisional.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
