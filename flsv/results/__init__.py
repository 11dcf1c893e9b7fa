"""Results of a run: reading its folder, its table, and the sinks that store or show it while the run goes on.

Tier: provisional.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
