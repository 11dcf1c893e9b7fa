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
    """Yield the batches ``(x, y)`` as the trainer's module gets them in validation: converted to the trainer's
    precision, passed through the transfer hooks, on the module's device.

    Args:
        trainer: the fit's trainer.
        batches: the batches as a dataloader yields them.
        dataloader_idx: the dataloader's number, which is passed to the hooks.

    Raises:
        ConfigurationError: a batch is not a pair ``(x, y)``.
    """
    for batch in batches:
        with validating(trainer):
            batch = as_given(trainer, batch, dataloader_idx)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            what = f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else type(batch).__name__
            raise ConfigurationError(f"models are evaluated on batches (x, y), and a batch is {what}.")
        x, y = batch
        yield x, y


def as_given(trainer: L.Trainer, batch: Any, dataloader_idx: int = 0) -> Any:
    """Convert a batch of a dataloader to the form in which the trainer's module gets it, see :func:`on_device`, and
    return it."""
    batch = trainer.strategy.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)


def all_on_device(trainer: L.Trainer, loaders: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of one or several loaders, one loader after the other; see :func:`on_device`."""
    for index, loader in enumerate(each_loader(loaders)):
        yield from on_device(trainer, loader, index)


def each_loader(loaders: Any) -> Sequence[Any]:
    """Return the list of dataloaders in ``loaders`` (one, several or a CombinedLoader), in Lightning's order. A
    CombinedLoader whose batches combine those of all loaders becomes a single loader, a list of its batches."""
    if isinstance(loaders, CombinedLoader) and loaders._mode != "sequential":
        return [[batch for batch, _, _ in loaders]]  # each batch combines all loaders
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "sequential")
    return combined.flattened


@contextmanager
def validating(trainer: L.Trainer) -> Iterator[None]:
    """Set the trainer's stage to validation within the context. Hooks of modules and data modules read the stage, for
    example to augment batches only in training."""
    before = trainer.state.stage
    trainer.state.stage = RunningStage.VALIDATING
    try:
        yield
    finally:
        trainer.state.stage = before


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put ``module`` into evaluation mode within the context, and restore every layer's mode afterwards."""
    training = [layer for layer in module.modules() if layer.training]
    module.eval()
    try:
        yield
    finally:
        for layer in training:
            layer.training = True


@torch.no_grad()
def count_answers(trainer: L.Trainer, batches: Iterable[Any], counts: Metric) -> None:
    """Update the metric ``counts`` with the outputs of the trainer's module, in evaluation mode, and the labels.

    Device, precision and batch-transfer hooks are those of the fit. The call does not wait for the GPU.

    Args:
        trainer: the fit's trainer; its module's ``forward`` returns logits ``[B, M]`` for B samples and M classes.
        batches: pairs ``(x, y)`` of inputs and labels.
        counts: a metric whose ``update`` takes logits and labels; it is moved to the module's device.
    """
    module = trainer.lightning_module
    counts.to(module.device)
    with evaluating(module), trainer.strategy.precision_plugin.forward_context():
        for x, y in on_device(trainer, batches):
            counts.update(module(x), y)


def free_cached(device: torch.device) -> None:
    """Release the memory that torch holds on a device without using it, after an allocation has failed."""
    backend: Any = getattr(torch, device.type, None)
    if hasattr(backend, "empty_cache"):
        backend.empty_cache()
