"""What can be seen without a batch to keep clients from being trained at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.model_helpers import is_overridden

from flsv.clients.batched import BatchedTraining
from flsv.errors import ConfigurationError

#: Hooks around a step, of which a batched one has none.
HOOKS_OF_A_STEP = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
#: Those that only modules have.
HOOKS_OF_A_MODULE = (
    *HOOKS_OF_A_STEP,
    "on_train_batch_start",
    "on_train_batch_end",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
)


def check_batched(trainer: L.Trainer, arguments: Mapping[str, Any]) -> None:
    """Check that a fit is one whose clients can be trained at once.

    Args:
        trainer: with its optimizers set up.
        arguments: of :class:`flsv.FederatedLoop`, by name.

    Raises:
        ConfigurationError: why not, and what to do.
    """
    why = _why_not(trainer, arguments)
    if why:
        raise ConfigurationError(
            f'engine="vmap" trains many clients as one batched model, and {why} or engine="sequential".'
        )
    BatchedTraining(trainer.lightning_module, trainer.optimizers[0])


def clip_norm(trainer: L.Trainer) -> float | None:
    """The largest norm of a gradient that the trainer allows."""
    value = trainer.gradient_clip_val
    return None if value is None else float(value)


def _why_not(trainer: L.Trainer, arguments: Mapping[str, Any]) -> str | None:
    module, name = trainer.lightning_module, type(trainer.lightning_module).__name__
    if not module.automatic_optimization:
        return f"{name} steps its optimizers itself (automatic_optimization = False). Use automatic optimization,"
    if len(trainer.optimizers) != 1:
        return f"{name} has {len(trainer.optimizers)} optimizers. Use one,"
    if arguments["client_algorithm"] is not None:
        return f"client_algorithm={arguments['client_algorithm']!r} changes the gradients of one client. Leave it out,"
    if arguments["client_optimizer"] != "reset":
        return 'client_optimizer="keep" gives every client the moments that it left. Use client_optimizer="reset",'
    windows = any(isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks)  # type: ignore[attr-defined]
    if trainer.accumulate_grad_batches != 1 or windows:
        return "gradients are accumulated over batches. Leave accumulate_grad_batches at 1,"
    if trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm == "value":
        return "gradient_clip_algorithm='value' clips within a step. Clip by norm,"
    if trainer.precision not in ("32-true", "64-true"):
        return f"precision={trainer.precision!r} scales or casts within a step. Use 32-true or 64-true,"
    stepped = [c.scheduler for c in trainer.lr_scheduler_configs if c.interval == "step"]
    if stepped:
        return f"{type(stepped[0]).__name__} steps after every batch of a client. Use interval='epoch' (a round),"
    hooks = [hook for hook in HOOKS_OF_A_MODULE if is_overridden(hook, module, L.LightningModule)]
    if hooks:
        return f"{name} defines {', '.join(hooks)}, which would see no client's batches or steps. Leave it out,"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        hooks = [hook for hook in HOOKS_OF_A_STEP if is_overridden(hook, callback, L.Callback)]
        hooks = [hook for hook in hooks if not getattr(callback, hook).__module__.startswith("flsv.")]
        if hooks:
            return f"{type(callback).__name__} defines {', '.join(hooks)}, which would see no step. Leave it out,"
    return None
