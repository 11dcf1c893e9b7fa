"""Puts one batch through the module before training, to initialise lazy layers and to check outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.nn.parameter import is_lazy

from flsv._lightning.evaluation import each_loader, evaluating, on_device
from flsv.data import FederatedDataModule
from flsv.errors import ConfigurationError
from flsv.seeding import isolated_rngs

_BY_WHAT_IS_LOGGED = (
    " Or let them measure what the module logs in validation_step, which takes any batches and outputs: "
    "performance='val_loss', mode='min' of a game, loss='val_loss' of GradientAgreement."
)


def try_evaluations(trainer: L.Trainer, data: FederatedDataModule, every: int, games: Sequence[str]) -> None:
    """Try whatever models will be evaluated for as classifiers: on the clients' own test splits, and in these metrics'
    games. What is measured by other means is tried by :func:`flsv.games.evaluation.metric_of_outputs.validated_models`.

    Raises:
        ConfigurationError: see :func:`try_forward`.
    """
    if every:
        asking = f"ClientEvaluation(every={every})"
        try_forward(trainer, data.client_loader(0, "test", shuffle=False), data.num_classes, asking, or_more=True)
    if games:
        loader = each_loader(data.val_dataloader())[0]
        try_forward(trainer, loader, data.num_classes, f"metrics {games}", instead=_BY_WHAT_IS_LOGGED)


@torch.no_grad()
def try_forward(
    trainer: L.Trainer,
    batches: Iterable[Any],
    num_classes: int,
    asking: str,
    *,
    or_more: bool = False,
    instead: str = "",
) -> None:
    """Put one batch through the module of a trainer, which is left as it was: modes, buffers, random numbers.

    Args:
        trainer: with its module on its device.
        batches: pairs ``(x, y)``; the first is taken.
        num_classes: M.
        asking: what the evaluation is for, for the message.
        or_more: whether logits of more than M classes will do.
        instead: the end of every message: what else there is to do.

    Raises:
        ConfigurationError: the batch is no pair, its labels are no integers ``[B]``, or the module's ``forward`` gives
            no logits ``[B, M]``.
    """
    module = trainer.lightning_module
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with isolate_rng(), evaluating(module), trainer.strategy.precision_plugin.forward_context():
        try:
            batch = next(on_device(trainer, batches), None)
        except ConfigurationError as error:
            raise ConfigurationError(f"{asking}: {error}{instead}") from None
        if batch is None:
            return
        x, y = batch
        logits = module(x)
    for buffer, before in buffers:
        buffer.copy_(before)
    if not isinstance(y, Tensor) or y.ndim != 1 or y.is_floating_point():
        raise ConfigurationError(
            f"{asking}: the labels of a batch are {_what(y)}, expected integer classes [B].{instead}"
        )
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else ()
    if len(shape) == 2 and shape[0] == len(y) and (shape[1] == num_classes or (or_more and shape[1] > num_classes)):
        return
    hint = ""
    if num_classes == 2 and shape in ((len(y),), (len(y), 1)):
        hint = (
            " Of one logit z per sample make two: torch.stack([torch.zeros_like(z), z], -1) has the same loss under "
            "cross_entropy as z under binary_cross_entropy_with_logits."
        )
    raise ConfigurationError(
        f"{asking}: {type(module).__name__}.forward gives {_what(logits)} for {len(y)} samples of {num_classes} "
        f"classes, expected logits [{len(y)}, {num_classes}].{hint}{instead}"
    )


def _what(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


@torch.no_grad()
def initialise_lazy_layers(trainer: L.Trainer, data: FederatedDataModule, seed: int) -> None:
    """Put a batch of the first client's through the module if any of its layers has no shape yet: all clients must be
    sent the same model.

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
