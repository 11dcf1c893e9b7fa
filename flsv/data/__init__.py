"""Data for a federation: sources, partitioners, corruptions, and the data module that combines them.

``SourceData`` has the samples, labels and groups that a user has given. A ``Division`` says which of them the server
and each client have. ``FederatedDataModule`` makes it in ``setup``, and shows it to Lightning and to the engines.

No code in this package uses a model.

Tier: stable.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
