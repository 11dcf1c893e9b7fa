"""VmapProcess: the engine that trains many clients at once, as one batched model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.memory import is_oom_error
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from flsv._lightning.patches import callbacks_of, is_watcher
from flsv.configuration.federation_config import FederationConfig
from flsv.training.algorithms.base import is_proximal
from flsv.training.client_batches import ClientBatches
from flsv.training.module_snapshot import HOOKS_OF_PARAMETERS
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError
from flsv.vmap.dry_run_of_rows import compare_gradients, dry_run_of_rows
from flsv.vmap.row_engine import BegunClient, RowEngine

#: Number of clients that are trained at once, if the user sets no other.
CLIENTS_ON_CPU = 50
CLIENTS_ON_GPU = 256
#: Classes of torch's optimizers that step entry by entry, so that a step of stacked parameters is a step of every row.
ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
#: Names of the hooks around a batch or an optimizer step that both modules and callbacks have, and that modules have.
STEP_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
MODULE_HOOKS = (
    *STEP_HOOKS,
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
)
#: Precisions in which rows of a batched model take the same steps as single models.
PRECISIONS = ("32-true", "64-true", "bf16-mixed")


@checked
class VmapProcess(RowEngine):
    """The engine ``"vmap"``, which trains many small clients at once.

    With ``FederatedLoop(engine="vmap")`` clients train under ``torch.func.vmap``. The engine works for modules with
    automatic optimization whose ``training_step`` is a function of the module's parameters, its buffers and the batch,
    with one of torch's elementwise optimizers. Other modules are refused before training. In its first round, every
    run trains a few batches of a client both ordinarily and batched, and raises an error unless the results agree to
    1e-5. In each later round it compares the gradients of one step, since the module's hooks may change what it
    trains. A round equals a round of ``engine="sequential"`` up to rounding, not bitwise. Runs of this engine resume
    bitwise identically if the number of clients at once stays the same.

    Values that ``training_step`` logs are dropped. Callbacks with hooks around a batch are refused, except Lightning's
    own callbacks that are known to change nothing. Their hooks are called for one idle batch per round.

    Beside the models of the whole cohort, memory holds the model, gradient, optimizer state, training batches and
    activations of every client in the chunk that trains at once.

    Args:
        options: the arguments of :class:`flsv.engines.engine.Engine`.
        chunk: the number of clients that are trained at once. None means 50 on a CPU, 256 on a GPU.

    Raises:
        ConfigurationError: the clients cannot be trained at once. The message gives the reason.

    Example:
        >>> from functools import partial
        >>> from flsv import FederatedLoop
        >>> loop = FederatedLoop(engine=partial(VmapProcess, chunk=20))
    """

    def __init__(self, *options: Any, chunk: Count | None = None) -> None:
        trainer, _, _, _, config, *_ = options  # the arguments of Engine
        obstacle = find_obstacle(trainer, config) or _obstacle_in_callbacks(trainer)
        if obstacle is not None:
            remedy = f"{obstacle.remedy}, or set" if obstacle.remedy else "Set"
            raise ConfigurationError(
                f'engine="vmap" trains many clients as one batched model, and {obstacle.reason}. {remedy} '
                'engine="sequential".'
            )
        super().__init__(*options)
        is_on_gpu = self._module.device.type == "cuda"
        self._clients_at_once = chunk or (CLIENTS_ON_GPU if is_on_gpu else CLIENTS_ON_CPU)
        self._has_dry_run = False

    def _try_rows(self) -> set[str]:
        arguments = self.trainer, self.space, self.state.seed
        if self._has_dry_run:
            return compare_gradients(*arguments)
        self._has_dry_run = True
        return dry_run_of_rows(*arguments).unused_names

    def _parts(self, clients: Sequence[ClientBatches]) -> Iterator[Sequence[ClientBatches]]:
        for first in range(0, len(clients), self._clients_at_once):
            yield clients[first : first + self._clients_at_once]

    @contextmanager
    def _steps_of(self, clients: Sequence[BegunClient]) -> Iterator[None]:
        try:
            with super()._steps_of(clients):
                yield
        except RuntimeError as error:
            if is_oom_error(error):
                half = (len(clients) + 1) // 2
                error.add_note(
                    f"flsv: {len(clients)} clients were trained at once. For half as many set "
                    f"engine=partial(VmapProcess, chunk={half})."
                )
            raise


class Obstacle(NamedTuple):
    """Why models cannot be trained batched, and a remedy other than another engine, if there is one."""

    reason: str
    remedy: str = ""


def find_obstacle(
    trainer: L.Trainer, config: FederationConfig, allows_proximal: bool = False
) -> Obstacle | None:
    """Return why a fit's models cannot be trained batched, whatever its callbacks do. None: no reason is known before a
    dry run. With ``allows_proximal`` gradients may have proximal terms.
    """
    algorithm = config.client_algorithm
    module = trainer.lightning_module
    name = type(module).__name__
    if algorithm is not None and not (allows_proximal and is_proximal(algorithm)):
        # An aggregator may need it, so it cannot always be left out.
        return Obstacle(f"client_algorithm={algorithm!r} changes the training of one client")
    if config.optimizer_state != "reset":
        return Obstacle(
            'optimizer_state="persist" gives every client the moments that it left',
            'Use optimizer_state="reset"',
        )
    if not module.automatic_optimization:
        return Obstacle(
            f"{name} steps its optimizers itself (automatic_optimization = False)",
            "Use automatic optimization",
        )
    if len(trainer.optimizers) != 1:
        return Obstacle(
            f"{name} has {len(trainer.optimizers)} optimizers",
            "Use one",
        )
    return _obstacle_in_steps(trainer, trainer.optimizers[0]) or _obstacle_in_module(module)


def _obstacle_in_steps(trainer: L.Trainer, optimizer: Any) -> Obstacle | None:
    """Return what in a trainer's steps prevents batched training, or None."""
    kind = type(optimizer)
    if kind.__name__ not in ELEMENTWISE or not kind.__module__.startswith("torch.optim"):
        supported = ", ".join(ELEMENTWISE)
        return Obstacle(
            f"{kind.__name__} is not known to allow one step of many models",
            f"Use one of {supported}",
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return Obstacle(
            f"{kind.__name__} has hooks around its steps, which would see no client's step",
            "Leave them out",
        )
    accumulates = trainer.accumulate_grad_batches != 1
    for callback in callbacks_of(trainer):
        accumulates |= isinstance(callback, GradientAccumulationScheduler)
    if accumulates:
        return Obstacle(
            "gradients are accumulated over batches",
            "Leave accumulate_grad_batches at 1",
        )
    if trainer.precision not in PRECISIONS:
        return Obstacle(
            f"precision={trainer.precision!r} scales or rounds within a step",
            f"Use one of {', '.join(PRECISIONS)}",
        )
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step":
            name = type(config.scheduler).__name__
            return Obstacle(
                f"{name} steps after every batch of a client",
                "Use interval='epoch' (a round)",
            )
    return None


def _obstacle_in_module(module: L.LightningModule) -> Obstacle | None:
    """Return what in a module prevents batched training, or None."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            return Obstacle(
                f"{name}, an embedding with max_norm, changes its weight in its forward pass",
                "Leave max_norm out",
            )
    for name, parameter in module.named_parameters():
        if any(getattr(parameter, kind, None) for kind in HOOKS_OF_PARAMETERS):
            return Obstacle(
                f"the parameter {name!r} has a hook, which would see no client's gradient",
                "Use gradient_clip_val to clip gradients, or leave it out",
            )
    hooks = [hook for hook in MODULE_HOOKS if is_overridden(hook, module, L.LightningModule)]
    if hooks:
        name = type(module).__name__
        return Obstacle(
            f"{name} defines {', '.join(hooks)}, which would see no client's batches or steps",
            "Leave it out",
        )
    return None


def _obstacle_in_callbacks(trainer: L.Trainer) -> Obstacle | None:
    """Return which callback prevents batched training, or None."""
    for callback in callbacks_of(trainer):
        hooks = [hook for hook in STEP_HOOKS if not _is_harmless(callback, hook)]
        if hooks:
            name = type(callback).__name__
            return Obstacle(
                f"{name} defines {', '.join(hooks)}, which would see no client's batches",
                "Leave it out",
            )
    return None


def _is_harmless(callback: L.Callback, hook: str) -> bool:
    if not is_overridden(hook, callback, L.Callback):
        return True
    if hook in vars(callback):  # an attribute of the instance, as in LambdaCallback
        return False
    # The class from which the callback has its hook.
    for parent in type(callback).__mro__:
        if hook in vars(parent):
            return is_watcher(parent) or parent.__module__.startswith("flsv.")
    return False
