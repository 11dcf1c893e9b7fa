"""Checks whether clients can be trained at once: what Lightning does around their steps, and a trial of the steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils._pytree import tree_map_only

from flsv._lightning.evaluation import TOLERANCES, share_of_way, tolerance
from flsv.clients.kernel import ELEMENTWISE, GivenBatches, RowTraining, is_elementwise
from flsv.clients.row_step import Watch, batched_steps, loss_of, pure_step, refusal, refusing, step_arguments

#: Hooks around a step, of which a batched one has none.
HOOKS_OF_A_STEP = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
#: In which many models can take a step as each would.
PRECISIONS = ("32-true", "64-true", "bf16-mixed")
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


def moves_batches(trainer: L.Trainer) -> bool:
    """Whether the module or the data define what happens to a batch on its way."""
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    parts = (trainer.lightning_module, L.LightningModule), (trainer.datamodule, L.LightningDataModule)  # type: ignore[attr-defined]
    return any(is_overridden(hook, part, base) for hook in hooks for part, base in parts)


def not_batched(trainer: L.Trainer, algorithm: Any, optimizer_state: str, schedules: bool = False) -> str | None:
    """Why clients of a fit cannot be trained at once, and what to do; None: but for a trial, they can.

    Args:
        trainer: with its optimizers set up.
        algorithm: the loop's ``client_algorithm``.
        optimizer_state: likewise.
        schedules: whether the caller steps the schedulers of each step.
    """
    module, name = trainer.lightning_module, type(trainer.lightning_module).__name__
    if not module.automatic_optimization:
        return f"{name} steps its optimizers itself (automatic_optimization = False). Use automatic optimization"
    if len(trainer.optimizers) != 1:
        return f"{name} has {len(trainer.optimizers)} optimizers. Use one"
    if not is_elementwise(trainer.optimizers[0]):
        kind = type(trainer.optimizers[0]).__name__
        return f"{kind} is not known to allow one step of many models. Use one of torch's {', '.join(ELEMENTWISE)}"
    if algorithm is not None:
        return f"client_algorithm={algorithm!r} changes the gradients of one client. Leave it out"
    if optimizer_state != "reset":
        return 'optimizer_state="persist" gives every client the moments that it left. Use optimizer_state="reset"'
    windows = any(isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks)  # type: ignore[attr-defined]
    if trainer.accumulate_grad_batches != 1 or windows:
        return "gradients are accumulated over batches. Leave accumulate_grad_batches at 1"
    if trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm == "value":
        return "gradient_clip_algorithm='value' clips within a step. Clip by norm"
    if trainer.precision not in PRECISIONS:
        return f"precision={trainer.precision!r} scales or rounds within a step. Use one of {', '.join(PRECISIONS)}"
    stepped = [c.scheduler for c in trainer.lr_scheduler_configs if c.interval == "step"]
    if stepped and not schedules:
        return f"{type(stepped[0]).__name__} steps after every batch of a client. Use interval='epoch' (a round)"
    return _unseen(trainer)


def _unseen(trainer: L.Trainer) -> str | None:
    """Hooks that would see nothing."""
    module, name = trainer.lightning_module, type(trainer.lightning_module).__name__
    hooks = [hook for hook in HOOKS_OF_A_MODULE if is_overridden(hook, module, L.LightningModule)]
    if hooks:
        return f"{name} defines {', '.join(hooks)}, which would see no client's batches or steps. Leave it out"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        hooks = [hook for hook in HOOKS_OF_A_STEP if is_overridden(hook, callback, L.Callback)]
        hooks = [hook for hook in hooks if not getattr(callback, hook).__module__.startswith("flsv.")]
        if hooks:
            return f"{type(callback).__name__} defines {', '.join(hooks)}, which would see no step. Leave it out"
    return None


def try_batched(
    trainer: L.Trainer, batches: Sequence[Any], clip_norm: float | None, apart: Collection[str] = ()
) -> set[str]:
    """Train the model that is in a trainer's module on the first, second and last of these batches,
    with ``training_step`` and its optimizer one after the other, and as one of two models at once.

    The module, its optimizer and the random state are left as they were.

    Args:
        trainer: with its optimizers set up.
        batches: of one client.
        clip_norm: see :class:`RowTraining`.
        apart: names of what is the same at all clients, and not stacked.

    Returns:
        Names of the parameters that have no gradient.

    Raises:
        ConfigurationError: the two differ, or the module cannot be trained so; with the reason.
    """
    module = trainer.lightning_module
    last = len(batches) - 1
    given = [tree_map_only(Tensor, torch.clone, batches[step]) for step in sorted({0, min(1, last), last})]
    own = {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    start = {name: tensor.clone() for name, tensor in own.items()}
    watch = Watch(module)
    losses, unused = _one_by_one(trainer, given, clip_norm)
    model = {name: tensor.clone() for name, tensor in own.items()}
    for name, tensor in own.items():
        tensor.copy_(start[name])
    if reason := watch.changed():
        raise refusal(module, reason)
    both = {name: torch.stack([tensor, tensor]) for name, tensor in start.items() if name not in apart}
    training = RowTraining(module, trainer.optimizers[0], clip_norm, unused)
    # The batches have gone through it one by one: whatever it raises now, it raises of many.
    with refusing(module, (Exception,)), batched_steps(trainer):
        trained, means = training.train(both, GivenBatches([given, given]))
    _compare(trainer, "the loss", means[0], torch.stack(losses).mean().to(means), tolerance(trainer))
    way = sum(float((model[name] - tensor).float().square().sum()) for name, tensor in start.items()) ** 0.5
    for name, tensor in trained.items():
        _compare(trainer, name, tensor[0], model[name], TOLERANCES[trainer.precision], way)
    return unused


def _one_by_one(trainer: L.Trainer, given: list[Any], clip_norm: float | None) -> tuple[list[Tensor], set[str]]:
    """Train the module on these batches: losses, and names of the parameters without a gradient."""
    module, optimizer = trainer.lightning_module, trainer.optimizers[0]
    losses: list[Tensor] = []
    without: list[set[str]] = []
    for step, batch in enumerate(given):
        optimizer.zero_grad()
        with refusing(module), pure_step(module):
            loss = loss_of(trainer.strategy.training_step(*step_arguments(module, batch, step)))
        loss.backward()
        without.append({name for name, p in module.named_parameters() if p.grad is None})
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], clip_norm)
        optimizer.step()
        losses.append(loss.detach())
    optimizer.state = defaultdict(dict)
    optimizer.zero_grad()
    if any(each != without[0] for each in without):
        raise refusal(module, "which parameters have gradients differs from batch to batch")
    return losses, without[0]


def _compare(
    trainer: L.Trainer, name: str, batched: Tensor, ordinary: Tensor, allowed: float, way: float = 0.0
) -> None:
    """``way``: how far the model has moved; where precision rounds, a share of it may differ."""
    if torch.allclose(batched, ordinary, rtol=allowed, atol=allowed, equal_nan=True):
        return
    if float((batched - ordinary).float().norm()) <= share_of_way(trainer) * way:
        return
    far = (batched - ordinary).abs().max().item()
    raise refusal(
        trainer.lightning_module,
        f"after at most three batches of the cohort's first client, {name!r} differs by {far:.2g} from what the same "
        f"batches make of it one after the other, where {allowed} is allowed (an optimizer that divides by a "
        "gradient's size makes the rounding of a gradient that ought to be 0 as large as others, as that of a bias "
        "before batch normalization)",
    )
