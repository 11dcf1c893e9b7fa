"""The scale of the loss in half precision, which every client finds for itself.

``precision="16-mixed"`` on a GPU scales the loss so that small gradients do not vanish: torch's ``GradScaler`` starts
high, leaves out steps whose gradients overflow, and goes down until they do not. With one scale for all, the cohort's
first client would leave out steps for the others.
"""

from __future__ import annotations

from typing import Any

import lightning as L


class LossScale:
    """The trainer's ``GradScaler``, where it has one, as each client's own.

    Args:
        trainer: with its precision plugin.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        scaler = getattr(getattr(trainer, "precision_plugin", None), "scaler", None)
        self._scaler: Any = scaler if scaler is not None and scaler.is_enabled() else None
        self._fresh = self.read()

    def read(self) -> dict[str, Any] | None:
        """Its state now; None where there is no scaler."""
        return None if self._scaler is None else dict(self._scaler.state_dict())

    def load(self, state: dict[str, Any] | None) -> None:
        """A client's; None: as it was before the first."""
        if self._scaler is not None:
            self._scaler.load_state_dict(self._fresh if state is None else state)

    def state_dict(self) -> dict[str, Any] | None:
        return self._fresh

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        # Lightning has restored that of the last client of the run that was saved.
        self._fresh = self._fresh if state is None else state
