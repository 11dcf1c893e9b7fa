"""Data for a federation: sources, partitioners, corruptions, and the data module that combines them.

A source (``SourceData``) has samples, labels and groups, and once it is divided also who has which of them.
``FederatedData`` is its owner, whom all ask who has what. The data module is that for Lightning.

No code in this package reads a model.

Tier: stable.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
