"""Terms that a client adds to its own objective. One file each."""

from flsv.local.base import ClientTerm
from flsv.local.fedprox import FedProx

__all__ = ["ClientTerm", "FedProx"]
