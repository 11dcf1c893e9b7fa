"""Converts batches to the form in which a fit's module gets them, on its device."""

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

from flsv._lightning.data_source import generators_of
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import kept_generators


def on_device(
    trainer: L.Trainer, batches: Iterable[Any], dataloader_idx: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches ``(x, y)`` as validation gets them, on the module's device."""
    for batch in batches:
        with validating(trainer):
            module_input = as_module_input(trainer, batch, dataloader_idx)
        is_sequence = isinstance(module_input, (tuple, list))
        if not is_sequence or len(module_input) != 2:
            form = f"{len(module_input)} parts" if is_sequence else type(module_input).__name__
            raise ConfigurationError(
                f"models are evaluated on batches (x, y), but a batch is {form}."
            )
        x, y = module_input
        yield x, y


def as_module_input(
    trainer: L.Trainer,
    batch: Any,
    dataloader_idx: int = 0,
) -> Any:
    """Convert a batch to the form in which the trainer's module gets it."""
    strategy = trainer.strategy
    converted_batch = strategy.precision_plugin.convert_input(batch)
    batch_to_move = trainer.lightning_module._on_before_batch_transfer(
        converted_batch, dataloader_idx
    )
    return strategy.batch_to_device(batch_to_move, dataloader_idx=dataloader_idx)


def all_on_device(
    trainer: L.Trainer,
    loaders: Any,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of one or several loaders, each as :func:`on_device` does. The loaders' random generators are
    restored.
    """
    with kept_generators(generators_of(loaders)):
        for index, loader in enumerate(list_loaders(loaders)):
            yield from on_device(trainer, loader, index)


def list_loaders(loaders: Any) -> Sequence[Any]:
    """List the dataloaders in ``loaders`` in Lightning's order."""
    if not isinstance(loaders, CombinedLoader):
        return CombinedLoader(loaders, "sequential").flattened
    if loaders._mode == "sequential":
        return loaders.flattened
    combined_batches = [batch for batch, _, _ in loaders]  # a batch holds one of each loader
    return [combined_batches]  # as one loader


@contextmanager
def validating(trainer: L.Trainer) -> Iterator[None]:
    """Set the trainer's stage to validation within the context."""
    stage = trainer.state.stage
    trainer.state.stage = RunningStage.VALIDATING
    try:
        yield
    finally:
        trainer.state.stage = stage


@torch.no_grad()
def count_responses(
    trainer: L.Trainer,
    module: nn.Module,
    batches: Iterable[Any],
    counts: Metric,
) -> None:
    """Update the metric ``counts`` with the labels of all batches and the outputs of a module in evaluation mode."""
    counts.to(trainer.strategy.root_device)
    with trainer.strategy.precision_plugin.forward_context():
        for x, y in on_device(trainer, batches):
            counts.update(module(x), y)
