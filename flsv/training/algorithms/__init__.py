"""Client algorithms, which change how clients train (corrected gradients, second models), one file per algorithm.

Tier: stable.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
