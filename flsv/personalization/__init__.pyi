from .base import Personalized as Personalized, Personalizer as Personalizer
from .cgsv import SparsifiedReward as SparsifiedReward
from .fedamp import FedAMP as FedAMP, HeurFedAMP as HeurFedAMP
from .fedem import FedEM as FedEM
from .fedfomo import FedFomo as FedFomo
from .ifca import IFCA as IFCA
from .pfedhn import PFedHN as PFedHN
from .pfedsv import PFedSV as PFedSV
from .shapfed import ShapFedPersonalizer as ShapFedPersonalizer
from .standalone import Standalone as Standalone
