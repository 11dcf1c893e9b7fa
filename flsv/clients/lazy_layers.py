"""Lazy layers get their shapes before the first round: all clients must be sent the same model."""

from __future__ import annotations

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.parameter import is_lazy

from flsv._lightning.evaluation import evaluating, on_device
from flsv.data import FederatedDataModule
from flsv.errors import ConfigurationError
from flsv.seeding import isolated_rngs


@torch.no_grad()
def initialise_lazy_layers(trainer: L.Trainer, data: FederatedDataModule, seed: int) -> None:
    """Put a batch of the first client's through the module if any of its layers has no shape yet.

    Only ``forward(x)`` of batches ``(x, y)`` is tried; what is still without a shape after it, the parameter space
    refuses. The weights are drawn from the run's seed.

    Args:
        trainer: with its module on its device and its optimizers set up.
        data: dealt out.
        seed: the run's.
    """
    module = trainer.lightning_module
    if not any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        return
    if not is_overridden("forward", module, L.LightningModule):
        return
    with isolated_rngs(seed, "lazy layers"), evaluating(module), trainer.strategy.precision_plugin.forward_context():
        try:
            x, _ = next(on_device(trainer, data.client_loader(0, "train", shuffle=False)))
        except ConfigurationError:  # no pair
            return
        module(x)
