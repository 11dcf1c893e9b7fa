"""Corruptions damage the training data of some clients."""

from flsv.data.corruption.base import ClientChoice, Corruption
from flsv.data.corruption.labels import ClosedSetLabelNoise, OpenSetLabelNoise
from flsv.data.corruption.long_tail import LongTail
from flsv.data.corruption.noise import GaussianNoise

__all__ = [
    "ClientChoice",
    "ClosedSetLabelNoise",
    "Corruption",
    "GaussianNoise",
    "LongTail",
    "OpenSetLabelNoise",
]
