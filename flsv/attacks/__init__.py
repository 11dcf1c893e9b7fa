"""Attacks: what malicious clients do to their updates. One file each."""

from flsv.attacks.alignment import Alignment
from flsv.attacks.base import Attack
from flsv.attacks.false_reports import FalseReports
from flsv.attacks.free_rider import FreeRider
from flsv.attacks.gradient_poisoning import GradientPoisoning
from flsv.attacks.head_alignment import HeadAlignment
from flsv.attacks.scaling import Scaling
from flsv.attacks.sign_flip import SignFlip

__all__ = [
    "Alignment",
    "Attack",
    "FalseReports",
    "FreeRider",
    "GradientPoisoning",
    "HeadAlignment",
    "Scaling",
    "SignFlip",
]
