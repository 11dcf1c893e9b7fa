"""Checks whether clients can be trained at once: statically, and by a trial on a few batches."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.memory import is_oom_error
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from flsv._lightning.patches import unlogged
from flsv._lightning.precision import TOLERANCES, share_of_way, tolerance
from flsv.clients.batched import BatchedTraining, GivenBatches, ManyBatches
from flsv.clients.batched_step import State, loss_of, step_arguments
from flsv.errors import ConfigurationError

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


def check_batched(trainer: L.Trainer, algorithm: Any, client_optimizer: str) -> None:
    """Check that a fit is one whose clients can be trained at once.

    Args:
        trainer: with its optimizers set up.
        algorithm: the loop's ``client_algorithm``.
        client_optimizer: likewise.

    Raises:
        ConfigurationError: why not, and what to do.
    """
    why = not_batched(trainer, algorithm, client_optimizer)
    if why:
        raise ConfigurationError(
            f'engine="vmap" trains many clients as one batched model, and {why}, or engine="sequential".'
        )
    BatchedTraining(trainer.lightning_module, trainer.optimizers[0])


def clip_norm(trainer: L.Trainer) -> float | None:
    """The largest norm of a gradient that the trainer allows."""
    value = trainer.gradient_clip_val
    return None if value is None else float(value)


def not_batched(trainer: L.Trainer, algorithm: Any, client_optimizer: str, schedules: bool = False) -> str | None:
    """Why clients of a fit cannot be trained at once, and what to do; None: as far as it can be seen, they can.

    Args:
        trainer: with its optimizers set up.
        algorithm: the loop's ``client_algorithm``.
        client_optimizer: likewise.
        schedules: whether the caller steps the schedulers of each step.
    """
    module, name = trainer.lightning_module, type(trainer.lightning_module).__name__
    if not module.automatic_optimization:
        return f"{name} steps its optimizers itself (automatic_optimization = False). Use automatic optimization"
    if len(trainer.optimizers) != 1:
        return f"{name} has {len(trainer.optimizers)} optimizers. Use one"
    if algorithm is not None:
        return f"client_algorithm={algorithm!r} changes the gradients of one client. Leave it out"
    if client_optimizer != "reset":
        return 'client_optimizer="keep" gives every client the moments that it left. Use client_optimizer="reset"'
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
    hooks = [hook for hook in HOOKS_OF_A_MODULE if is_overridden(hook, module, L.LightningModule)]
    if hooks:
        return f"{name} defines {', '.join(hooks)}, which would see no client's batches or steps. Leave it out"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        hooks = [hook for hook in HOOKS_OF_A_STEP if is_overridden(hook, callback, L.Callback)]
        hooks = [hook for hook in hooks if not getattr(callback, hook).__module__.startswith("flsv.")]
        if hooks:
            return f"{type(callback).__name__} defines {', '.join(hooks)}, which would see no step. Leave it out"
    return None


#: What torch.func says, and what it means.
_WORDS = (
    ("random operation", "it draws random numbers, as dropout does"),
    (".item()", "it reads values off tensors, as .item(), float(...) and `if loss > 1:` do"),
    ("data-dependent control flow", "it reads values off tensors, as .item(), float(...) and `if loss > 1:` do"),
    ("inplace", "it writes into a tensor that it keeps, as metrics do"),
    ("in-place", "it writes into a tensor that it keeps, as metrics do"),
    ("dynamic", "it makes a tensor whose shape depends on values, as x[mask] and nonzero do"),
)
#: What Lightning and torch keep on a module.
_LIGHTNINGS = frozenset({"_current_fx_name", "_trainer", "_fabric", "log", "log_dict", "_parameters", "_modules"})


def try_batched(
    trainer: L.Trainer, batches: ManyBatches, clip_norm: float | None, apart: Collection[str] = ()
) -> set[str]:
    """Train the model that is in a trainer's module on the first, second and last batch of the first of these clients,
    with ``training_step`` and its optimizer one after the other, and as two models at once.

    The module, its optimizer and the random state are left as they were.

    Args:
        trainer: with its optimizers set up.
        batches: of one client or more.
        clip_norm: see :class:`BatchedTraining`.
        apart: names of what is the same at all clients, and not stacked.

    Returns:
        Names of the parameters that have no gradient.

    Raises:
        ConfigurationError: the two differ, or the module cannot be trained so; with the reason.
    """
    module, optimizer = trainer.lightning_module, trainer.optimizers[0]
    steps = sorted({0, min(1, batches.lengths[0] - 1), batches.lengths[0] - 1})
    given = [batches.one(0, step) for step in steps]
    start = {name: tensor.detach().clone() for name, tensor in _own(module)}
    watch = Watch(module)
    losses: list[Tensor] = []
    models: list[State] = []
    gradients: set[frozenset[str]] = set()
    for step, batch in zip(steps, given):
        optimizer.zero_grad()
        with _refusing(module), pure_step(module):
            loss = loss_of(trainer.strategy.training_step(*step_arguments(module, batch, step)))
        loss.backward()
        gradients.add(frozenset(name for name, p in module.named_parameters() if p.grad is None))
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], clip_norm)
        optimizer.step()
        losses.append(loss.detach())
        models.append({name: tensor.detach().clone() for name, tensor in _own(module)})
    optimizer.state = defaultdict(dict)
    optimizer.zero_grad()
    _put(module, start)
    if reason := watch.changed():
        raise _refusal(module, reason)
    if len(gradients) != 1:
        raise _refusal(module, "which parameters have gradients differs from batch to batch")
    unused = set[str]().union(*gradients)
    both = {name: torch.stack([tensor, tensor]) for name, tensor in start.items() if name not in apart}
    training = BatchedTraining(module, optimizer, clip_norm, unused)
    # The batches have gone through it one by one: whatever it raises now, it raises of many.
    with _refusing(module, (Exception,)):
        trained, means = at_once(trainer, training, both, GivenBatches([given, given[:1]]))
    for row, (model, mean) in enumerate(((models[-1], torch.stack(losses).mean()), (models[0], losses[0]))):
        _compare(trainer, "the loss", means[row], mean.to(means), tolerance(trainer))
        way = sum(float((model[name] - tensor).float().square().sum()) for name, tensor in start.items()) ** 0.5
        for name, tensor in trained.items():
            _compare(trainer, name, tensor[row], model[name], TOLERANCES[trainer.precision], way)
    return unused


def at_once(trainer: L.Trainer, training: BatchedTraining, states: State, batches: ManyBatches) -> tuple[State, Tensor]:
    """``training.train`` in a fit: in its precision, with its trainer out of reach.

    Raises:
        ConfigurationError: a batch is another than those that were tried; with the reason.
    """
    with batched_steps(trainer):
        return training.train(states, batches)


@contextmanager
def batched_steps(trainer: L.Trainer) -> Iterator[None]:
    """Within it many models take steps in the fit of one: in its precision, with its trainer out of reach. What
    torch.func cannot do is a refusal."""
    module = trainer.lightning_module
    with _refusing(module), pure_step(module), trainer.precision_plugin.train_step_context():
        yield


@contextmanager
def purely(module: nn.Module) -> Iterator[None]:
    """Within it, whatever is raised is a refusal, and so is it to draw, or to change what the module keeps."""
    watch = Watch(module)
    with _refusing(module, (Exception,)):
        yield
    if reason := watch.changed():
        raise _refusal(module, reason)


@contextmanager
def _refusing(module: nn.Module, errors: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Within it, what torch.func cannot do is a refusal, and so is each of these errors."""
    try:
        yield
    except Exception as error:
        said = str(error) or type(error).__name__
        reason = next((means for words, means in _WORDS if words in said and "vmap" in said), None)
        if said.startswith('engine="vmap" trains') or is_oom_error(error):
            raise
        if reason is None and not isinstance(error, (ConfigurationError, *errors)):
            raise
        if reason is None:
            reason = said.splitlines()[0].rstrip(".")
        raise _refusal(module, reason) from error


