"""VmapProcess: the engine that trains many clients at once, as one batched model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.memory import is_oom_error
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from flsv._lightning.evaluation import as_module_input
from flsv._lightning.patches import WATCHERS, callbacks_of
from flsv._lightning.several_processes import TrainingCounts, add_counts
from flsv.configuration.federation_config import FederationConfig
from flsv.engines.idle_engine import IdleEngine
from flsv.games.module_copies import named_tensors
from flsv.training.algorithms import ClientAlgorithm, ClientContext
from flsv.training.client_batches import ClientBatches, CohortLoader
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError
from flsv.vmap.dry_run_of_rows import check_shared_are_frozen, compare_gradients, dry_run_of_rows
from flsv.vmap.row_step import State, batched_steps
from flsv.vmap.row_training import RowTraining, clip_function

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


class _PreparedClient(NamedTuple):
    """A client that is prepared for training as one of the batched models."""

    id: int
    context: ClientContext
    state: State
    batches: list[Any]


@checked
class VmapProcess(IdleEngine):
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
        obstacle = not_batched(trainer, self._refused_algorithm(config), config.optimizer_state)
        if obstacle is not None:
            remedy = f"{obstacle.remedy}, or set" if obstacle.remedy else "Set"
            raise ConfigurationError(
                f'engine="vmap" trains many clients as one batched model, and {obstacle.reason}. {remedy} '
                'engine="sequential".'
            )
        super().__init__(*options)
        is_on_gpu = self._module.device.type == "cuda"
        self._clients_at_once = chunk or (CLIENTS_ON_GPU if is_on_gpu else CLIENTS_ON_CPU)
        self._current_client: int | None = None
        self._has_dry_run = False

    @staticmethod
    def _refused_algorithm(config: FederationConfig) -> ClientAlgorithm | None:
        """Return a federation's client algorithm if rows cannot train by it."""
        return config.client_algorithm

    @property
    def client(self) -> int | None:
        """Return the client whose training begins or ends now, None while many train."""
        return self._current_client

    @property
    def place(self) -> str:
        return f"{len(self._client_batches)} at once"

    def _prepare(self) -> None:
        # These entries are the same at all clients, so they are not stacked, and the module's own values are used.
        self._shared_names = {*self.space.constant_names, *self.space.non_finite_names}

    def _try_rows(self) -> set[str]:
        """Raise an error unless clients can be trained as rows in this round, after its hooks. Return the names of
        parameters without a gradient.
        """
        check_shared_are_frozen(self.trainer, self._shared_names)
        arguments = self.trainer, self.space, self.state.seed, self._shared_names
        if self._has_dry_run:
            return compare_gradients(*arguments)
        self._has_dry_run = True
        return dry_run_of_rows(*arguments).unused_names

    def _batches(self) -> CohortLoader:
        return self._load(self.state.cohort)

    def _train(self, batches: Any) -> None:
        self._remaining_batches = iter(batches)
        # The tensors of the module that each batched model has for itself.
        self._stacked_tensors = {
            name: tensor.detach()
            for name, tensor in named_tensors(self._module).items()
            if name not in self._shared_names
        }
        # The round's hooks may have frozen parameters, or let others join the loss.
        self._training = RowTraining(
            self._module,
            self.trainer.optimizers[0],
            clip_function(self.trainer),
            unused=self._try_rows(),
        )
        for position in range(0, len(self._client_batches), self._clients_at_once):
            self._train_part(self._client_batches[position : position + self._clients_at_once])
        num_steps = sum(client_batches.num_batches for client_batches in self._client_batches)
        add_counts(self.trainer, TrainingCounts(steps=num_steps))
        batches.warn_of_left_out(self._clients_with_left_out)

    def _train_part(self, batches_of_clients: Sequence[ClientBatches]) -> None:
        """Train some of the cohort's clients at once."""
        clients = [self._begin_and_suspend(client_batches) for client_batches in batches_of_clients]
        trained_states, losses = self._train_at_once(clients)
        for row, client in enumerate(clients):
            model = {name: tensor[row] for name, tensor in trained_states.items()}
            self._end_client(client, model, losses[row])

    def _begin_and_suspend(self, client_batches: ClientBatches) -> _PreparedClient:
        """Begin a client's training outside of the Trainer's loop, and return its model and batches."""
        self._current_client = client_batches.client
        self._begin(client_batches)
        # As in a Trainer, the first batch is transferred before the client's random numbers begin, the others after it.
        batches = [self._next_batch()]
        self.local_training.client_steps.seed(self._instructions[client_batches.client])
        for _ in range(client_batches.num_batches - 1):
            batches.append(self._next_batch())
        # The module now holds this client's initial model.
        state = {name: tensor.clone() for name, tensor in self._stacked_tensors.items()}
        context = self.local_training.suspend()
        self._current_client = None
        return _PreparedClient(client_batches.client, context, state, batches)

    def _next_batch(self) -> Any:
        return as_module_input(self.trainer, next(self._remaining_batches))

    def _train_at_once(self, clients: list[_PreparedClient]) -> tuple[State, Tensor]:
        """Train k clients as one batched model. Return the trained tensors by name, ``[k, ...]``, and the mean losses
        ``[k]``.
        """
        stacked_states = {
            name: torch.stack([client.state[name] for client in clients])
            for name in clients[0].state
        }
        batches = [client.batches for client in clients]
        try:
            with batched_steps(self.trainer):
                return self._training.train(stacked_states, batches)
        except RuntimeError as error:
            if is_oom_error(error):
                half = (len(clients) + 1) // 2
                error.add_note(
                    f"flsv: {len(clients)} clients were trained at once. For half as many set "
                    f"engine=partial(VmapProcess, chunk={half})."
                )
            raise

    def _end_client(
        self,
        client: _PreparedClient,
        model: State,
        mean_loss: Tensor,
    ) -> None:
        """Let a client's training end with its trained ``model`` in the module, as if the Trainer had trained it."""
        self._current_client = client.id
        trained_tensors = [model[name] for name in self._stacked_tensors]
        torch._foreach_copy_(list(self._stacked_tensors.values()), trained_tensors)
        self.local_training.resume(client.context, mean_loss)
        self._end()
        self._current_client = None


class Obstacle(NamedTuple):
    """Why models cannot be trained batched, and a remedy other than another engine, if there is one."""

    reason: str
    remedy: str = ""


def not_batched(trainer: L.Trainer, algorithm: Any, optimizer_state: str) -> Obstacle | None:
    """Return why a fit's models cannot be trained batched. None: no reason is known before a dry run."""
    obstacle = not_batched_without_callbacks(trainer, algorithm, optimizer_state)
    return obstacle or _obstacle_in_callbacks(trainer)


def not_batched_without_callbacks(
    trainer: L.Trainer, algorithm: Any, optimizer_state: str
) -> Obstacle | None:
    """Return what :func:`not_batched` does for a fit whose callbacks take no part in training."""
    module = trainer.lightning_module
    name = type(module).__name__
    if algorithm is not None:
        # An aggregator may need it, so it cannot always be left out.
        return Obstacle(f"client_algorithm={algorithm!r} changes the training of one client")
    if optimizer_state != "reset":
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
            package, _, _ = parent.__module__.partition(".")
            is_own = package == "flsv"
            is_lightnings_watcher = package == "lightning" and issubclass(parent, WATCHERS)
            return is_own or is_lightnings_watcher
    return False
