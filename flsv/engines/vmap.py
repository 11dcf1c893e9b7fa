"""VmapProcess: the engine that trains many clients at once, as one batched model, and the check that it can."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, contextmanager
from copy import deepcopy
from itertools import islice
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
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
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_warn
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from flsv._lightning.evaluation import as_given, stand_in
from flsv._lightning.patches import callbacks_of
from flsv._lightning.rounding import rounding_of
from flsv._lightning.several_processes import Counted, add
from flsv.core.parameter_space import ParameterSpace
from flsv.engines.idle_engine import IdleEngine
from flsv.games.lent_module import lent
from flsv.training.algorithms import ClientContext
from flsv.training.batched import (
    RowTraining,
    State,
    batched_steps,
    clip_function as clipping,
    convert_errors as refusing,
    deny_client_attributes as pure_step,
    not_batched_error as refusal,
)
from flsv.training.client_batches import ClientBatches, CohortLoader
from flsv.training.training_step import step_arguments, training_loss
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import global_rngs, isolated_rngs

#: Number of clients that are trained at once on a CPU, and on a GPU.
ON_CPU, ON_GPU = 50, 256
#: Number of batches in a trial.
BATCHES = 3
#: Classes of torch's optimizers that step entry by entry, so that a step of stacked parameters is a step of every row.
ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
#: Names of the hooks around a batch or an optimizer step that both modules and callbacks have, and that modules have.
HOOKS = (
    *(
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
    ),
    "on_before_optimizer_step",
)
HOOKS_OF_A_MODULE = (
    *HOOKS,
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


class _Begun(NamedTuple):
    """A client that is prepared for training as one of the batched models."""

    context: ClientContext
    state: State
    given: list[Any]


@checked
class VmapProcess(IdleEngine):
    """The engine ``"vmap"``, which trains many small clients at once.

    With ``FederatedLoop(engine="vmap")`` clients train under ``torch.func.vmap``. The engine works for modules with
    automatic optimization whose ``training_step`` is a function of the module's parameters, its buffers and the batch,
    with one of torch's elementwise optimizers. Other modules are refused before training. Before its first round, every
    run trains a few batches of a client both ordinarily and batched, and raises an error unless the results agree to
    1e-5. A round equals a round of ``engine="sequential"`` up to rounding, not bitwise. Runs of this engine resume
    bitwise identically if the number of clients at once stays the same.

    Values that ``training_step`` logs are dropped. Callbacks with hooks around a batch are refused, except Lightning's
    own callbacks that are known to change nothing. Their hooks are called for one idle batch per round.

    Beside the models of the whole cohort, memory holds the model, gradient, optimizer state, training batches and
    activations of every client in the chunk that trains at once.

    Args:
        options: the arguments of :class:`flsv.engines.engine.Engine`.
        chunk: the number of clients that are trained at once. None means 50 on a CPU, 256 on a GPU. It is halved when
            memory runs out.

    Raises:
        ConfigurationError: the clients cannot be trained at once. The message gives the reason.

    Example:
        >>> from functools import partial
        >>> from flsv import FederatedLoop
        >>> loop = FederatedLoop(engine=partial(VmapProcess, chunk=20))
    """

    def __init__(self, *options: Any, chunk: Count | None = None) -> None:
        trainer, config = options[0], options[4]
        if why := not_batched(trainer, config.client_algorithm, config.optimizer_state):
            raise ConfigurationError(
                f'engine="vmap" trains many clients as one batched model, and {why}, or engine="sequential".'
            )
        super().__init__(*options)
        self._chunk = chunk or (ON_GPU if self._module.device.type == "cuda" else ON_CPU)
        self._now: int | None = None

    @property
    def client(self) -> int | None:
        """Return the client whose training begins or ends now, None while many train."""
        return self._now

    @property
    def place(self) -> str:
        return f"{len(self._visits)} at once"

    def _prepare(self) -> None:
        # These entries are the same at all clients, so they are not stacked, and the module's own values are used.
        self._unstacked = {*self.space.constant_names, *self.space.non_finite_names}
        self._unused = try_rows(self.trainer, self.space, self._state.seed, self._unstacked)

    def _batches(self) -> CohortLoader:
        return self._load(self._state.cohort)

    def _train(self, batches: Any) -> None:
        self._given = iter(batches)
        named = (*self._module.named_parameters(), *self._module.named_buffers())
        self._own = {name: tensor.detach() for name, tensor in named if name not in self._unstacked}
        # Parameters that a callback has frozen at the round's start have no gradient from here on.
        clip = clipping(self.trainer)
        self._training = RowTraining(self._module, self.trainer.optimizers[0], clip, self._unused)
        while not self.complete:
            stop = min(self._visited + self._chunk, len(self._visits))
            self._train_rows(
                [self._begin_outside(visit) for visit in self._visits[self._visited : stop]]
            )
        add(self.trainer, Counted(steps=sum(visit.batches for visit in self._visits)))

    def _begin_outside(self, visit: ClientBatches) -> _Begun:
        """Begin a client's training outside of the Trainer's loop, and return its model and batches."""
        self._now = visit.client
        # As in a Trainer, the first batch is transferred before the client begins and the others after it: augmentation
        # then draws the same random numbers.
        given = [as_given(self.trainer, next(self._given))]
        self._begin(visit)
        given += [as_given(self.trainer, next(self._given)) for _ in range(visit.batches - 1)]
        state = {name: tensor.clone() for name, tensor in self._own.items()}
        context = self.local_training.suspend()
        self._now = None
        return _Begun(context, state, given)

    def _train_rows(self, begun: list[_Begun]) -> None:
        """Train a chunk of clients as one batched model, in halves if memory runs out."""
        found: tuple[State, Tensor] | None = None
        try:
            states = {
                name: torch.stack([each.state[name] for each in begun]) for name in begun[0].state
            }
            with batched_steps(self.trainer):
                found = self._training.train(states, [each.given for each in begun])
        except RuntimeError as error:
            if not is_oom_error(error) or len(begun) == 1:
                raise
        if found is None:  # out of the except block: the error's traceback holds the tensors
            self._chunk = half = (len(begun) + 1) // 2
            garbage_collection_cuda()
            rank_zero_warn(
                f"flsv: the training of {len(begun)} clients at once ran out of memory: from here on {half} train at "
                f"once. To begin with so many, set engine=partial(VmapProcess, chunk={half})."
            )
            self._train_rows(begun[:half])
            self._train_rows(begun[half:])
            return
        trained, losses = found
        for row, each in enumerate(begun):
            self._now = self._visits[self._visited].client
            torch._foreach_copy_(
                list(self._own.values()), [trained[name][row] for name in self._own]
            )
            self.local_training.resume(each.context, losses[row])
            self._end()
        self._now = None


def not_batched(trainer: L.Trainer, algorithm: Any, optimizer_state: str) -> str | None:
    """Return why a fit's models cannot be trained batched, with a remedy. None: no reason is known before a trial."""
    module, name = trainer.lightning_module, type(trainer.lightning_module).__name__
    if algorithm is not None:
        return f"client_algorithm={algorithm!r} changes the gradients of one client. Leave it out"
    if optimizer_state != "reset":
        return 'optimizer_state="persist" gives every client the moments that it left. Use optimizer_state="reset"'
    if not module.automatic_optimization:
        return f"{name} steps its optimizers itself (automatic_optimization = False). Use automatic optimization"
    if len(trainer.optimizers) != 1:
        return f"{name} has {len(trainer.optimizers)} optimizers. Use one"
    optimizer: Any = trainer.optimizers[0]
    kind = type(optimizer)
    if kind.__name__ not in ELEMENTWISE or not kind.__module__.startswith("torch.optim"):
        return f"{kind.__name__} is not known to allow one step of many models. Use one of {', '.join(ELEMENTWISE)}"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{kind.__name__} has hooks around its steps, which would see no client's step. Leave them out"
    windows = any(isinstance(c, GradientAccumulationScheduler) for c in callbacks_of(trainer))
    if trainer.accumulate_grad_batches != 1 or windows:
        return "gradients are accumulated over batches. Leave accumulate_grad_batches at 1"
    if trainer.precision not in PRECISIONS:
        return f"precision={trainer.precision!r} scales or rounds within a step. Use one of {', '.join(PRECISIONS)}"
    if stepped := [c.scheduler for c in trainer.lr_scheduler_configs if c.interval == "step"]:
        return f"{type(stepped[0]).__name__} steps after every batch of a client. Use interval='epoch' (a round)"
    return _not_by_hooks(module) or _not_by_callbacks(trainer)


