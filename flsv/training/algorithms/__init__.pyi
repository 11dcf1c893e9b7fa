from .base import ClientAlgorithm as ClientAlgorithm, ClientContext as ClientContext
from .ditto import Ditto as Ditto
from .feddyn import FedDyn as FedDyn, FedDynServer as FedDynServer
from .fedprox import FedProx as FedProx
from .fedrep import FedRep as FedRep
from .per_fedavg import PerFedAvg as PerFedAvg
from .pfedme import MoreauSGD as MoreauSGD
from .scaffold import SCAFFOLD as SCAFFOLD
