"""Layers that are finetuned by rounds (``BaseFinetuning`` and its kind), in checkpoints.

Such a callback changes the optimizer and its own state when an epoch begins: a checkpoint saved within the round would
hold that, and the resumed round would do it twice. And on resume Lightning freezes everything anew, but thaws nothing
that had been finetuned before. So here is what stood at the round's beginning, and which parameters were trained.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn

_BatchNorm = nn.modules.batchnorm._BatchNorm


class FinetuningState:
    """What a trainer's finetuning callbacks have done, at the last boundary between two rounds.

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
