"""Federated learning on PyTorch Lightning in which every participant's contribution is measured while it happens.

Tier: stable.
"""

import lazy_loader

from flsv.__about__ import __version__ as __version__

# What __init__.pyi lists is imported when it is first asked for: torch and Lightning take seconds, which
# whoever asks for the version or for help need not wait.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