class Watch:
    """Whether steps of a module draw random numbers, or change what it keeps, from now on."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._before, self._drawn = module, dict(_kept(module)), _random_state()

    def changed(self) -> str:
        """What they have done; empty: nothing."""
        if self._drawn != _random_state():
            return _WORDS[0][1]
        before, now = self._before, dict(_kept(self._module))
        names = sorted(name for name in before.keys() | now.keys() if not _same(before.get(name), now.get(name)))
        return (
            f"it changes what the module keeps beside parameters and buffers: {', '.join(names[:3])}" if names else ""
        )


class NotBatched(ConfigurationError):
    """A module whose steps cannot be batched; ``reason`` says why."""

    reason = ""


def _refusal(module: nn.Module, reason: str) -> NotBatched:
    error = NotBatched(
        f'engine="vmap" trains many clients as one batched model, and training_step of {type(module).__name__} does '
        f'not allow it: {reason}. Use engine="sequential", or change that.'
    )
    error.reason = reason
    return error


def _compare(
    trainer: L.Trainer, name: str, batched: Tensor, ordinary: Tensor, allowed: float, way: float = 0.0
) -> None:
    """``way``: how far the model has moved; where precision rounds, a share of it may differ."""
    if torch.allclose(batched, ordinary, rtol=allowed, atol=allowed, equal_nan=True):
        return
    if float((batched - ordinary).float().norm()) <= share_of_way(trainer) * way:
        return
    far = (batched - ordinary).abs().max().item()
    raise _refusal(
        trainer.lightning_module,
        f"after at most three batches of the cohort's first client, {name!r} differs by {far:.2g} from what the same "
        f"batches make of it one after the other, where {allowed} is allowed (an optimizer that divides by a "
        "gradient's size makes the rounding of a gradient that ought to be 0 as large as others, as that of a bias "
        "before batch normalisation)",
    )


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


@torch.no_grad()
def _put(module: nn.Module, state: State) -> None:
    for name, tensor in _own(module):
        tensor.copy_(state[name])


def _kept(module: nn.Module) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """What a module and its layers have as attributes, and by what to see that it has changed."""
    for prefix, layer in module.named_modules():
        for name, value in vars(layer).items():
            if name in _LIGHTNINGS:
                continue
            mark: Any = None
            if isinstance(value, Tensor) and not value.is_inference():
                mark = value._version
            elif name == "_buffers" and isinstance(value, dict):
                mark = {key: id(buffer) for key, buffer in value.items()}
            elif isinstance(value, (list, dict, set, tuple)):
                mark = len(value)
            yield f"{prefix}.{name}" if prefix else name, (value, mark)


def _same(before: tuple[Any, Any] | None, now: tuple[Any, Any] | None) -> bool:
    if before is None or now is None:
        return before is now
    if isinstance(now[0], (bool, int, float, str)):
        return bool(type(before[0]) is type(now[0]) and before[0] == now[0])
    return before[0] is now[0] and before[1] == now[1]


def _random_state() -> tuple[Any, ...]:
    legacy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    cuda = [s.numpy().tobytes() for s in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else None
    return random.getstate(), repr(legacy), torch.get_rng_state().numpy().tobytes(), repr(cuda)


#: What a Trainer has for one client that trains in it.
_OF_ONE_CLIENT = frozenset(
    {"callbacks", "fit_loop", "global_step", "is_last_batch", "lr_scheduler_configs", "optimizers", "strategy"}
)


class _ManyClients:
    """A trainer as many clients at once may see it."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name in _OF_ONE_CLIENT:
            raise ConfigurationError(
                f"training_step asks for trainer.{name}, which of clients that train at once is not one."
            )
        return getattr(self._trainer, name)


@contextmanager
def pure_step(module: L.LightningModule) -> Iterator[None]:
    """Within it, what ``training_step`` logs is left out, and asking the trainer for what belongs to one client raises
    a ConfigurationError."""
    own: dict[str, Any] = vars(module)
    trainer = module.trainer
    with unlogged(module):
        own["_trainer"] = _ManyClients(trainer)
        try:
            yield
        finally:
            own["_trainer"] = trainer
