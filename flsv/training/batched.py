"""RowTraining: trains many models of one structure at once, batched as stacked tensors, for ``engine="vmap"``.

A step is ``torch.func.vmap`` of ``torch.func.grad_and_value`` of ``training_step``, traced anew, so that it sees the
module's present attributes and the epoch. For an elementwise optimizer a step on the stacked parameters is the same as
one optimizer per row. The results equal those of training one model after the other up to rounding, since batched
kernels sum in another order.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torchmetrics import Metric, MetricCollection

from flsv._lightning.patches import PatchedAttributes, unlogged
from flsv.training.training_step import step_arguments, training_loss
from flsv.utilities.errors import ConfigurationError

State = dict[str, Tensor]


class RowTraining:
    """Training of m models of one structure at once, batched as stacked tensors ``[m, ...]``.

    Example:
        >>> class Line(nn.Linear):
        ...     def training_step(self, batch, batch_idx):
        ...         x, y = batch
        ...         return nn.functional.mse_loss(self(x), y)
        >>> line = Line(1, 1, bias=False)
        >>> many = RowTraining(line, torch.optim.SGD(line.parameters(), lr=0.5))
        >>> x = torch.ones(2, 1)
        >>> batches = [[(x, x)], [(x, 3 * x), (x, 3 * x)]]
        >>> models, losses = many.train({"weight": torch.zeros(2, 1, 1)}, batches)
        >>> models["weight"].flatten().tolist(), losses.tolist()
        ([1.0, 3.0], [1.0, 4.5])
    """

    def __init__(
        self,
        # Its training_step runs under torch.func, so it must not read a tensor's values (.item()), and may change
        # nothing in the module but buffers.
        module: nn.Module,
        # Elementwise. Its class and options are used, and its state is not changed.
        optimizer: Optimizer,
        clip: Callable[[State], None] | None = None,
        # Names of parameters that are not trained, such as those without an entry in train's states.
        frozen: Collection[str] = (),
    ) -> None:
        self._optimizer, self._clip = optimizer, clip
        names = {parameter: name for name, parameter in module.named_parameters()}
        trained = {p for p in names if p.requires_grad and names[p] not in frozen}
        self._groups = [
            [names[p] for p in group["params"] if p in trained] for group in optimizer.param_groups
        ]
        self._trained = {name for group in self._groups for name in group}
        self._step = RowStep(module, sorted(self._trained))

    def train(self, states: State, batches: Sequence[Sequence[Any]]) -> tuple[State, Tensor]:
        """Train m models, each on its own list of batches. Return their states and mean losses ``[m]``."""
        # For a name without an entry in states all rows use the module's own, which steps must not change.
        first = next(iter(states.values()))
        # Rows with more batches come first, so that the rows that still train are always the first ones.
        order = sorted(range(len(first)), key=lambda i: -len(batches[i]))
        lengths = [len(batches[i]) for i in order]
        index = None if order == sorted(order) else torch.tensor(order, device=first.device)
        stacked = states if index is None else _rows(states, index)
        losses = torch.zeros(len(order), device=first.device)
        optimizer = StackedOptimizer(self._optimizer, self._groups, stacked)
        for step in range(lengths[0]):
            active = sum(length > step for length in lengths)
            now = {name: tensor[:active] for name, tensor in stacked.items()}
            gradients = self._derive(
                now, [batches[i][step] for i in order[:active]], losses[:active]
            )
            if self._clip is not None:
                self._clip(gradients)
            optimizer.step(active, gradients)
        losses /= torch.tensor(lengths, device=losses.device)
        if index is None:
            return stacked, losses
        back = index.argsort()
        return _rows(stacked, back), losses[back]

    def _derive(self, now: State, batches: Sequence[Any], losses: Tensor) -> State:
        """Return the gradients of stacked models, each on one batch. Add to ``losses`` and update buffers in place."""
        gradients: State = {}
        for places, batch in stacked_batches(batches):
            if len(places) == len(losses):
                gradients, loss = self._step(now, batch)
                losses += loss
                return gradients
            index = torch.tensor(places, device=losses.device)
            part = _rows(now, index)
            slopes, loss = self._step(part, batch)
            losses.index_add_(0, index, loss.to(losses))
            gradients = gradients or {name: torch.empty_like(now[name]) for name in self._trained}
            for name, gradient in slopes.items():
                gradients[name][index] = gradient
            for name in now.keys() - self._trained:
                now[name][index] = part[name]
        return gradients


def _rows(states: State, index: Tensor) -> State:
    """Return copies of the models at the indices ``index``."""
    return {name: tensor.index_select(0, index) for name, tensor in states.items()}


def stacked_batches(batches: Sequence[Any]) -> Iterator[tuple[list[int], Any]]:
    """Stack batches of the same size, and yield the stacks with their positions.

    Example:
        >>> many = stacked_batches([torch.zeros(4, 2), torch.ones(4, 2), torch.ones(3, 2)])
        >>> [(places, list(batch.shape)) for places, batch in many]
        [([0, 1], [2, 4, 2]), ([2], [1, 3, 2])]
    """
    flat = [tree_flatten(batch) for batch in batches]
    for leaf in (leaf for leaves, _ in flat for leaf in leaves):
        if not isinstance(leaf, Tensor):
            raise ConfigurationError(
                f'engine="vmap" stacks the clients\' batches, which have to hold tensors only, and one holds a '
                f'{type(leaf).__name__}. Let the data set give tensors, or train with engine="sequential".'
            )
    shapes = [tuple(leaf.shape for leaf in leaves) for leaves, _ in flat]
    for shape in dict.fromkeys(shapes):
        places = [place for place, each in enumerate(shapes) if each == shape]
        leaves = [torch.stack(parts) for parts in zip(*(flat[place][0] for place in places))]
        yield places, tree_unflatten(leaves, flat[places[0]][1])


class StackedOptimizer:
    """Optimizer of m stacked models, which are sorted by falling number of steps."""

    def __init__(self, like: Optimizer, groups: list[list[str]], stacked: State) -> None:
        # groups: the names of the parameters to train, for each parameter group of like
        self._stacked, self._groups = stacked, groups
        self._active = len(next(iter(stacked.values())))
        self._views = self._of(self._active)
        self._optimizer = copy.copy(like)
        self._optimizer.state = defaultdict(dict)
        self._optimizer.param_groups = [
            {**group, "params": [self._views[name] for name in names]}
            for group, names in zip(like.param_groups, groups)
        ]

    @torch.no_grad()
    def step(self, active: int, gradients: State) -> None:
        """Take a step of the first ``active`` models. The others take no further steps."""
        if active != self._active:
            self._narrow(active)
        for name, view in self._views.items():
            view.grad = gradients[name]
        self._optimizer.step()

    def _of(self, active: int) -> State:
        """Return views of the trained parameters of the first ``active`` models, by name."""
        return {name: self._stacked[name][:active] for names in self._groups for name in names}

    def _narrow(self, active: int) -> None:
        """Restrict the optimizer and its state to the first ``active`` models."""
        views, states = self._of(active), self._optimizer.state
        for group, names in zip(self._optimizer.param_groups, self._groups):
            group["params"] = [views[name] for name in names]
        for name, before in self._views.items():
            states[views[name]] = {
                key: value[:active]
                if isinstance(value, Tensor) and value.shape == before.shape
                else value
                for key, value in states.pop(before, {}).items()
            }
        self._views, self._active = views, active


def clipping(trainer: L.Trainer) -> Callable[[State], None] | None:
    """Return a function that clips each model's gradients ``[m, ...]`` in place, None without clipping."""
    limit: Any = trainer.gradient_clip_val
    if limit is None:
        return None
    return partial(
        _clip_values if trainer.gradient_clip_algorithm == "value" else clip, limit=limit
    )


