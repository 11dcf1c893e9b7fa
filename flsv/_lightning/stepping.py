"""What a Trainer says of steps and batches, for a module that is each client in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from torch.optim import Optimizer


def stepping(
    trainer: L.Trainer, steps: Callable[[], float], is_last: Callable[[], bool | None]
) -> list[tuple[Any, str, Any]]:
    """The attributes to patch, see :class:`flsv._lightning.patches.PatchedAttributes`.

    Args:
        trainer: whose; others keep what they have.
        steps: gives ``trainer.estimated_stepping_batches``.
        is_last: gives ``trainer.is_last_batch``; None: what Lightning says.
    """
    estimated, last = L.Trainer.estimated_stepping_batches, L.Trainer.is_last_batch

    def estimated_stepping_batches(self: L.Trainer) -> float:
        return steps() if self is trainer else estimated.fget(self)  # type: ignore[attr-defined]

    def is_last_batch(self: L.Trainer) -> bool:
        own = is_last() if self is trainer else None
        return last.fget(self) if own is None else own  # type: ignore[attr-defined]

    return [
        (L.Trainer, "estimated_stepping_batches", property(estimated_stepping_batches)),
        (L.Trainer, "is_last_batch", property(is_last_batch)),
    ]


def configured(trainer: L.Trainer) -> tuple[list[Optimizer], list[Any]]:
    """What the module's ``configure_optimizers`` gives now: optimizers and schedulers of their own."""
    optimizers, configs = _init_optimizers_and_lr_schedulers(trainer.lightning_module)
    return optimizers, [config.scheduler for config in configs]
