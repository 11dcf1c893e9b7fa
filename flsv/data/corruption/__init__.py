"""Corruptions: what is wrong with some clients' training data."""

from flsv.data.corruption.base import Corruption
from flsv.data.corruption.choice import ClientChoice
from flsv.data.corruption.label_noise import ClosedSetLabelNoise
from flsv.data.corruption.long_tail import LongTail
from flsv.data.corruption.noise import GaussianNoise
from flsv.data.corruption.open_set import OpenSetLabelNoise

__all__ = [
    "ClientChoice",
    "ClosedSetLabelNoise",
    "Corruption",
    "GaussianNoise",
    "LongTail",
    "OpenSetLabelNoise",
]
