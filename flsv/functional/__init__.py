"""The formulas of metrics and strategies, as functions of tensors, independent of Lightning, clients, rounds and files.

Tier: stable.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
