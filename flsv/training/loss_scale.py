"""LossScale: the scale of the loss in half precision, as each client's own."""

from __future__ import annotations

from typing import Any

import lightning as L

from flsv.training.slots import Slot


class LossScale(Slot):
    """Gives each client a ``GradScaler`` of its own, where the trainer has one.

    ``precision="16-mixed"`` on a GPU scales the loss so that small gradients do not vanish: torch's ``GradScaler``
    starts high, leaves out steps whose gradients overflow, and goes down until they do not. With one scale for all, the
    cohort's first client would leave out steps for the others.

    Args:
        trainer: with its precision plugin.
    """

    name = "loss_scale"

    def __init__(self, trainer: L.Trainer) -> None:
        self._plugin: Any = getattr(trainer, "precision_plugin", None)
        scaler = getattr(self._plugin, "scaler", None)
        self._scaler: Any = scaler if scaler is not None and scaler.is_enabled() else None
        self._fresh = None if self._scaler is None else dict(self._scaler.state_dict())

    def enter(self, client: int, kept: dict[str, Any] | None) -> None:
        if self._scaler is not None:
            self._scaler.load_state_dict(self._fresh if kept is None else kept)

    def leave(self) -> dict[str, Any] | None:
        if self._scaler is None:
            return None
        left = dict(self._scaler.state_dict())
        self._scaler.load_state_dict(self._fresh)
        return left

    def rewind(self, checkpoint: dict[str, Any]) -> None:
        # Lightning's place for it in a checkpoint, and what it restores before a fit goes on.
        if (place := type(self._plugin).__qualname__) in checkpoint and self._scaler is not None:
            checkpoint[place] = dict(self._fresh or {})
