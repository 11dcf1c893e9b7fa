"""One step of many models at once: every model's loss and gradients on a batch of its own.

``torch.func.vmap`` of ``torch.func.grad_and_value`` of ``training_step``. Where all that is trained are linear layers,
as in softmax regressions and MLPs, there is a cheaper way: ``vmap`` runs the losses only, and autograd itself derives
their sum by the stacked parameters, since no model's loss depends on another's. That saves what a transformed backward
pass costs for every operation, and small models are bound by that. Linear layers multiply as ``W x^T`` then: for few
outputs a batched product of that order takes little more than half the time of ``x W^T``. For convolutions autograd's
own backward pass of a batched one is slower, and recurrent layers have none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.overrides import TorchFunctionMode

from flsv.errors import ConfigurationError

State = dict[str, Tensor]


class BatchIndex:
    """Stands for ``batch_idx``: clients are at different batches of their epochs at the same time."""

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


class BatchedStep:
    """Losses and gradients of stacked models.

    Args:
        module: whose ``training_step`` gives the loss of one.
        trained: names of the parameters to derive by.

    Example:
        >>> class Line(nn.Linear):
        ...     def training_step(self, batch, batch_idx):
        ...         return self(batch).sum()
        >>> step = BatchedStep(Line(2, 1), ["weight"])
        >>> states = {"weight": torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), "bias": torch.zeros(2, 1)}
        >>> gradients, losses = step(states, torch.tensor([[[1.0, 0.0]], [[1.0, 1.0]]]))
        >>> gradients["weight"].tolist(), losses.tolist()
        ([[[1.0, 0.0]], [[1.0, 1.0]]], [1.0, 7.0])
    """

    def __init__(self, module: nn.Module, trained: Collection[str]) -> None:
        self._module, self._trained = module, list(trained)
        self._index = step_arguments(module, None, BatchIndex())[1:]
        self._places = dict(_places(module))
        linear = {name for name, layer in module.named_modules() if type(layer) is nn.Linear}
        self._linear = all(name.rpartition(".")[0] in linear for name in self._trained)
        of_one: Any = self._of_one if self._linear else grad_and_value(self._of_one, has_aux=True)
        self._of_many: Any = vmap(of_one, randomness="error")

    def __call__(self, states: State, batch: Any) -> tuple[State, Tensor]:
        """One batch of each.

        Args:
            states: parameters and buffers by name, ``[m, ...]``; the module's own stand for what is not among them.
                Buffers are updated in place.
            batch: ``[m, B, ...]`` in all its tensors.

        Returns:
            Gradients by name ``[m, ...]``, and losses ``[m]``.
        """
        rest = {name: tensor for name, tensor in states.items() if name not in self._trained}
        trained = [states[name] for name in self._trained]
        if self._linear:
            trained = [tensor.detach().requires_grad_() for tensor in trained]
            with torch.enable_grad():
                losses, after = self._of_many(trained, rest, batch)
                # Zeros for what this batch has not used, as for one model whose gradients are zeroed before.
                gradients = torch.autograd.grad(losses.sum(), trained, allow_unused=True, materialize_grads=True)
        else:
            gradients, (losses, after) = self._of_many(trained, rest, batch)
        for name, tensor in after.items():
            rest[name].copy_(tensor.detach())
        return dict(zip(self._trained, gradients)), losses.detach()

    def _of_one(self, trained: list[Tensor], rest: State, batch: Any) -> tuple[Tensor, State]:
        # What is written in place within a transformation must be of it.
        given = dict(zip(self._trained, trained)) | {name: tensor.clone() for name, tensor in rest.items()}
        with self._holding(given), _WeightFirst(trained) if self._linear else nullcontext():
            loss = loss_of(self._module.training_step(batch, *self._index))  # type: ignore[operator]
            after = {name: self._now(name) for name in rest}
        return loss, after

    @contextmanager
    def _holding(self, tensors: State) -> Iterator[None]:
        """Within it the module holds these. :func:`torch.func.functional_call` would walk through it every time."""
        own = [(place, place[0][place[1]]) for name in tensors for place in self._places[name]]
        for name, tensor in tensors.items():
            for owner, key in self._places[name]:
                owner[key] = tensor
        try:
            yield
        finally:
            for (owner, key), before in own:
                owner[key] = before

    def _now(self, name: str) -> Tensor:
        """Where a step puts a new tensor for a buffer, that one."""
        owner, key = self._places[name][0]
        found = owner[key]
        assert found is not None
        return found


class _WeightFirst(TorchFunctionMode):
    """Linear layers with these weights as ``(W x^T)^T + b``."""

    def __init__(self, weights: Collection[Tensor]) -> None:
        super().__init__()
        self._weights = set(map(id, weights))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and not kwargs and id(args[1]) in self._weights and args[0].ndim > 1:
            x, weight, *bias = args
            products = weight.matmul(x.flatten(0, -2).mT).mT.unflatten(0, x.shape[:-1])
            return products + bias[0] if bias and bias[0] is not None else products
        return func(*args, **(kwargs or {}))


def _places(module: nn.Module) -> Iterator[tuple[str, list[tuple[dict[str, Tensor | None], str]]]]:
    """Where a module holds its parameters and buffers, by name: several places for one that layers share."""
    places: dict[int, list[tuple[dict[str, Tensor | None], str]]] = {}
    for layer in module.modules():
        for owner in (layer._parameters, layer._buffers):
            for key, tensor in owner.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((owner, key))  # type: ignore[arg-type]
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield name, places[id(tensor)]
