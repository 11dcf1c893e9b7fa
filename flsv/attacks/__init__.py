"""Attacks: what malicious clients do to their updates."""

from flsv.attacks.alignment import Alignment, HeadAlignment
from flsv.attacks.collusion import ALittleIsEnough, Collusion, InnerProductManipulation, MinMax
from flsv.attacks.single import Attack, FalseReports, FreeRider, GradientPoisoning, Scaling, SignFlip

__all__ = [
    "ALittleIsEnough",
    "Alignment",
    "Attack",
    "Collusion",
    "FalseReports",
    "FreeRider",
    "GradientPoisoning",
    "HeadAlignment",
    "InnerProductManipulation",
    "MinMax",
    "Scaling",
    "SignFlip",
]
