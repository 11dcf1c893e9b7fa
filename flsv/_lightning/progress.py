"""Lightning's own counts of a fit whose batches are trained in several processes."""

from __future__ import annotations

from typing import NamedTuple

import lightning as L


class Counted(NamedTuple):
    """Batches, optimizer steps, and batches after which there was one."""

    batches: int = 0
    steps: int = 0
    stepped: int = 0

    def __sub__(self, other: Counted) -> Counted:
        return Counted(*(mine - theirs for mine, theirs in zip(self, other)))


def counted(trainer: L.Trainer) -> Counted:
    """So far in this process, and what was added."""
    loop = trainer.fit_loop.epoch_loop
    return Counted(loop.batch_progress.total.ready, trainer.global_step, loop._batches_that_stepped)


def add(trainer: L.Trainer, others: Counted) -> None:
    """Go on as if what the others have counted had been counted here: names of checkpoints and the x-axis of loggers
    hold these numbers."""
    loop = trainer.fit_loop.epoch_loop
    progress = loop.automatic_optimization.optim_progress.optimizer
    counts = [(loop.batch_progress, others.batches)]
    if trainer.lightning_module.automatic_optimization:
        counts += [(progress.step, others.steps), (progress.zero_grad, others.steps)]  # type: ignore[list-item]
    else:
        counts += [(loop.manual_optimization.optim_step_progress, others.steps)]  # type: ignore[list-item]
    for tracker, count in counts:
        for name in vars(tracker.total):  # `current` tells whether to validate now
            setattr(tracker.total, name, getattr(tracker.total, name) + count)
    loop._batches_that_stepped += others.stepped
