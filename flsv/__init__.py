"""Federated learning on PyTorch Lightning in which every participant's contribution is measured while it happens."""

from flsv.data import FederatedDataModule
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.models.classifier import ClassifierClient
from flsv.parameters import ParameterSpace
from flsv.round import ClientUpdate, Round

__version__ = "0.2.0.dev0"

__all__ = [
    "ClassifierClient",
    "ClientUpdate",
    "ConfigurationError",
    "FederatedDataModule",
    "FederatedLoop",
    "ParameterSpace",
    "Round",
]
