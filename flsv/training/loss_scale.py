"""LossScale: each client's own scale of the loss in half precision."""

from __future__ import annotations

from typing import Any

import lightning as L

from flsv.training.slots import Slot


class LossScale(Slot):
    """Slot for the trainer's ``GradScaler``: each client continues with its own loss scale."""

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
