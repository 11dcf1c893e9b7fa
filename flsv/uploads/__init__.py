"""Upload transformations: changes that a client makes to its update before it sends it, such as attacks and privacy.

Tier: provisional.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
