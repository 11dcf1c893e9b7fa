"""One step of many models at once, as rows of stacked tensors: each model's loss and gradients.

``torch.func.vmap`` of ``torch.func.grad_and_value`` of ``training_step``. Where all that is trained are linear layers,
as in softmax regressions and MLPs, there is a cheaper way: ``vmap`` runs the losses only, and autograd itself derives
their sum by the stacked parameters, since no model's loss depends on another's. That saves what a transformed backward
pass costs for every operation, and small models are bound by that. Linear layers multiply as ``W x^T`` then: for few
outputs a batched product of that order takes little more than half the time of ``x W^T``. For convolutions autograd's
own backward pass of a batched one is slower, and recurrent layers have none.

What ``vmap`` adds to each call of a small model is more than its arithmetic, and the same in every step on batches of
one shape. So the tensor operations that a step of a shared batch comes to are recorded once it has been taken often
(:func:`torch.fx.experimental.proxy_tensor.make_fx`), and later steps do these alone, with the same results. A recording
holds whatever Python decided on the way: a step that draws, keeps something or reads values off tensors is not
recorded, and what may have moved on since (an epoch) is asked for by :meth:`RowStep.doubt`.

Within such steps, in the fit of one, a module must not draw, keep anything or ask the trainer for what one client has:
:class:`Watch` and :func:`pure_step` see to it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, NoReturn

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.memory import is_oom_error
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from flsv._lightning.patches import unlogged
from flsv.errors import ConfigurationError
from flsv.seeding import isolated_rngs

State = dict[str, Tensor]
Play = Callable[[State, Any], tuple[State, Tensor, State]]
_VIEWS = {torch.ops.aten.alias.default, torch.ops.aten.expand.default, torch.ops.aten.view.default}
#: Steps of a kind from which on a recording pays: it takes as long as what it saves in so many.
OFTEN = 100


class BatchIndex:
    """Replaces ``batch_idx``, because clients are at different batches at the same time."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigurationError(
            "training_step looks at batch_idx, and clients that train at once are at different batches of their epochs."
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = __float__ = __index__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = _refuse
    __hash__ = __str__ = __format__ = _refuse  # type: ignore[assignment]


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
        often: steps on a shared batch of the same shape before they are recorded.

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

    def __init__(
        self,
        module: nn.Module,
        trained: Collection[str],
        shared: bool = False,
        often: int | None = None,
    ) -> None:
        self._module, self._trained = module, list(trained)
        self._index = step_arguments(module, None, BatchIndex())[1:]
        self._stepped = _Stepped(module)
        self._shared, self._often = shared, OFTEN if often is None else often
        self._seen, self._doubted = Counter[Any](), set[Any]()
        self._plays: dict[Any, Play | None] = {}

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

    @property
    def recorded(self) -> int:
        """How many kinds of steps are played back."""
        return sum(play is not None for play in self._plays.values())

    def doubt(self) -> None:
        """What Python decides may be something else by now: every recording is compared with a step before it is
        played again."""
        self._doubted = {kind for kind, play in self._plays.items() if play is not None}

    def __call__(self, states: State, batch: Any) -> tuple[State, Tensor]:
        """One batch of each.

        Args:
            states: parameters and buffers by name, ``[m, ...]``; the module's own stand for what is not among them.
                Buffers are updated in place.
            batch: ``[m, B, ...]`` in all its tensors; ``[B, ...]`` where it is shared.

        Returns:
            Gradients by name ``[m, ...]``, and losses ``[m]``.
        """
        kind = _kind(states, batch) if self._shared else None
        if kind is None:
            return self._end(states, *self._derive(states, batch))
        watch = None if self._seen[kind] else Watch(self._module)
        results = self._derive(states, batch)
        self._seen[kind] += 1
        if watch is not None and watch.changed():
            self._plays[kind] = None
        elif kind in self._doubted:
            self._doubted.discard(kind)
            self._plays[kind] = self._confirmed(kind, states, batch, results)
        elif kind not in self._plays and self._seen[kind] >= self._often:
            self._plays[kind] = self._record(states, batch)
        return self._end(states, *results)

    def played(self, states: State, batch: Any) -> tuple[State, Tensor] | None:
        """The same by a recording; None: there is none."""
        play = self._plays.get(kind := _kind(states, batch)) if self._plays else None
        if play is None or kind in self._doubted:
            return None
        with torch.no_grad():
            return self._end(states, *play(states, batch))

    def _end(self, states: State, gradients: State, losses: Tensor, after: State) -> tuple[State, Tensor]:
        for name, tensor in after.items():
            states[name].copy_(tensor)
        return gradients, losses

    def _record(self, states: State, batch: Any) -> Play | None:
        try:
            with isolated_rngs(0, "recording"), purely(self._module):
                return _shortened(make_fx(lambda states, batch: self._derive(states, batch))(states, batch))
        except NotBatched:
            return None

    @torch.no_grad()
    def _confirmed(self, kind: Any, states: State, batch: Any, results: Any) -> Play | None:
        play = self._plays[kind]
        assert play is not None
        pairs = zip(tree_flatten(play(states, batch))[0], tree_flatten(results)[0])
        return play if all(torch.equal(again, tensor) for again, tensor in pairs) else None

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
        held = {f"module.{name}": tensor for name, tensor in given.items()}
        with _WeightFirst(trained) if self._linear else nullcontext():
            outputs = functional_call(self._stepped, held, (batch, *self._index))
        # Where a step puts a new tensor for a buffer, that one.
        return loss_of(outputs), {name: held[f"module.{name}"] for name in rest}


