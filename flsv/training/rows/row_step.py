"""One step of many models at once, as rows of stacked tensors: each model's loss and gradients.

``torch.func.vmap`` of ``torch.func.grad_and_value`` of ``training_step``. Where all that is trained are linear layers,
as in softmax regressions and MLPs, there is a cheaper way: ``vmap`` runs the losses only, and autograd itself derives
their sum by the stacked parameters, since no model's loss depends on another's. That saves what a transformed backward
pass costs for every operation, and small models are bound by that. Linear layers multiply as ``W x^T`` then: for few
outputs a batched product of that order takes little more than half the time of ``x W^T``. For convolutions autograd's
own backward pass of a batched one is slower, and recurrent layers have none.

Every step is traced anew, so that it sees the module as it is: what a schedule of the module's own has changed in it,
and the epoch. Within such steps a module must not keep anything or ask the trainer for what one client has:
:class:`flsv.training.rows.step_watch.Watch` and :func:`pure_step` see to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch.utilities.memory import is_oom_error
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric, MetricCollection

from flsv._lightning.patches import PatchedAttributes, unlogged
from flsv.training.rows.step_watch import Watch
from flsv.utilities.errors import ConfigurationError

State = dict[str, Tensor]


class BatchIndex:
    """Replaces ``batch_idx``, because clients are at different batches at the same time."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigurationError(
            "training_step looks at batch_idx, and clients that train at once are at different batches of their epochs."
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = __float__ = __index__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = _refuse
    __hash__ = __str__ = __format__ = _refuse


def step_arguments(module: nn.Module, batch: Any, batch_idx: Any) -> tuple[Any, ...]:
    """What ``training_step`` is called with: ``batch_idx`` only where it takes it, as Lightning does it."""
    takes = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)  # type: ignore[arg-type]
    return (batch, batch_idx) if takes else (batch,)


def loss_of(outputs: Any) -> Tensor:
    """The loss in what ``training_step`` gives, a scalar.

    Raises:
        ConfigurationError: there is none.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else type(outputs).__name__
        raise ConfigurationError(f"training_step gives {what}, and a loss, one number, is needed for every batch.")
    return loss.reshape(())


class RowStep:
    """Losses and gradients of stacked models.

    Args:
        module: whose ``training_step`` gives the loss of one.
        trained: names of the parameters to derive by.
        shared: all models are given one and the same batch ``[B, ...]``, which is not stacked: what depends on it alone
            is computed once, and a step that draws random numbers, as dropout does, draws the same for all. Otherwise
            one that draws is an error.

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

    def __init__(self, module: nn.Module, trained: Collection[str], shared: bool = False) -> None:
        self._module, self._trained = module, list(trained)
        self._index = step_arguments(module, None, BatchIndex())[1:]
        self._stepped, self._places = _Stepped(module), _places(module)
        self._shared = shared

    @cached_property
    def _linear(self) -> bool:
        """Whether all that is trained are linear layers, in a precision in which products of one's own are rounded as a
        layer's."""
        linear = {name for name, layer in self._module.named_modules() if type(layer) is nn.Linear}
        devices = {parameter.device.type for parameter in self._module.parameters()}
        rounded = any(map(torch.is_autocast_enabled, devices))
        return not rounded and all(name.rpartition(".")[0] in linear for name in self._trained)

    @cached_property
    def _of_many(self) -> Any:
        of_one: Any = self._of_one if self._linear else grad_and_value(self._of_one, has_aux=True)
        dims, randomness = (0, 0, None if self._shared else 0), "same" if self._shared else "error"
        return vmap(of_one, dims, randomness=randomness)

    def __call__(self, states: State, batch: Any) -> tuple[State, Tensor]:
        """One batch of each.

        Args:
            states: parameters and buffers by name, ``[m, ...]``; the module's own stand for what is not among them.
                Buffers are updated in place.
            batch: ``[m, B, ...]`` in all its tensors; ``[B, ...]`` where it is shared.

        Returns:
            Gradients by name ``[m, ...]``, and losses ``[m]``.
        """
        gradients, losses, after = self._derive(states, batch)
        for name, tensor in after.items():
            states[name].copy_(tensor)
        return gradients, losses

    def _derive(self, states: State, batch: Any) -> tuple[State, Tensor, State]:
        """Gradients, losses, and what buffers are after it."""
        rest = {name: tensor for name, tensor in states.items() if name not in self._trained}
        trained = [states[name] for name in self._trained]
        if self._linear:
            trained = [tensor.detach().requires_grad_() for tensor in trained]
            with torch.enable_grad():
                losses, after = self._of_many(trained, rest, batch)
                # Zeros for what this batch has not used, as for one model whose gradients are zeroed before.
                slopes = torch.autograd.grad(losses.sum(), trained, allow_unused=True, materialize_grads=True)
        else:
            slopes, (losses, after) = self._of_many(trained, rest, batch)
        gradients = dict(zip(self._trained, slopes))
        return gradients, losses.detach(), {name: tensor.detach() for name, tensor in after.items()}

    def _of_one(self, trained: list[Tensor], rest: State, batch: Any) -> tuple[Tensor, State]:
        # What is written in place within a transformation must be of it.
        given = dict(zip(self._trained, trained)) | {name: tensor.clone() for name, tensor in rest.items()}
        held = {place: tensor for name, tensor in given.items() for place in self._places[name]}
        with _WeightFirst(trained) if self._linear else nullcontext():
            # Tied by hand: torch would tie a layer that has two names to itself, and leave rows in the module.
            outputs = functional_call(self._stepped, held, (batch, *self._index), tie_weights=False)
        # Where a step puts a new tensor for a buffer, that one.
        return loss_of(outputs), {name: held[self._places[name][0]] for name in rest}


