"""What a client does differently when it trains: terms of its objective, optimizers. One file each."""

from flsv.local.base import ClientTerm
from flsv.local.fedprox import FedProx
from flsv.local.pfedme import MoreauSGD

__all__ = ["ClientTerm", "FedProx", "MoreauSGD"]
