from .alignment import Alignment as Alignment
from .base import Attack as Attack
from .collusion import Collusion as Collusion, InnerProductManipulation as InnerProductManipulation
from .false_reports import FalseReports as FalseReports
from .free_rider import FreeRider as FreeRider
from .gradient_poisoning import GradientPoisoning as GradientPoisoning
from .scaling import Scaling as Scaling
from .sign_flip import SignFlip as SignFlip
