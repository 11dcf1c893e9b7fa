"""Attacks: changes that malicious clients make to their updates.

Defences are in ``filters``, corruptions of clients' data in ``data``.

Tier: provisional.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
