"""How good a model is on some batches, in the middle of a fit: for the clients' own models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from flsv.errors import ConfigurationError


def on_device(trainer: L.Trainer, batches: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches ``(x, y)`` as the trainer's module would get them: converted, transferred, through all hooks."""
    module = trainer.lightning_module
    for batch in batches:
        batch = module._on_before_batch_transfer(trainer.strategy.precision_plugin.convert_input(batch))
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            what = f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else type(batch).__name__
            raise ConfigurationError(f"models are evaluated on batches (x, y), and a batch is {what}.")
        x, y = batch
        yield x, y


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """``module`` in evaluation mode; afterwards every layer is in the mode that it was in."""
    training = [layer for layer in module.modules() if layer.training]
    module.eval()
    try:
        yield
    finally:
        for layer in training:
            layer.training = True


@torch.no_grad()
def accuracy(trainer: L.Trainer, batches: Iterable[Any]) -> float:
    """The share of samples whose largest logit is the label's, with the trainer's module in evaluation mode.

    Device, precision and the batch-transfer hooks are those of the fit.

    Args:
        trainer: its module's ``forward`` gives logits ``[B, M]``.
        batches: pairs ``(x, y)``.

    Returns:
        A number in [0, 1]; NaN without samples.
    """
    module = trainer.lightning_module
    hits = torch.zeros((), dtype=torch.long, device=module.device)
    total = 0
    with evaluating(module), trainer.strategy.precision_plugin.forward_context():
        for x, y in on_device(trainer, batches):
            hits += (module(x).argmax(-1) == y).sum()
            total += len(y)
    return hits.item() / total if total else float("nan")
