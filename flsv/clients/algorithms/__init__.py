"""Client algorithms change how clients train: corrected gradients, other optimizers. One file each."""

from flsv.clients.algorithms.base import ClientAlgorithm, ClientContext
from flsv.clients.algorithms.ditto import Ditto
from flsv.clients.algorithms.feddyn import FedDyn, FedDynServer
from flsv.clients.algorithms.fedprox import FedProx
from flsv.clients.algorithms.fedrep import FedRep
from flsv.clients.algorithms.in_run import InRunValues
from flsv.clients.algorithms.per_fedavg import PerFedAvg
from flsv.clients.algorithms.pfedme import MoreauSGD
from flsv.clients.algorithms.scaffold import SCAFFOLD

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
