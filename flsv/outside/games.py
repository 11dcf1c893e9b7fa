"""games_outside_fit: creates coalition games for a module outside of a Trainer's fit."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flsv._lightning.private import attach, detach_fabric
from flsv._lightning.validation_run import StoredBatches
from flsv.core.parameter_space import ParameterSpace
from flsv.games import CoalitionGames
from flsv.games.make_evaluators import make_evaluators
from flsv.games.module_copies import module_device
from flsv.scores.performance import Measure
from flsv.utilities.errors import ConfigurationError

#: Name under which a plain network's loss is logged.
LOSS = "loss"


class PlainModule(L.LightningModule):
    """LightningModule that wraps a network and logs its loss in validation."""

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Any, Any], Tensor] | None,
    ) -> None:
        super().__init__()
        self.module = module
        self._loss = loss

    def forward(self, x: Any) -> Any:
        return self.module(x)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self._loss is not None:
            x, y = batch
            self.log(LOSS, self._loss(self(x), y), batch_size=len(y))


def games_outside_fit(
    module: nn.Module,
    loader: Any,
    measures: Mapping[str, Measure],
    loss: Callable[[Any, Any], Tensor] | None = None,
    num_classes: int | None = None,
) -> CoalitionGames:
    """Create coalition games that score models on ``loader`` by ``measures``, ``{name: performance}``, outside of a
    fit."""
    if isinstance(loader, list | tuple):
        are_loaders = all(isinstance(part, DataLoader) for part in loader)
        if not are_loaders:
            loader = StoredBatches(loader)  # Lightning would take a list for several loaders
    lightning_module = _lightning_module(module, loss)
    # The names have other prefixes than the module's, but the same order.
    space = ParameterSpace(lightning_module)
    evaluators = make_evaluators(
        _trainer(lightning_module),
        space,
        loader,
        measures,
        num_classes=num_classes or 1,
    )
    return CoalitionGames(evaluators)


def _lightning_module(
    module: nn.Module,
    loss: Callable[[Any, Any], Tensor] | None,
) -> L.LightningModule:
    if not isinstance(module, L.LightningModule):
        return PlainModule(module, loss)
    if loss is not None:
        raise ConfigurationError(
            "value_round(loss=...) works with plain modules only, but the module is a LightningModule. Remove "
            "loss, and give metrics a value that the module logs: performance='val_loss', mode='min'."
        )
    lightning_module = copy.copy(module)
    detach_fabric(lightning_module)
    return lightning_module


def _trainer(module: L.LightningModule) -> L.Trainer:
    with _without_announcement():
        trainer = _trainer_on(module_device(module))
    trainer.strategy.connect(module)
    attach(module, trainer)  # the module's hooks may read the trainer's state
    trainer.state.fn = TrainerFn.FITTING
    return trainer


@contextmanager
def _without_announcement() -> Iterator[None]:
    # A new Trainer announces its devices.
    log = logging.getLogger("lightning.pytorch")
    log_level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(log_level)


def _trainer_on(device: torch.device) -> L.Trainer:
    devices: int | list[int] = 1
    if device.index is not None and device.type != "cpu":
        devices = [device.index]
    return L.Trainer(
        accelerator="gpu" if device.type == "cuda" else device.type,
        devices=devices,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
