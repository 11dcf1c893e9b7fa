"""Filters: changes that the server makes to a round's updates after it receives them, and before metrics and the
aggregator see them. Rules that combine updates are in ``aggregation``.

Tier: provisional.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
