"""Checkpoints that always stand between two rounds.

Lightning may save at any batch: every n steps, on an exception, on Ctrl-C. What such a checkpoint would hold, one
client's half-trained weights in the middle of an epoch, nobody can go on from. So a checkpoint saved within a round
holds the global model and is turned into that of the round's start, and one saved after aggregation but before
Lightning has closed the epoch (at the end of validation, for example) into that of the epoch's end.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import lightning as L
from torch import Tensor


class RoundBoundary:
    """Remembers Lightning's own progress at the last boundary between two rounds."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        self.remember()

    def remember(self) -> None:
        """The trainer stands at a boundary now."""
        self._loop = deepcopy(self._trainer.fit_loop.state_dict())
        self._counts = {"epoch": self._trainer.current_epoch, "global_step": self._trainer.global_step}

    def rewind(self, checkpoint: dict[str, Any]) -> None:
        """Turn a checkpoint saved within a round into that of the round's start; :func:`global_weights` are in it."""
        checkpoint.update(self._counts)
        checkpoint["loops"]["fit_loop"] = deepcopy(self._loop)

    def close_epoch(self, checkpoint: dict[str, Any]) -> None:
        """Turn a checkpoint saved after aggregation into that of the epoch's end."""
        loop = checkpoint["loops"]["fit_loop"] = deepcopy(checkpoint["loops"]["fit_loop"])
        for part in ("total", "current"):
            epochs, batches = loop["epoch_progress"][part], loop["epoch_loop.batch_progress"][part]
            epochs["started"] = epochs["processed"] = epochs["ready"]
            batches["started"] = batches["processed"] = batches["completed"] = batches["ready"]

    def close(self, trainer: L.Trainer, rounds: int) -> None:
        """Before another fit of the same trainer: the epoch of a round that was done, as when the validation after it
        was stopped, has ended. Not when it was: callbacks would name what they then save by the next epoch.

        Args:
            trainer: of the fit that begins.
            rounds: that are done.
        """
        if trainer is not self._trainer or rounds <= trainer.current_epoch:
            return
        checkpoint = {"loops": {"fit_loop": trainer.fit_loop.state_dict()}}
        self.close_epoch(checkpoint)
        trainer.fit_loop.load_state_dict(checkpoint["loops"]["fit_loop"])
        epochs: Any = trainer.fit_loop.epoch_progress.current
        epochs.completed = epochs.processed  # what trainer.current_epoch says


def global_weights(trainer: L.Trainer, within: Callable[[], dict[str, Tensor] | None]) -> tuple[Any, str, Any]:
    """The attribute to patch (:class:`flsv._lightning.patches.PatchedAttributes`) so that whatever saves the module
    saves the global model: other callbacks, whatever their order, and checkpoints of weights only, at which no callback
    is asked.

    Args:
        trainer: whose module it is.
        within: the global model's ``state_dict`` while the module is a client; else None.
    """
    plain = trainer.strategy.lightning_module_state_dict

    def weights() -> dict[str, Any]:
        found = within()
        return plain() if found is None else found

    return trainer.strategy, "lightning_module_state_dict", weights
