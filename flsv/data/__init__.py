"""Data for a federation: sources, partitioners, corruptions, and the data module that combines them.

``SourceData`` has the samples, labels and groups that a user has given. ``FederatedData`` has them after they were
divided among the server and the clients. ``FederatedDataModule`` adds the user's arguments and Lightning's hooks.

No code in this package uses a model.

Tier: stable.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
