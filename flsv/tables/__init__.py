"""Tables and their data dictionaries: infer one, merge several sites', read a table by one, compare the two.

``Column`` and ``Dictionary`` say what the columns mean. ``CSVData`` reads texts, which have no columns.

Tier: stable.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
