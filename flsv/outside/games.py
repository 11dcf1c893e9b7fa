"""Coalition games for rounds that no Trainer runs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
from lightning.pytorch.trainer.connectors.data_connector import _DataHookSelector
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flsv._lightning.evaluation import all_on_device
from flsv._lightning.validation import KeptBatches
from flsv.core.parameter_space import ParameterSpace
from flsv.games.coalition_games import CoalitionGames
from flsv.games.lent_module import module_device
from flsv.games.make_evaluators import BY_A_LOGGED_VALUE, make_evaluators
from flsv.games.model_evaluator import ModelEvaluator
from flsv.games.performance import ModelScore
from flsv.utilities.errors import ConfigurationError

#: Name under which a plain network's loss is logged.
LOSS = "loss"


class PlainModule(L.LightningModule):
    """LightningModule that wraps a network and logs its loss in validation."""

    def __init__(self, module: nn.Module, loss: Callable[[Any, Any], Tensor] | None) -> None:
        super().__init__()
        self.module, self._loss = module, loss

    def forward(self, x: Any) -> Any:
        return self.module(x)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self._loss is not None:
            x, y = batch
            self.log(LOSS, self._loss(self(x), y), batch_size=len(y))


def games_outside_fit(
    module: nn.Module,
    loader: Any,
    measures: Mapping[str, str | ModelScore],
    loss: Callable[[Any, Any], Tensor] | None = None,
    num_classes: int | None = None,
) -> CoalitionGames:
    """Make coalition games whose models belong to no Trainer."""
    if isinstance(loader, list | tuple) and not all(isinstance(each, DataLoader) for each in loader):
        loader = KeptBatches(loader)  # Lightning takes a list for several loaders
    own: L.LightningModule
    if isinstance(module, L.LightningModule):
        if loss is not None:
            raise ConfigurationError(
                "loss=... is for plain modules: name what the LightningModule logs, performance='val_loss', mode='min'."
            )
        own = _detached(module)
    else:
        own = PlainModule(module, loss)
    inner = ParameterSpace(own)  # other prefixes, the same order
    classifiers = any(isinstance(measure, str) for measure in measures.values())
    if isinstance(own, PlainModule) and all(isinstance(measure, str) for measure in measures.values()):
        return CoalitionGames(ModelEvaluator(own, inner, loader, num_classes=num_classes or 1))
    trainer = _trainer(own)
    evaluator = None
    if classifiers:
        try:
            evaluator = ModelEvaluator(own, inner, all_on_device(trainer, loader), num_classes=num_classes or 1)
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}{BY_A_LOGGED_VALUE}") from error
    return CoalitionGames(evaluator, validated=make_evaluators(trainer, inner, loader, measures))


def _detached(module: L.LightningModule) -> L.LightningModule:
    """Copy the module without its Fabric object, to which it would log its validation."""
    own = copy.copy(module)
    own._fabric = None
    return own


def _trainer(module: L.LightningModule) -> L.Trainer:
    """Make a Trainer without output that validates on the module's device."""
    device = module_device(module)
    accelerator = {"cuda": "gpu"}.get(device.type, device.type)
    log = logging.getLogger("lightning.pytorch")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        trainer = L.Trainer(
            accelerator=accelerator,
            devices=1 if device.index is None or device.type == "cpu" else [device.index],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    finally:
        log.setLevel(before)
    trainer.strategy.connect(module)
    # Attached to the copy only: its hooks ask the trainer whether it validates.
    module._trainer = trainer
    trainer._data_connector._datahook_selector = _DataHookSelector(module, None)
    trainer.state.fn = TrainerFn.FITTING
    return trainer
