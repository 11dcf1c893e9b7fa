"""Personalizers: rules that choose the model from which each client starts the next round.

Rules for the global model are in ``aggregation``.
"""

from flsv.personalization.base import Personalized, Personalizer
from flsv.personalization.cgsv import SparsifiedReward
from flsv.personalization.fedamp import FedAMP, HeurFedAMP
from flsv.personalization.fedem import FedEM
from flsv.personalization.fedfomo import FedFomo
from flsv.personalization.ifca import IFCA
from flsv.personalization.pfedhn import PFedHN
from flsv.personalization.pfedsv import PFedSV
from flsv.personalization.shapfed import ShapFedPersonalizer
from flsv.personalization.standalone import Standalone

__all__ = [
    "IFCA",
    "FedAMP",
    "FedEM",
    "FedFomo",
    "HeurFedAMP",
    "PFedHN",
    "PFedSV",
    "Personalized",
    "Personalizer",
    "ShapFedPersonalizer",
    "SparsifiedReward",
    "Standalone",
]
