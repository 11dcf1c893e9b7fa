"""RowStep: losses and gradients of many models at once, as rows of stacked tensors.

A step is ``torch.func.vmap`` of ``torch.func.grad_and_value`` of ``training_step``, traced anew, so that it sees the
module's present attributes and the epoch. Compiling it takes longer than it saves.
"""

from __future__ import annotations

import random
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, NoReturn

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.memory import is_oom_error
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection

from flsv._lightning.patches import PatchedAttributes, unlogged
from flsv.utilities.errors import ConfigurationError

State = dict[str, Tensor]


class BatchIndex:
    """Stand-in for ``batch_idx`` that must not be read, as clients are at different batches."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigurationError(
            "training_step looks at batch_idx, and clients that train at once are at different batches of their epochs."
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = __float__ = __index__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = _refuse
    __hash__ = __str__ = __format__ = _refuse


def step_arguments(module: nn.Module, batch: Any, batch_idx: Any) -> tuple[Any, ...]:
    """Return the arguments of ``training_step``, with ``batch_idx`` if it takes it."""
    hook: Any = module.training_step
    takes = is_param_in_hook_signature(hook, "batch_idx", min_args=2)
    return (batch, batch_idx) if takes else (batch,)


def training_loss(outputs: Any) -> Tensor:
    """Return the loss, a scalar, from the value that ``training_step`` returned."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else type(outputs).__name__
        raise ConfigurationError(f"training_step gives {what}, and a loss, one number, is needed for every batch.")
    return loss.reshape(())


# If only linear layers are trained, as in softmax regressions and MLPs, vmap computes the losses only, and autograd
# differentiates their sum, since no model's loss depends on another model. This saves the cost of a transformed
# backward pass per operation, which dominates for small models. Weights W and inputs x then multiply as W x^T: for few
# outputs this batched product takes little more than half the time of x W^T. Convolutions have a slower batched
# backward pass in autograd, and recurrent layers none.
class RowStep:
    """Function that computes the gradients by ``trained`` parameters, and the losses, of m stacked models.

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
        """Return whether all trained parameters belong to linear layers, without autocast."""
        linear = {name for name, layer in self._module.named_modules() if type(layer) is nn.Linear}
        devices = {parameter.device.type for parameter in self._module.parameters()}
        # Autocast would round a product of stacked weights differently from a product of one layer's weights.
        rounded = any(map(torch.is_autocast_enabled, devices))
        return not rounded and all(name.rpartition(".")[0] in linear for name in self._trained)

    @cached_property
    def _of_many(self) -> Any:
        """Return :meth:`_of_one` with ``vmap`` over models, and with gradients unless :attr:`_linear`."""
        of_one: Any = self._of_one if self._linear else grad_and_value(self._of_one, has_aux=True)
        return vmap(of_one, 0, randomness="error")

    def __call__(self, states: State, batch: Any) -> tuple[State, Tensor]:
        """Return gradients ``[m, ...]`` and losses ``[m]`` on batches ``[m, B, ...]``, and update buffers in place."""
        gradients, losses, after = self._derive(states, batch)
        for name, tensor in after.items():
            states[name].copy_(tensor)
        return gradients, losses

    def _derive(self, states: State, batch: Any) -> tuple[State, Tensor, State]:
        """Return gradients by name, losses ``[m]``, and the updated buffers by name."""
        rest = {name: tensor for name, tensor in states.items() if name not in self._trained}
        trained = [states[name] for name in self._trained]
        if self._linear:
            trained = [tensor.detach().requires_grad_() for tensor in trained]
            with torch.enable_grad():
                losses, after = self._of_many(trained, rest, batch)
                # Zeros for parameters that this batch has not used, as for one model after `zero_grad`.
                slopes = torch.autograd.grad(losses.sum(), trained, allow_unused=True, materialize_grads=True)
        else:
            slopes, (losses, after) = self._of_many(trained, rest, batch)
        gradients = dict(zip(self._trained, slopes))
        return gradients, losses.detach(), {name: tensor.detach() for name, tensor in after.items()}

    def _of_one(self, trained: list[Tensor], rest: State, batch: Any) -> tuple[Tensor, State]:
        """Return the loss of one model on one batch, and its updated buffers."""
        # Tensors that are changed in place within a torch.func transformation must be made within it.
        given = dict(zip(self._trained, trained)) | {name: tensor.clone() for name, tensor in rest.items()}
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
    """Return ``{name in module: names in _Stepped(module)}``, several for tied weights."""
    names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    places = defaultdict(list)
    for prefix, layer in module.named_modules(prefix="module"):
        for own, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            if tensor is not None:
                places[names[id(tensor)]].append(f"{prefix}.{own}")
    return places


class _WeightFirst(TorchFunctionMode):
    """Mode in which linear layers compute (W x^T)^T + b, which is faster for stacked W."""

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
    """Allow steps of stacked models within this context, in the trainer's precision, without logs."""
    module = trainer.lightning_module
    with refusing(module), pure_step(module), _uncounted(module), trainer.precision_plugin.train_step_context():
        yield


@contextmanager
def purely(module: nn.Module) -> Iterator[None]:
    """Raise NotBatched if the code within fails, changes the module's attributes, or draws random numbers."""
    watch = Watch(module)
    with refusing(module, (Exception,)):
        yield
    if reason := watch.changed():
        raise refusal(module, reason)


