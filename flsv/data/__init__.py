"""Data for a federation: sources, partitioners, corruptions, and the data module that combines them.

A source (``SourceData``) has samples, labels and groups, and where they are from. The federation (``FederatedData``)
is who has which of them. The data module makes both, and reads batches of them.

No code in this package reads a model.

Tier: stable.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
