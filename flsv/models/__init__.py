"""Small networks from papers, and all timm networks by name.

Every classifier takes ``num_classes`` and ``input_shape`` (one sample's shape, without the batch), and returns logits
``[B, num_classes]``. Its head is its last ``nn.Linear``. :class:`RegressorClient` and :class:`CharacterModel` are whole
LightningModules, for regression and for running text.

Tier: stable.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
