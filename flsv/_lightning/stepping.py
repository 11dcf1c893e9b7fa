"""What a Trainer says of steps and batches, for a module that is each client in turn."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any

import lightning as L
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from torch.optim import Optimizer


def stepping(
    trainer: L.Trainer,
    steps: Callable[[], float],
    is_last: Callable[[], bool | None],
    length: Callable[[], Sized | None],
) -> list[tuple[Any, str, Any]]:
    """The attributes to patch, see :class:`flsv._lightning.patches.PatchedAttributes`.

    Args:
        trainer: whose; others keep what they have.
        steps: gives ``trainer.estimated_stepping_batches``.
        is_last: gives ``trainer.is_last_batch``; None: what Lightning says.
        length: gives ``trainer.train_dataloader``, whose length is ``trainer.num_training_batches``, as long as no
            loader is there to be set up; None: what Lightning says.
    """
    setup_data = trainer.fit_loop.setup_data

    def answering(name: str, answer: Callable[[], Any]) -> tuple[Any, str, Any]:
        lightnings: Any = getattr(L.Trainer, name)

        def get(self: L.Trainer) -> Any:
            own = answer() if self is trainer else None
            return lightnings.fget(self) if own is None else own

        return L.Trainer, name, property(get)

    def batches() -> int | None:
        loader = length()
        return None if loader is None else len(loader)

    def set_up_unless_counted() -> None:
        if length() is None:
            setup_data()

    return [
        answering("estimated_stepping_batches", steps),
        answering("is_last_batch", is_last),
        answering("train_dataloader", length),
        answering("num_training_batches", batches),
        (trainer.fit_loop, "setup_data", set_up_unless_counted),
    ]


def configured(trainer: L.Trainer) -> tuple[list[Optimizer], list[Any]]:
    """What the module's ``configure_optimizers`` gives now: optimizers and schedulers of their own."""
    optimizers, configs = _init_optimizers_and_lr_schedulers(trainer.lightning_module)
    return optimizers, [config.scheduler for config in configs]
