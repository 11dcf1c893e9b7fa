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
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn


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


_BatchNorm = nn.modules.batchnorm._BatchNorm


class FinetuningState:
    """What a trainer's finetuning callbacks have done, at the last boundary between two rounds.

    ``BaseFinetuning`` and its kind change the optimizer and their own state when an epoch begins: a checkpoint saved
    within the round would hold that, and the resumed round would do it twice. And on resume Lightning freezes
    everything anew, but thaws nothing that had been finetuned before. So here is what stood at the round's beginning,
    and which parameters were trained.

    Args:
        trainer: with its optimizers set up; None, or one without such callbacks: nothing is done.
    """

    def __init__(self, trainer: L.Trainer | None = None) -> None:
        callbacks = [] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
        self._trainer = trainer
        self._callbacks = [callback for callback in callbacks if isinstance(callback, BaseFinetuning)]
        self._trained: dict[str, list[str]] | None = None

    def begin_round(self) -> None:
        """Before these callbacks begin the epoch."""
        if self._trainer is not None and self._callbacks:
            self._states = {callback.state_key: deepcopy(callback.state_dict()) for callback in self._callbacks}
            groups = [optimizer.state_dict()["param_groups"] for optimizer in self._trainer.optimizers]
            self._optimizers = [{"state": {}, "param_groups": deepcopy(each)} for each in groups]
            self._trained = _trained(self._trainer.lightning_module)

    def state(self, within_round: bool) -> dict[str, list[str]] | None:
        """Names of what is trained, to be saved; within a round, of what was trained before it."""
        if self._trainer is None or not self._callbacks:
            return None
        return self._trained if within_round else _trained(self._trainer.lightning_module)

    def restore(self, module: L.LightningModule, state: dict[str, list[str]] | None) -> None:
        """Train what was trained when ``state`` was saved, and nothing else."""
        if state is None or not self._callbacks:
            return
        for name, parameter in module.named_parameters():
            parameter.requires_grad = name in state["parameters"]
        for name, layer in module.named_modules():
            if isinstance(layer, _BatchNorm):
                layer.track_running_stats = name in state["tracking"]

    def rewind(self, checkpoint: dict[str, Any]) -> None:
        """Turn a checkpoint saved within a round into that of the round's start."""
        if self._callbacks:
            checkpoint["callbacks"].update(self._states)
            checkpoint["optimizer_states"] = self._optimizers


def _trained(module: L.LightningModule) -> dict[str, list[str]]:
    return {
        "parameters": [name for name, parameter in module.named_parameters() if parameter.requires_grad],
        "tracking": [
            name
            for name, layer in module.named_modules()
            if isinstance(layer, _BatchNorm) and layer.track_running_stats
        ],
    }
