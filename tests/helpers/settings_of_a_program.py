"""A program's settings in the places where programs have them, and a module whose loss depends on all from round 3 on.

What they are at import changes nothing.
"""

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


def _factor() -> float:
    from helpers import settings_imported_late as late

    return (
        FACTOR
        * SHARED["factor"]
        * Options.factor
        * Options.scale()
        * scale()
        * late.FACTOR
        * float(nn.functional.relu6(torch.ones(())))
        * float(os.environ.get(ENVIRONMENT, "1"))
    )


class DependsOnSettings(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.current_epoch < 2:
            return loss
        return _factor() * loss
