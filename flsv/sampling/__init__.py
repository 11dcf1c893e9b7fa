"""Client samplers: rules that draw the cohort of a round, that is, the clients that train in it.

Tier: provisional.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
