"""Checks of the trainer, its data module and its callbacks before training."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)

from flsv._lightning.patches import callbacks_of
from flsv._lightning.round_boundary import REPLACED, WeightAveraging
from flsv.data import FederatedDataModule
from flsv.utilities.errors import ConfigurationError, check_lightning


def federated_data(trainer: L.Trainer) -> FederatedDataModule:
    """Return the trainer's data module, which must be a FederatedDataModule."""
    check_lightning(trainer)
    data: Any = getattr(trainer, "datamodule", None)
    if not isinstance(data, FederatedDataModule):
        got = "dataloaders" if data is None else type(data).__name__
        wrapped = "my_datamodule" if data else "loader.dataset, val=val_loader.dataset, batch_size=32"
        raise ConfigurationError(
            f"FederatedLoop trains on a FederatedDataModule, and got {got}. Wrap what you have, and say who the "
            f"clients are: trainer.fit(module, FederatedDataModule({wrapped}, partitioner=IIDPartitioner(5)))."
        )
    return data


def check_trainer(trainer: L.Trainer) -> None:
    """Refuse settings and callbacks of a trainer that cannot work with rounds."""
    for finder in callbacks_of(trainer):
        if isinstance(finder, BatchSizeFinder | LearningRateFinder):
            raise ConfigurationError(
                f"{type(finder).__name__} tries training out before it begins, which in a federation is no client's "
                "training. Use it without the loop, on all clients' samples together: Tuner(Trainer()) and the same "
                "module and FederatedDataModule; then fit with what it finds."
            )
    if trainer.world_size > 1:
        raise ConfigurationError(
            f"the federation runs in one process on one device, and the trainer has {trainer.world_size}. "
            'Set Trainer(devices=1), or strategy="federated", which spreads the clients over processes.'
        )
    if any(isinstance(callback, ModelPruning) for callback in callbacks_of(trainer)):
        raise ConfigurationError(
            "ModelPruning changes the module's parameters between rounds, and the clients' models, optimizers and "
            "contributions are vectors of the same parameters all along. Prune the module before the fit "
            "(torch.nn.utils.prune): its masks then stay as they are in every round."
        )
    if trainer.limit_train_batches == 0:
        raise ConfigurationError(
            "limit_train_batches=0: nobody would train. It holds per client and local epoch: set at least 1, or leave "
            "it out."
        )
    if trainer.val_check_interval != 1.0:
        raise ConfigurationError(
            f"val_check_interval={trainer.val_check_interval}: in the middle of a round there is no global model to "
            "validate. Leave it at 1.0; check_val_every_n_epoch=k validates every k rounds."
        )
    # mypy: set by Lightning's connectors
    if trainer.max_steps not in (None, -1) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        raise ConfigurationError(
            f"max_steps={trainer.max_steps} would stop in the middle of a round. Say max_epochs, the number of rounds."
        )


def check_callbacks(trainer: L.Trainer, loop: L.Callback) -> None:
    """Check the callbacks, and move finetuning callbacks behind the loop."""
    callbacks: list[L.Callback] = callbacks_of(trainer)
    check_lightning(*callbacks)
    if any(isinstance(c, StochasticWeightAveraging) for c in callbacks):
        raise ConfigurationError(
            "StochasticWeightAveraging ends with an epoch that renews BatchNorm's statistics: a round in which nobody "
            "trains. Use lightning.pytorch.callbacks.WeightAveraging, which averages the global models, these "
            "statistics included; to anneal the learning rate, return torch.optim.swa_utils.SWALR from "
            "configure_optimizers."
        )
    averaging = [c for c in callbacks if isinstance(c, WeightAveraging)]
    if len(averaging) > 1:
        raise ConfigurationError(
            f"{' and '.join(type(c).__name__ for c in averaging)}: a checkpoint has room for one averaged model. Keep "
            "one of them."
        )
    for callback in averaging:
        own = [name for name in REPLACED if getattr(type(callback), name) is not getattr(WeightAveraging, name, None)]
        if own:
            raise ConfigurationError(
                f"{type(callback).__name__} has its own {own[0]}, which would average clients in the middle of their "
                "training. Say in should_update(step_idx, epoch_idx) when to average: it is done once a round, with "
                "the global model."
            )
    changing = [c for c in callbacks if isinstance(c, BaseFinetuning)]
    if changing:
        rest = [c for c in callbacks if c not in changing]
        place = rest.index(loop) + 1
        # mypy: set by Lightning's connectors
        trainer.callbacks = [*rest[:place], *changing, *rest[place:]]  # type: ignore[attr-defined]