class _Stepped(nn.Module):
    """A module whose ``forward`` is its step."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return self.module.training_step(*arguments)  # type: ignore[operator]


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


def _shortened(play: GraphModule) -> GraphModule:
    """Without views that change nothing, which is a quarter of what ``vmap`` does."""
    for node in play.graph.nodes:
        if node.target in _VIEWS:
            before, after = (each.meta["tensor_meta"] for each in (node.args[0], node))
            if (before.shape, before.stride, before.dtype) == (after.shape, after.stride, after.dtype):
                node.replace_all_uses_with(node.args[0])
    play.graph.eliminate_dead_code()
    play.recompile()
    return play


def _kind(states: State, batch: Any) -> Any:
    """What steps of one recording have in common; None where a batch holds more than tensors."""
    leaves, spec = tree_flatten(batch)
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        return None
    held = tuple((name, tensor.shape, tensor.dtype) for name, tensor in states.items())
    return held, str(spec), tuple((leaf.shape, leaf.dtype, leaf.device) for leaf in leaves)


#: What Lightning and torch keep on a module.
_LIGHTNINGS = frozenset({"_current_fx_name", "_trainer", "_fabric", "log", "log_dict", "_parameters", "_modules"})


@contextmanager
def batched_steps(trainer: L.Trainer) -> Iterator[None]:
    """Within it many models take steps in the fit of one: in its precision, with its trainer out of reach. What
    torch.func cannot do is a refusal."""
    module = trainer.lightning_module
    with refusing(module), pure_step(module), trainer.precision_plugin.train_step_context():
        yield


@contextmanager
def purely(module: nn.Module) -> Iterator[None]:
    """Within it, whatever is raised is a refusal, and so is it to draw, or to change what the module keeps."""
    watch = Watch(module)
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
        text = str(error) or type(error).__name__
        refused = "vmap" in text or isinstance(error, (ConfigurationError, *errors))
        if isinstance(error, NotBatched) or is_oom_error(error) or not refused:
            raise
        shared = ": a step changes what all models share; write x = x + y for x += y" * ("broadcast shape" in text)
        raise refusal(module, text.splitlines()[0].rstrip(".") + shared) from error


class Watch:
    """Whether steps of a module draw random numbers, or change what it keeps, from now on."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._before, self._drawn = module, dict(_kept(module)), _random_state()

    def changed(self) -> str:
        """What they have done; empty: nothing."""
        if self._drawn != _random_state():
            return "it draws random numbers, as dropout does"
        before, now = self._before, dict(_kept(self._module))
        names = sorted(name for name in before.keys() | now.keys() if not _same(before.get(name), now.get(name)))
        return (
            f"it changes what the module keeps beside parameters and buffers: {', '.join(names[:3])}" if names else ""
        )


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
    if type(before[0]) is type(now[0]) and isinstance(now[0], (int, float, str)):
        return bool(before[0] == now[0])
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