def _not_by_hooks(module: L.LightningModule) -> str | None:
    """Return why a module's hooks or embeddings prevent batched training, with a remedy, or None."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            return f"{name}, an embedding with max_norm, changes its weight in its forward pass. Leave max_norm out"
    if hooks := [
        hook for hook in HOOKS_OF_A_MODULE if is_overridden(hook, module, L.LightningModule)
    ]:
        name = type(module).__name__
        return f"{name} defines {', '.join(hooks)}, which would see no client's batches or steps. Leave it out"
    return None


def _not_by_callbacks(trainer: L.Trainer) -> str | None:
    """Return which callback prevents batched training, with a remedy, or None."""
    for callback in callbacks_of(trainer):
        if hooks := [hook for hook in HOOKS if not _harmless(callback, hook)]:
            name = type(callback).__name__
            return f"{name} defines {', '.join(hooks)}, which would see no client's batches. Leave it out"
    return None


def _harmless(callback: L.Callback, hook: str) -> bool:
    if not is_overridden(hook, callback, L.Callback):
        return True
    owner = next((kind for kind in type(callback).__mro__ if hook in vars(kind)), None)
    if owner is None or hook in vars(
        callback
    ):  # the hook is an attribute of the instance, as in LambdaCallback
        return False
    known = issubclass(owner, OF_THE_RUN) and owner.__module__.startswith("lightning.")
    return known or owner.__module__.startswith("flsv.")


def try_rows(
    trainer: L.Trainer,
    space: ParameterSpace,
    seed: int,
    unstacked: Collection[str] = (),
) -> set[str]:
    """Raise NotBatched unless a few batches give equal results batched and ordinarily. Return the names of parameters
    without a gradient. ``unstacked`` names tensors that all batched models share."""
    module = trainer.lightning_module
    with isolated_rngs(seed, "trial of rows"), lent(module, space):
        own = stand_in(trainer, module)
        own.strategy.optimizers = [
            deepcopy(trainer.optimizers[0], {id(each): each for each in module.parameters()})
        ]
        optimizer = own.optimizers[0]
        for (
            group
        ) in optimizer.param_groups:  # a warm-up may begin at 0, which would hide all differences
            group["lr"] = group.get("initial_lr") or group["lr"]
        given = _first_batches(trainer, own, seed)
        start = _values(module)
        with isolated_rngs(seed, "steps"), unchanged(module):
            losses, unused = _one_by_one(own, given)
        model = _values(module)
        with torch.no_grad():
            for name, tensor in _named(module):
                tensor.copy_(start[name])
        rounding = rounding_of(trainer)
        # The second row starts a rounding error away: where rounding is coarse, it shows the effect of rounding.
        coarse = {
            name
            for name, tensor in start.items()
            if rounding.steps > 0 and tensor.is_floating_point()
        }
        nudged = {
            n: rounding.nudged(t.flatten()).view_as(t) if n in coarse else t
            for n, t in start.items()
        }
        both = {
            name: torch.stack([tensor, nudged[name]])
            for name, tensor in start.items()
            if name not in unstacked
        }
        training = RowTraining(module, optimizer, clipping(trainer), unused)
        # The same batches have been trained on as usual: an error from here on comes from training rows.
        with (
            isolated_rngs(seed, "steps"),
            unchanged(module),
            refusing(module, (Exception,)),
            batched_steps(own),
        ):
            rows, means = training.train(both, [given, given])
    _compare(module, "the loss", means[0], torch.stack(losses).mean().to(means), rounding.number)
    rounded = rounding.steps * _norm(model[name] - tensor for name, tensor in start.items())
    caused = _norm(
        rounding.caused(start[name].flatten(), *rows[name].flatten(1))
        for name in coarse & rows.keys()
    )
    for name, tensor in rows.items():
        _compare(module, name, tensor[0], model[name], rounding.number, max(rounded, caused))
    return unused


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _values(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in _named(module)}


def _norm(tensors: Iterable[Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5


def _first_batches(trainer: L.Trainer, own: L.Trainer, seed: int) -> list[Any]:
    data: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning does not declare it
    client = int((data.num_samples > 0).nonzero()[0])
    # A generator, which Iterable.__iter__ need not be.
    with closing(iter(CohortLoader(data, [client], seed=seed, round_index=0))) as loader:  # type: ignore[type-var]
        return [
            tree_map_only(Tensor, torch.clone, as_given(own, batch))
            for batch in islice(loader, BATCHES)
        ]


def _one_by_one(trainer: L.Trainer, batches: list[Any]) -> tuple[list[Tensor], set[str]]:
    module, optimizer = trainer.lightning_module, trainer.optimizers[0]
    losses: list[Tensor] = []
    without: list[set[str]] = []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        with refusing(module), pure_step(module):
            loss = training_loss(
                trainer.strategy.training_step(*step_arguments(module, batch, step))
            )
        loss.backward()
        without.append({name for name, p in module.named_parameters() if p.grad is None})
        limit, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        if limit is not None:
            trainer.precision_plugin.clip_gradients(
                optimizer, limit, algorithm or GradClipAlgorithmType.NORM
            )
        optimizer.step()
        losses.append(loss.detach())
    optimizer.zero_grad()
    if any(each != without[0] for each in without):
        raise refusal(module, "which parameters have gradients differs from batch to batch")
    return losses, without[0]


def _compare(
    module: nn.Module,
    name: str,
    batched: Tensor,
    ordinary: Tensor,
    allowed: float,
    rounded: float = 0.0,
) -> None:
    """Raise NotBatched if two results called ``name`` differ by more than the tolerance ``allowed``, and their distance
    exceeds ``rounded``."""
    if torch.allclose(batched, ordinary, rtol=allowed, atol=allowed, equal_nan=True):
        return
    if float((batched - ordinary).float().norm()) <= rounded:
        return
    far = (batched - ordinary).abs().max().item()
    raise refusal(
        module,
        f"after at most {BATCHES} batches of one client, {name!r} differs by {far:.2g} from what the same "
        f"batches make of it one after the other, where {allowed} is allowed (an optimizer that divides by a "
        "gradient's size makes the rounding of a gradient that ought to be 0 as large as others, as that of a bias "
        "before batch normalization)",
    )


#: Attributes of a module that Lightning and torch set themselves.
_LIGHTNINGS = frozenset(
    {"_current_fx_name", "_trainer", "_fabric", "log", "log_dict", "_parameters", "_modules"}
)
_LIGHTNINGS |= {"_metric_attributes"}


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Raise NotBatched if the code within changes the module's attributes, or draws random numbers."""
    before, drawn = dict(_attributes(module)), tree_leaves(global_rngs())
    yield
    if not all(map(np.array_equal, drawn, tree_leaves(global_rngs()))):
        raise refusal(module, "it draws random numbers, as dropout or an augmentation does")
    now = dict(_attributes(module))
    if names := sorted(
        name for name in before.keys() | now.keys() if before.get(name) != now.get(name)
    ):
        text = ", ".join(names[:3])
        raise refusal(
            module, f"it changes what the module keeps beside parameters and buffers: {text}"
        )


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield ``(name, fingerprint)`` of each attribute of a module's layers. A change alters the fingerprint."""
    for prefix, layer in module.named_modules():
        for name, value in vars(layer).items():
            place = f"{prefix}.{name}" if prefix else name
            if name == "_buffers":
                yield place, {key: id(buffer) for key, buffer in value.items()}
            elif isinstance(value, Tensor):
                yield place, (id(value), None if value.is_inference() else value._version)
            elif name not in _LIGHTNINGS:
                held = isinstance(value, dict | list | set | deque)
                plain = isinstance(value, bool | int | float | str | None)
                yield (
                    place,
                    (
                        None if plain else id(value),
                        value if plain else len(value) if held else None,
                    ),
                )
