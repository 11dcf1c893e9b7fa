"""Personalizers: rules that choose the model from which each client starts the next round.

Rules for the global model are in ``aggregation``.

Tier: provisional.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
