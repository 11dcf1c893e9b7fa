"""Clients' values, computed from the scores and outputs of coalitions' models in a run's folder. No module here uses a
Trainer, a metric or a run.

Tier: provisional.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
