"""Reports of runs: values as tables, and an HTML page with shares of a budget.

Tier: stable.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
