"""Personalisers: the model that every client starts its next round from. One file each."""

from flsv.personalization.base import Personalizer
from flsv.personalization.cgsv import SparsifiedReward
from flsv.personalization.shapfed import ShapFedPersonalizer
from flsv.personalization.standalone import Standalone

__all__ = ["Personalizer", "ShapFedPersonalizer", "SparsifiedReward", "Standalone"]