def clip(gradients: State, limit: float) -> None:
    """Clip the norm of every model's gradients ``[m, ...]``, in place."""
    squares = torch.stack(
        [g.flatten(1).norm(dim=1) if g.ndim > 1 else g.abs() for g in gradients.values()]
    )
    factors = (limit / (squares.norm(dim=0) + 1e-6)).clamp(max=1.0)
    for gradient in gradients.values():
        gradient.mul_(factors.view(-1, *[1] * (gradient.ndim - 1)))


def _clip_values(gradients: State, limit: float) -> None:
    for gradient in gradients.values():
        gradient.clamp_(-limit, limit)


class BatchIndex:
    """Placeholder for ``batch_idx`` that raises an error when read. Clients are at different batches."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigurationError(
            "training_step looks at batch_idx, and clients that train at once are at different batches of their epochs."
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = __float__ = (
        __index__
    ) = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = (
        __truediv__
    ) = _refuse
    __hash__ = __str__ = __format__ = _refuse


# If only linear layers are trained, as in softmax regressions and MLPs, vmap computes the losses only, and autograd
# differentiates their sum, since no model's loss depends on another model. This saves the cost of a transformed
# backward pass per operation, which dominates for small models. Weights W and inputs x then multiply as W x^T: for few
# outputs this batched product takes little more than half the time of x W^T. Convolutions have a slower batched
# backward pass in autograd, and recurrent layers none.
class RowStep:
    """Callable that computes losses of m stacked models, and gradients with respect to ``trained`` parameters.

    Example:
        >>> class Line(nn.Linear):
        ...     def training_step(self, batch, batch_idx):
        ...         return self(batch).sum()
        >>> step = RowStep(Line(2, 1), ["weight"])
        >>> states = {"weight": torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), "bias": torch.zeros(2, 1)}
        >>> gradients, losses = step(states, torch.tensor([[[1.0, 0.0]], [[1.0, 1.0]]]))
        >>> gradients["weight"].tolist(), losses.tolist()
        ([[[1.0, 0.0]], [[1.0, 1.0]]], [1.0, 7.0])
    """

    def __init__(self, module: nn.Module, trained: Collection[str]) -> None:
        self._module, self._trained = module, list(trained)
        self._index = step_arguments(module, None, BatchIndex())[1:]
        self._stepped, self._places = _Stepped(module), _places(module)

    @cached_property
    def _linear(self) -> bool:
        """Return whether all trained parameters are of linear layers and autocast is off."""
        linear = {name for name, layer in self._module.named_modules() if type(layer) is nn.Linear}
        devices = {parameter.device.type for parameter in self._module.parameters()}
        # Autocast would round a product of stacked weights differently from a product of one layer's weights.
        rounded = any(map(torch.is_autocast_enabled, devices))
        return not rounded and all(name.rpartition(".")[0] in linear for name in self._trained)

    @cached_property
    def _of_many(self) -> Any:
        """Return :meth:`_of_one` batched over models by ``vmap``, with gradients unless :attr:`_linear`."""
        of_one: Any = self._of_one if self._linear else grad_and_value(self._of_one, has_aux=True)
        return vmap(of_one, 0, randomness="error")

    def __call__(self, states: State, batch: Any) -> tuple[State, Tensor]:
        """Return gradients ``[m, ...]`` and losses ``[m]`` on batches ``[m, B, ...]``, and update buffers in place."""
        rest = {name: tensor for name, tensor in states.items() if name not in self._trained}
        trained = [states[name] for name in self._trained]
        if self._linear:
            trained = [tensor.detach().requires_grad_() for tensor in trained]
            with torch.enable_grad():
                losses, after = self._of_many(trained, rest, batch)
                # Zeros for parameters that this batch has not used, as for one model after `zero_grad`.
                slopes = torch.autograd.grad(
                    losses.sum(), trained, allow_unused=True, materialize_grads=True
                )
        else:
            slopes, (losses, after) = self._of_many(trained, rest, batch)
        for name, tensor in after.items():
            states[name].copy_(tensor.detach())
        return dict(zip(self._trained, slopes)), losses.detach()

    def _of_one(self, trained: list[Tensor], rest: State, batch: Any) -> tuple[Tensor, State]:
        """Return the loss of one model on one batch, and its updated buffers."""
        # Tensors that are changed in place within a torch.func transformation must be made within it.
        given = dict(zip(self._trained, trained)) | {
            name: tensor.clone() for name, tensor in rest.items()
        }
        held = {place: tensor for name, tensor in given.items() for place in self._places[name]}
        with _WeightFirst(trained) if self._linear else nullcontext():
            # Tied weights are handled by `_places`: torch would tie a layer with two names to itself, and leave rows in
            # the module.
            outputs = functional_call(self._stepped, held, (batch, *self._index), tie_weights=False)
        # `held` has the new tensor where a step replaces a buffer.
        return training_loss(outputs), {name: held[self._places[name][0]] for name in rest}


class _Stepped(nn.Module):
    """A module whose ``forward`` is the ``training_step`` of another module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module: Any = module

    def forward(self, *arguments: Any) -> Any:
        return self.module.training_step(*arguments)


