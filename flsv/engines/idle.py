"""An epoch of one idle batch, during which the cohort trains outside the Trainer's loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L

from flsv.engines.one_process import OneProcess


class IdleBatch:
    """The one batch of a round that is trained elsewhere; no hook of a module or data module sees it."""


class IdleLoader:
    """The train dataloader of a round that is trained elsewhere.

    Args:
        round_index: the round.
    """

    def __init__(self, round_index: int) -> None:
        self.round_index = round_index
        self.visits: list[Any] = []

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        yield IdleBatch()


def idle_patches(trainer: L.Trainer) -> list[tuple[Any, str, Any]]:
    """Attributes that let an idle batch pass through a Trainer: nothing is moved, no step is taken, and the module is
    not told of it."""
    module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop

    def passing(step: Any) -> Any:
        def pass_by(batch: Any, *args: Any, **kwargs: Any) -> Any:
            return batch if isinstance(batch, IdleBatch) else step(batch, *args, **kwargs)

        return pass_by

    def nothing(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}

    def silent(*args: Any, **kwargs: Any) -> None:
        return None

    return [
        (module, "_on_before_batch_transfer", passing(module._on_before_batch_transfer)),
        (trainer.strategy, "batch_to_device", passing(trainer.strategy.batch_to_device)),
        (trainer.precision_plugin, "convert_input", passing(trainer.precision_plugin.convert_input)),
        (loop.automatic_optimization, "run", nothing),
        (loop.manual_optimization, "run", nothing),
        (loop, "update_lr_schedulers", _per_round(loop.update_lr_schedulers)),
        (module, "on_train_batch_start", silent),
        (module, "on_train_batch_end", silent),
    ]


def count_steps(trainer: L.Trainer, steps: int) -> None:
    """Count steps that were taken elsewhere in ``trainer.global_step``: where it stands still, nothing is saved."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        progress = loop.automatic_optimization.optim_progress.optimizer.step
    else:
        progress = loop.manual_optimization.optim_step_progress
    for counts in (progress.total, progress.current):
        counts.ready += steps
        counts.completed += steps


def _per_round(update: Any) -> Any:
    def only_epochs(interval: str, update_plateau_schedulers: bool) -> None:
        if interval == "epoch":  # those that step per batch are the clients'
            update(interval, update_plateau_schedulers=update_plateau_schedulers)

    return only_epochs


class IdleProcess(OneProcess):
    """An engine whose cohort trains elsewhere than in the Trainer's own batches."""

    idle = True

    def patches(self) -> list[tuple[Any, str, Any]]:
        return idle_patches(self._trainer)

    def loader(self, limit: float) -> Any:
        return IdleLoader(self._state.round_index)
