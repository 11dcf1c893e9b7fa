from .cnn import (
    LeNet5 as LeNet5,
    McMahanCNN as McMahanCNN,
    ShapFedCNN as ShapFedCNN,
    ShapleyFLCifarCNN as ShapleyFLCifarCNN,
    ShapleyFLFashionCNN as ShapleyFLFashionCNN,
    resnet34_small as resnet34_small,
)
from .factory import NETWORKS as NETWORKS, build_network as build_network
from .linear import MLP as MLP, FastText as FastText, SoftmaxRegression as SoftmaxRegression
from .lora import LoRAClient as LoRAClient
from .mixture import MixtureClient as MixtureClient
from .tasks import CharacterModel as CharacterModel, RegressorClient as RegressorClient
