"""Client algorithms, which change how clients train (corrected gradients, second models), one file per algorithm."""

from flsv.training.algorithms.base import ClientAlgorithm, ClientContext
from flsv.training.algorithms.ditto import Ditto
from flsv.training.algorithms.feddyn import FedDyn, FedDynServer
from flsv.training.algorithms.fedprox import FedProx
from flsv.training.algorithms.fedrep import FedRep
from flsv.training.algorithms.in_run import InRunValues
from flsv.training.algorithms.per_fedavg import PerFedAvg
from flsv.training.algorithms.pfedme import MoreauSGD
from flsv.training.algorithms.scaffold import SCAFFOLD

__all__ = [
    "SCAFFOLD",
    "ClientAlgorithm",
    "ClientContext",
    "Ditto",
    "FedDyn",
    "FedDynServer",
    "FedProx",
    "FedRep",
    "InRunValues",
    "MoreauSGD",
    "PerFedAvg",
]
