"""Training of several clients at once in one process, as rows of batched tensors (``torch.func.vmap``).

Tier: provisional.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
