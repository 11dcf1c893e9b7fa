"""Checks, from settings, hooks and optimizer, whether models can be trained as rows.

:mod:`flsv.training.rows.row_trial` then tries the training steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from flsv._lightning.patches import callbacks_of
from flsv.training.rows.kernel import ELEMENTWISE, is_elementwise

#: Names of the hooks around a batch or an optimizer step that both modules and callbacks have.
HOOKS_OF_A_BATCH = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
#: Names of all hooks around a batch or an optimizer step that modules have.
HOOKS_OF_A_MODULE = (
    *HOOKS_OF_A_BATCH,
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
)
#: Lightning's callbacks that only watch a run or end it. Their hooks change neither the module, nor its optimizer, nor
#: a batch: they are allowed while rows of a batched model train, and left out when a coalition is trained alone.
OF_THE_RUN = (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    ThroughputMonitor,
    Timer,
)
#: Precisions in which rows of a batched model take the same steps as single models.
PRECISIONS = ("32-true", "64-true", "bf16-mixed")


def not_batched(trainer: L.Trainer, algorithm: Any, optimizer_state: str) -> str | None:
    """Return why a fit's models cannot be trained as rows, and the remedy, or None if only a trial can tell."""
    if algorithm is not None:
        return f"client_algorithm={algorithm!r} changes the gradients of one client. Leave it out"
    if optimizer_state != "reset":
        return 'optimizer_state="persist" gives every client the moments that it left. Use optimizer_state="reset"'
    if why := _not_by_optimizer(trainer):
        return why
    windows = any(isinstance(c, GradientAccumulationScheduler) for c in callbacks_of(trainer))
    if trainer.accumulate_grad_batches != 1 or windows:
        return "gradients are accumulated over batches. Leave accumulate_grad_batches at 1"
    if trainer.precision not in PRECISIONS:
        return f"precision={trainer.precision!r} scales or rounds within a step. Use one of {', '.join(PRECISIONS)}"
    stepped = [c.scheduler for c in trainer.lr_scheduler_configs if c.interval == "step"]
    if stepped:
        return f"{type(stepped[0]).__name__} steps after every batch of a client. Use interval='epoch' (a round)"
    return _not_by_hooks(trainer)


def _not_by_optimizer(trainer: L.Trainer) -> str | None:
    """Return why the optimizers prevent it, and the remedy, or None."""
    module, name = trainer.lightning_module, type(trainer.lightning_module).__name__
    if not module.automatic_optimization:
        return f"{name} steps its optimizers itself (automatic_optimization = False). Use automatic optimization"
    if len(trainer.optimizers) != 1:
        return f"{name} has {len(trainer.optimizers)} optimizers. Use one"
    optimizer: Any = trainer.optimizers[0]
    kind = type(optimizer).__name__
    if not is_elementwise(optimizer):
        return f"{kind} is not known to allow one step of many models. Use one of torch's {', '.join(ELEMENTWISE)}"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{kind} has hooks around its steps, which would see no client's step. Leave them out"
    return None


def _not_by_hooks(trainer: L.Trainer) -> str | None:
    """Return why hooks or embeddings prevent it, and the remedy, or None."""
    module, name = trainer.lightning_module, type(trainer.lightning_module).__name__
    embeddings = (
        (n, layer) for n, layer in module.named_modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
    )
    if renormed := [n for n, layer in embeddings if layer.max_norm is not None]:
        return f"{renormed[0]}, an embedding with max_norm, changes its weight in its forward pass. Leave max_norm out"
    if hooks := [hook for hook in HOOKS_OF_A_MODULE if is_overridden(hook, module, L.LightningModule)]:
        return f"{name} defines {', '.join(hooks)}, which would see no client's batches or steps. Leave it out"
    for callback, hooks in strange_hooks(trainer, HOOKS_OF_A_BATCH):
        return (
            f"{type(callback).__name__} defines {', '.join(hooks)}, which would see no client's batches. Leave it out"
        )
    return None


def strange_hooks(trainer: L.Trainer, hooks: tuple[str, ...]) -> Iterator[tuple[L.Callback, list[str]]]:
    """Yield the callbacks that may change the training, with those of ``hooks`` that they define."""
    for callback in callbacks_of(trainer):
        found = [hook for hook in hooks if not _harmless(callback, hook)]
        if found:
            yield callback, found


def _harmless(callback: L.Callback, hook: str) -> bool:
    """Return whether a callback's ``hook`` is missing, or known not to change the training."""
    if not is_overridden(hook, callback, L.Callback):
        return True
    owner = next((kind for kind in type(callback).__mro__ if hook in vars(kind)), None)
    if owner is None or hook in vars(callback):  # the hook is an attribute of the instance, as in LambdaCallback
        return False
    known = issubclass(owner, OF_THE_RUN) and owner.__module__.startswith("lightning.")
    return known or owner.__module__.startswith("flsv.")