@contextmanager
def refusing(module: nn.Module, errors: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn errors of torch.func, ConfigurationErrors and ``errors`` into NotBatched, but no lack of memory."""
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
        first = text.splitlines()[0].split(". ")[0]  # the rest of torch's message is advice for its developers
        raise refusal(module, first.rstrip(".") + shared) from error


class NotBatched(ConfigurationError):
    """Error: a module's training steps cannot be batched, for a ``reason``."""

    reason = ""


def refusal(module: nn.Module, reason: str) -> NotBatched:
    """Return a NotBatched error whose message names the module and ``reason``."""
    error = NotBatched(
        f'engine="vmap" trains many clients as one batched model, and training_step of {type(module).__name__} does '
        f'not allow it: {reason}. Use engine="sequential", or change that.'
    )
    error.reason = reason
    return error


#: Attributes of a Trainer that belong to the one client that trains in it.
_OF_ONE_CLIENT = frozenset(
    {"callback_metrics", "callbacks", "fit_loop", "global_step", "is_last_batch", "logged_metrics"}
    | {"lr_scheduler_configs", "num_training_batches", "optimizers", "strategy"}
)


class _ManyClients:
    """Stand-in for a trainer that refuses attributes of one client."""

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
    """Let a module's torchmetrics return 0 within this context, since their states cannot be stacked."""
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
    """Drop what ``training_step`` logs, and refuse the trainer's attributes of one client."""
    own: dict[str, Any] = vars(module)
    trainer = module.trainer
    with unlogged(module):
        own["_trainer"] = _ManyClients(trainer)
        try:
            yield
        finally:
            own["_trainer"] = trainer


#: Names of the global random generators.
GENERATORS = ("torch", "NumPy", "random")
#: Attributes of a module that Lightning and torch set themselves.
_LIGHTNINGS = frozenset({"_current_fx_name", "_trainer", "_fabric", "log", "log_dict", "_parameters", "_modules"})
_LIGHTNINGS |= {"_metric_attributes"}
#: Types whose objects are compared by identity only; and the depth to which all other objects, lists and dictionaries
#: are compared.
_WHOLE, _DEPTH = (nn.Module, Dataset, DataLoader, L.Trainer, L.LightningDataModule), 4


class Watch:
    """Snapshot of a module's attributes and of the global generators, to detect changes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before, self._drawn = dict(self._kept()), _random_states()

    def changed(self) -> str:
        """Return a description of the changes since the snapshot, or an empty one."""
        if drawn := [name for name, state in _random_states().items() if state != self._drawn[name]]:
            return f"it draws random numbers by {drawn[0]}, as dropout or an augmentation does"
        before, now = self._before, dict(self._kept())
        names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        text = ", ".join(names[:3])
        return f"it changes what the module keeps beside parameters and buffers: {text}" if names else ""

    def _kept(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and :func:`_mark` of each attribute of the module's layers."""
        for prefix, layer in self._module.named_modules():
            for name, value in vars(layer).items():
                if name == "_buffers" and isinstance(value, dict):
                    yield f"{prefix}._buffers", {key: id(buffer) for key, buffer in value.items()}
                elif name not in _LIGHTNINGS:
                    yield f"{prefix}.{name}" if prefix else name, _mark(value, _DEPTH)


def _mark(value: Any, depth: int) -> Any:
    """Return a fingerprint of a value, and of the objects in it to a ``depth``."""
    kind = type(value).__name__, id(value)
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return repr(value)
    for types, content in _CONTENTS:
        if isinstance(value, types):
            return (*kind, content(value))
    if depth == 0 or isinstance(value, (*_WHOLE, type)):
        return kind
    if isinstance(value, dict):
        return (*kind, [(repr(key), _mark(each, depth - 1)) for key, each in value.items()])
    if isinstance(value, (list, tuple, deque)):
        return (type(value).__name__, [_mark(each, depth - 1) for each in value])
    held = getattr(value, "__dict__", None)
    return (*kind, _mark(dict(held), depth - 1)[2]) if isinstance(held, dict) and depth > 1 else kind


def _checksum(array: Any) -> int | None:
    """Return a checksum of a NumPy array, or None if it holds Python objects."""
    return None if array.dtype == object else zlib.crc32(np.ascontiguousarray(array).tobytes())


#: ``(type, function)``: the function's result for an object of this type is another one after the object has changed.
_CONTENTS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (Tensor, lambda tensor: None if tensor.is_inference() else tensor._version),
    (torch.Generator, lambda generator: generator.get_state().numpy().tobytes()),
    (np.random.Generator, lambda generator: repr(generator.bit_generator.state)),
    (np.random.RandomState, lambda state: repr(state.get_state(legacy=False))),
    (random.Random, lambda generator: generator.getstate()),
    (np.ndarray, _checksum),
    ((set, frozenset), len),
)


def _random_states() -> dict[str, Any]:
    """Return the states of the global random generators by the names in :data:`GENERATORS`."""
    legacy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    cuda = [s.numpy().tobytes() for s in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else None
    torches = torch.get_rng_state().numpy().tobytes(), cuda
    return dict(zip(GENERATORS, (torches, repr(legacy), random.getstate())))
