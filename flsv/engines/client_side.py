"""The client side of a fit, as its configuration says: which entries of a module travel, and how a client trains."""

from __future__ import annotations

from typing import Any

import lightning as L
from torch import nn

from flsv._lightning.per_client import AccumulationWindows
from flsv.clients.local_steps import LocalSteps
from flsv.clients.optimizers import ClientOptimizers
from flsv.clients.train_client import LocalTraining
from flsv.parameters import ParameterSpace
from flsv.participants.sharing import Sharing, sharing
from flsv.server.config import FederationConfig


def shared_space(module: nn.Module, config: FederationConfig) -> tuple[ParameterSpace, Sharing]:
    """The map, the same on both sides of a federation, and what does not travel because of ``share``."""
    private = [pattern for strategy in config.strategies.values() for pattern in strategy.private]
    shared = sharing(config.share, module, config.head)
    return ParameterSpace(module, config.head, private, **shared._asdict()), shared


def local_training(
    trainer: L.Trainer,
    space: ParameterSpace,
    config: FederationConfig,
    num_clients: int,
    steps: LocalSteps | None,
    optimizer_state: dict[str, Any] | None,
    buffers: dict[str, Any] | None,
) -> LocalTraining:
    """How clients train in a trainer's module.

    Args:
        trainer: with its optimizers set up.
        space: the map between the module and vectors.
        config: of the loop.
        num_clients: n.
        steps: how many optimizer steps every client takes in the fit.
        optimizer_state: what the clients' optimizers kept; None: nothing yet.
        buffers: the module's tensors that no vector holds; None: as they are in it.
    """
    strategies: dict[str, Any] = config.strategies
    local = LocalTraining(
        trainer.lightning_module,
        space,
        ClientOptimizers(trainer, config.client_optimizer, optimizer_state, steps),
        AccumulationWindows(trainer),
        num_clients,
        strategies.get("client_algorithm"),
        strategies.get("personalizer"),
        list(strategies.values()),
        config.uploads,
        config.local_epochs,
    )
    if buffers is not None:
        local.restore(buffers)
    return local
