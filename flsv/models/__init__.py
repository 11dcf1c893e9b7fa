"""Small networks from papers, and all timm and torchvision networks by name.

Every classifier takes ``num_classes`` and ``input_shape`` (one sample's shape, without the batch), and returns logits
``[B, num_classes]``. Its head is its last ``nn.Linear``. :class:`RegressorClient` and :class:`CharacterModel` are whole
LightningModules, for regression and for running text.
"""

from flsv.models.cnn import (
    LeNet5,
    McMahanCNN,
    ShapFedCNN,
    ShapleyFLCifarCNN,
    ShapleyFLFashionCNN,
    resnet34_small,
)
from flsv.models.factory import NETWORKS, build_network
from flsv.models.linear import MLP, FastText, SoftmaxRegression
from flsv.models.lora import LoRAClient
from flsv.models.mixture import MixtureClient
from flsv.models.tasks import CharacterModel, RegressorClient

__all__ = [
    "MLP",
    "NETWORKS",
    "CharacterModel",
    "FastText",
    "LeNet5",
    "LoRAClient",
    "McMahanCNN",
    "MixtureClient",
    "RegressorClient",
    "ShapFedCNN",
    "ShapleyFLCifarCNN",
    "ShapleyFLFashionCNN",
    "SoftmaxRegression",
    "build_network",
    "resnet34_small",
]
