"""The server's side of a round: filters, contribution metrics, aggregation and personalization, in this order.

No module here reads clients' data.

Tier: provisional.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
