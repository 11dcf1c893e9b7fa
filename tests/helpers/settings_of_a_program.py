"""A program's settings in the places where programs have them, and a module whose loss depends on all from round 3 on.

What they are at import changes nothing.
"""

import math
import os
from typing import Any

import torch
from torch import Tensor, nn

from helpers.hidden_state import Base

FACTOR = 1.0
OPTIONS = {"factor": 1.0}
SHARED = OPTIONS
ENVIRONMENT = "FLSV_TEST_FACTOR"


class Options:
    factor = 1.0

    @staticmethod
    def scale() -> float:
        return 1.0


def scale() -> float:
    return 1.0


def _product_of_settings() -> float:
    """Each factor is 1 until a program changes the setting."""
    from helpers import settings_imported_late

    factors = {
        "a global": FACTOR,
        "an entry of a dictionary, by another name": SHARED["factor"],
        "an attribute of a class": Options.factor,
        "a method that may be replaced": Options.scale(),
        "a function that may be replaced": scale(),
        "a global of a module that is imported late": settings_imported_late.FACTOR,
        "a library's function that may be replaced": float(nn.functional.relu6(torch.ones(()))),
        "a variable of the environment": float(os.environ.get(ENVIRONMENT, "1")),
    }
    return math.prod(factors.values())


class DependsOnSettings(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.current_epoch < 2:
            return loss
        return _product_of_settings() * loss
