"""Attacks: changes that malicious clients make to their updates.

Defences are in ``filters``, faults of clients' data in ``data``.
"""

from flsv.attacks.alignment import Alignment
from flsv.attacks.base import Attack
from flsv.attacks.collusion import Collusion, InnerProductManipulation
from flsv.attacks.false_reports import FalseReports
from flsv.attacks.free_rider import FreeRider
from flsv.attacks.gradient_poisoning import GradientPoisoning
from flsv.attacks.scaling import Scaling
from flsv.attacks.sign_flip import SignFlip

__all__ = [
    "Alignment",
    "Attack",
    "Collusion",
    "FalseReports",
    "FreeRider",
    "GradientPoisoning",
    "InnerProductManipulation",
    "Scaling",
    "SignFlip",
]
