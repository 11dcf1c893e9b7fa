"""What Lightning counts a fit's steps by before any cohort is known, as ``trainer.estimated_stepping_batches`` does.

It is asked for in ``configure_optimizers`` and in ``setup``, for schedules that a client's optimizer follows. So the
stand-in for the round's batches has the length of a client's part of a round, and no batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L


class StepEstimate:
    """A train dataloader of a length, and without batches.

    Args:
        batches: of a client in a round.
    """

    def __init__(self, batches: int) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        # Lightning makes an iterator at once, and asks it for the first batch when training begins.
        raise RuntimeError("the batches of a round are known from the start of the fit on.")
        yield


def forget_estimate(trainer: L.Trainer) -> None:
    """Let Lightning ask for the train dataloader again: it keeps the first that it was given."""
    trainer.fit_loop._combined_loader = None