class _Stepped(nn.Module):
    """A module whose ``forward`` is its step."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return self.module.training_step(*arguments)  # type: ignore[operator]


def _places(module: nn.Module) -> dict[str, list[str]]:
    """Return where the layers of a stepped module hold each parameter and buffer, by its name; a layer that is
    registered under several names counts once."""
    names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    places = defaultdict(list)
    for prefix, layer in module.named_modules(prefix="module"):
        for own, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            if tensor is not None:
                places[names[id(tensor)]].append(f"{prefix}.{own}")
    return places


class _WeightFirst(TorchFunctionMode):
    """Linear layers with these weights as ``(W x^T)^T + b``."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self._weights = set(map(id, weights))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and not kwargs and id(args[1]) in self._weights and args[0].ndim > 1:
            x, weight, *bias = args
            products = weight.matmul(x.flatten(0, -2).mT).mT.unflatten(0, x.shape[:-1])
            return products + bias[0] if bias and bias[0] is not None else products
        return func(*args, **(kwargs or {}))


@contextmanager
def batched_steps(trainer: L.Trainer) -> Iterator[None]:
    """Within it many models take steps in the fit of one: in its precision, with its trainer out of reach. What
    torch.func cannot do is a refusal."""
    module = trainer.lightning_module
    with refusing(module), pure_step(module), _uncounted(module), trainer.precision_plugin.train_step_context():
        yield


@contextmanager
def purely(module: nn.Module, draws: Collection[str] = (), counts: bool = True) -> Iterator[None]:
    """Within it, whatever is raised is a refusal, and so is it to change what the module keeps; see
    :class:`flsv.training.rows.step_watch.Watch`."""
    watch = Watch(module, draws, counts)
    with refusing(module, (Exception,)):
        yield
    if reason := watch.changed():
        raise refusal(module, reason)


@contextmanager
def refusing(module: nn.Module, errors: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Within it, what torch.func cannot do is a refusal, and so is each of these errors."""
    try:
        yield
    except Exception as error:
        text = str(error)
        known = "vmap" in text or isinstance(error, ConfigurationError)
        if isinstance(error, NotBatched) or is_oom_error(error) or not (known or isinstance(error, errors)):
            raise
        text = text if known else f"{type(error).__name__}: {text}"
        shared = (
            ": a step changes what all models share; write x = x + y for x += y" if "broadcast shape" in text else ""
        )
        first = text.splitlines()[0].split(". ")[0]  # the rest of torch's own is advice to its developers
        raise refusal(module, first.rstrip(".") + shared) from error


class NotBatched(ConfigurationError):
    """A module whose steps cannot be batched; ``reason`` says why."""

    reason = ""


def refusal(module: nn.Module, reason: str) -> NotBatched:
    error = NotBatched(
        f'engine="vmap" trains many clients as one batched model, and training_step of {type(module).__name__} does '
        f'not allow it: {reason}. Use engine="sequential", or change that.'
    )
    error.reason = reason
    return error


#: What a Trainer has for one client that trains in it.
_OF_ONE_CLIENT = frozenset(
    {"callback_metrics", "callbacks", "fit_loop", "global_step", "is_last_batch", "logged_metrics"}
    | {"lr_scheduler_configs", "num_training_batches", "optimizers", "strategy"}
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
def _uncounted(module: nn.Module) -> Iterator[None]:
    """Within it, a module's torchmetrics count nothing and are 0: they would count rows, and their states are no
    tensors of a row."""
    changes: list[tuple[Any, str, Any]] = []
    for layer in module.modules():
        if isinstance(layer, (Metric, MetricCollection)):
            zero = torch.zeros(())
            answer = dict.fromkeys(layer.keys(), zero) if isinstance(layer, MetricCollection) else zero
            silent = partial(_always, answer)
            changes += [(layer, name, silent) for name in ("forward", "update", "compute", "reset")]
    patches = PatchedAttributes(changes)
    try:
        yield
    finally:
        patches.restore()


def _always(answer: Any, *_: Any, **__: Any) -> Any:
    return answer


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
