"""Evaluation of models within a fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torchmetrics import Metric

from flsv.utilities.errors import ConfigurationError


def on_device(trainer: L.Trainer, batches: Iterable[Any], dataloader_idx: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches ``(x, y)`` as the trainer's module gets them in validation."""
    for batch in batches:
        with validating(trainer):
            batch = as_given(trainer, batch, dataloader_idx)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            what = f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else type(batch).__name__
            raise ConfigurationError(f"models are evaluated on batches (x, y), and a batch is {what}.")
        x, y = batch
        yield x, y


def as_given(trainer: L.Trainer, batch: Any, dataloader_idx: int = 0) -> Any:
    """Convert a batch to the form in which the trainer's module gets it."""
    batch = trainer.strategy.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)


def all_on_device(trainer: L.Trainer, loaders: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of one or several loaders, each as :func:`on_device` does."""
    for index, loader in enumerate(each_loader(loaders)):
        yield from on_device(trainer, loader, index)


def each_loader(loaders: Any) -> Sequence[Any]:
    """List the dataloaders in ``loaders`` in Lightning's order."""
    if isinstance(loaders, CombinedLoader) and loaders._mode != "sequential":
        return [[batch for batch, _, _ in loaders]]  # each batch combines all loaders
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "sequential")
    return combined.flattened


@contextmanager
def validating(trainer: L.Trainer) -> Iterator[None]:
    """Set the trainer's stage to validation within the context."""
    before = trainer.state.stage
    trainer.state.stage = RunningStage.VALIDATING
    try:
        yield
    finally:
        trainer.state.stage = before


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put ``module`` into evaluation mode within the context, and restore each layer's mode afterwards."""
    training = [layer for layer in module.modules() if layer.training]
    module.eval()
    try:
        yield
    finally:
        for layer in training:
            layer.training = True


@torch.no_grad()
def count_answers(trainer: L.Trainer, batches: Iterable[Any], counts: Metric) -> None:
    """Update the metric ``counts`` with the module's outputs and the labels."""
    module = trainer.lightning_module
    counts.to(module.device)
    with evaluating(module), trainer.strategy.precision_plugin.forward_context():
        for x, y in on_device(trainer, batches):
            counts.update(module(x), y)


def free_cached(device: torch.device) -> None:
    """Release the memory that torch holds on a device without using it."""
    backend: Any = getattr(torch, device.type, None)
    if hasattr(backend, "empty_cache"):
        backend.empty_cache()