def _places(module: nn.Module) -> dict[str, list[str]]:
    """Return ``{name in module: names in _Stepped(module)}``, several names for tied weights."""
    names = {
        id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    places = defaultdict(list)
    for prefix, layer in module.named_modules(prefix="module"):
        for own, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            if tensor is not None:
                places[names[id(tensor)]].append(f"{prefix}.{own}")
    return places


class _WeightFirst(TorchFunctionMode):
    """Mode in which linear layers compute (W x^T)^T + b. This is faster for stacked W."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self._weights = set(map(id, weights))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func is nn.functional.linear
            and not kwargs
            and id(args[1]) in self._weights
            and args[0].ndim > 1
        ):
            x, weight, *bias = args
            products = weight.matmul(x.flatten(0, -2).mT).mT.unflatten(0, x.shape[:-1])
            return products + bias[0] if bias and bias[0] is not None else products
        return func(*args, **(kwargs or {}))


@contextmanager
def batched_steps(trainer: L.Trainer) -> Iterator[None]:
    """Allow steps of stacked models within this context, in the trainer's precision, without logs."""
    module = trainer.lightning_module
    with (
        refusing(module),
        pure_step(module),
        _uncounted(module),
        trainer.precision_plugin.train_step_context(),
    ):
        yield


@contextmanager
def refusing(module: nn.Module, errors: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Convert errors of torch.func, ConfigurationErrors and ``errors`` to NotBatched, except out-of-memory errors."""
    try:
        yield
    except Exception as error:
        text = str(error)
        known = "vmap" in text or isinstance(error, ConfigurationError)
        if (
            isinstance(error, NotBatched)
            or is_oom_error(error)
            or not (known or isinstance(error, errors))
        ):
            raise
        text = text if known else f"{type(error).__name__}: {text}"
        shared = (
            ": a step changes what all models share; write x = x + y for x += y"
            if "broadcast shape" in text
            else ""
        )
        first = text.splitlines()[0].split(". ")[
            0
        ]  # the rest of torch's message is advice for its developers
        raise refusal(module, first.rstrip(".") + shared) from error


class NotBatched(ConfigurationError):
    """Error: a module's training steps cannot be batched."""


def refusal(module: nn.Module, reason: str) -> NotBatched:
    """Return a NotBatched error whose message names the module and ``reason``."""
    return NotBatched(
        f'engine="vmap" trains many clients as one batched model, and training_step of {type(module).__name__} does '
        f'not allow it: {reason}. Use engine="sequential", or change that.'
    )


#: Attributes of a Trainer that belong to the one client that trains in it.
_OF_ONE_CLIENT = frozenset(
    {"callback_metrics", "callbacks", "fit_loop", "global_step", "is_last_batch", "logged_metrics"}
    | {"lr_scheduler_configs", "num_training_batches", "optimizers", "strategy"}
)


class _ManyClients:
    """Replacement for the trainer that raises an error for attributes of a single client."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name in _OF_ONE_CLIENT:
            raise ConfigurationError(
                f"training_step asks for trainer.{name}, which of clients that train at once is not one."
            )
        return getattr(self._trainer, name)


@contextmanager
def _uncounted(module: nn.Module) -> Iterator[None]:
    """Make a module's torchmetrics return 0 within this context. Their states cannot be stacked."""
    changes: list[tuple[Any, str, Any]] = []
    for layer in module.modules():
        if isinstance(layer, (Metric, MetricCollection)):
            zero = torch.zeros(())
            answer = (
                dict.fromkeys(layer.keys(), zero) if isinstance(layer, MetricCollection) else zero
            )
            silent = partial(lambda answer, *_, **__: answer, answer)
            changes += [(layer, name, silent) for name in ("forward", "update", "compute", "reset")]
    patches = PatchedAttributes(changes)
    try:
        yield
    finally:
        patches.restore()


@contextmanager
def pure_step(module: L.LightningModule) -> Iterator[None]:
    """Discard what ``training_step`` logs within this context. Reading a single client's attributes raises an error."""
    own: dict[str, Any] = vars(module)
    trainer = module.trainer
    with unlogged(module):
        own["_trainer"] = _ManyClients(trainer)
        try:
            yield
        finally:
            own["_trainer"] = trainer
