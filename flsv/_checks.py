"""What can be known to be wrong before training time is spent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden

from flsv.data import FederatedDataModule
from flsv.errors import ConfigurationError
from flsv.parameters import ParameterSpace

if TYPE_CHECKING:
    from flsv.loop import FederatedLoop


def check_arguments(loop: FederatedLoop) -> None:
    """Check what the loop was made with.

    Raises:
        ConfigurationError: a number out of range, an unknown word.
    """
    for name, least in (("local_epochs", 1), ("evaluate_clients_every", 0), ("figures_every", 0)):
        if getattr(loop, name) < least:
            raise ConfigurationError(f"FederatedLoop({name}={getattr(loop, name)}): expected at least {least}.")
    if loop.server_lr <= 0:
        raise ConfigurationError(f"FederatedLoop(server_lr={loop.server_lr}): expected a positive number.")
    for name, words in (("client_optimizer", ("reset", "keep")), ("evaluate_models", ("received", "trained"))):
        if getattr(loop, name) not in words:
            raise ConfigurationError(
                f'FederatedLoop({name}={getattr(loop, name)!r}): expected "{words[0]}" or "{words[1]}".'
            )


def check_setup(loop: FederatedLoop, trainer: L.Trainer, module: L.LightningModule) -> FederatedDataModule:
    """Check the loop against the trainer and the data, as soon as both are set up.

    Returns:
        The trainer's data module.

    Raises:
        ConfigurationError: what is wrong, what was expected and what to do.
    """
    data: Any = getattr(trainer, "datamodule", None)
    if not isinstance(data, FederatedDataModule):
        raise ConfigurationError(
            f"FederatedLoop trains on a FederatedDataModule, and got {type(data).__name__}. Wrap what you have: "
            "trainer.fit(module, FederatedDataModule(my_datamodule, partitioner=IIDPartitioner(5)))."
        )
    if trainer.world_size > 1:
        raise ConfigurationError(
            f"the federation runs in one process on one device, and the trainer has {trainer.world_size}. "
            "Set Trainer(devices=1)."
        )
    if trainer.val_check_interval != 1.0:
        raise ConfigurationError(
            f"val_check_interval={trainer.val_check_interval}: in the middle of a round there is no global model to "
            "validate. Leave it at 1.0; check_val_every_n_epoch=k validates every k rounds."
        )
    if trainer.max_steps not in (None, -1) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        raise ConfigurationError(
            f"max_steps={trainer.max_steps} would stop in the middle of a round. Say max_epochs, the number of rounds."
        )
    loop.sampler.check(data.num_clients)
    defined = sorted(loop.metrics)
    for role, strategy in loop.strategies.items():
        if strategy.metric is not None and strategy.metric not in loop.metrics:
            raise ConfigurationError(
                f"{role} {strategy!r} reads the metric {strategy.metric!r}, which is not defined. Defined: {defined}. "
                f"Add it to FederatedLoop(metrics={{{strategy.metric!r}: ...}}) or name one that is there."
            )
    judging = loop.board.client_value_metrics
    if judging and not getattr(loop.personalizer, "gives_client_values", False):
        raise ConfigurationError(
            f"metrics {judging} ask what the clients find each other to be worth, and {loop.personalizer!r} does not "
            "say. Use flsv.personalization.PFedSV or FedFomo, or leave those metrics out."
        )
    games = loop.board.game_metrics
    if games and not data.val_dataloader():
        raise ConfigurationError(
            f"metrics {games} evaluate models on the server's validation set, which is empty. Set "
            "FederatedDataModule(server_val_fraction=0.1), or leave those metrics out."
        )
    if games and not is_overridden("forward", module, L.LightningModule):
        raise ConfigurationError(
            f"metrics {games} call {type(module).__name__}.forward(x), which is not defined. Let it return the logits "
            "[B, M], or leave those metrics out."
        )
    if loop.evaluate_clients_every:
        empty = [i for i in range(data.num_clients) if len(data.client_indices(i, "test")) == 0]
        if empty:
            raise ConfigurationError(
                f"evaluate_clients_every={loop.evaluate_clients_every} needs a test split at every client; "
                f"clients {empty} have none. Set FederatedDataModule(client_test_fraction=0.2), or a larger one."
            )
        if not is_overridden("forward", module, L.LightningModule):
            raise ConfigurationError(
                f"evaluate_clients_every={loop.evaluate_clients_every} calls {type(module).__name__}.forward(x), which "
                "is not defined. Let it return the logits [B, M], or set evaluate_clients_every=0."
            )
    return data


def check_space(loop: FederatedLoop, space: ParameterSpace, num_classes: int) -> None:
    """Check what depends on the module's layers, once they exist."""
    if loop.privacy is not None:
        loop.privacy.check(space)
    if not (loop.board.head_metrics or loop.head):
        return
    asking = f"metrics {loop.board.head_metrics}" if loop.board.head_metrics else f"head={loop.head!r}"
    if space.head is None:
        raise ConfigurationError(
            f"{asking} need a classifier head, and the module has no nn.Linear layer. Name the last layer with "
            "FederatedLoop(head=...), or leave those metrics out."
        )
    if space.head.num_classes != num_classes:
        raise ConfigurationError(
            f"the head {space.head.name!r} has {space.head.num_classes} rows and the data have {num_classes} classes. "
            "Give the module as many outputs as there are classes, or name its classifier with FederatedLoop(head=...)."
        )
