"""Aggregators: rules that combine the clients' models into the next global model.

Rules that change a single client's update are in ``filters``, rules that give clients models of their own in
``personalization``.

Tier: stable.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
