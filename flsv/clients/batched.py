"""Many small clients trained at once: their models stacked, one step of all of them as one batched computation.

``torch.func.vmap`` over the clients gives every client's gradient in one call; the module's own optimizer then steps on
the stacked parameters, which for an optimizer that works entry by entry is the same as one optimizer per client. Equal
to training one after the other up to rounding, since batched kernels sum in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from flsv.errors import ConfigurationError

State = dict[str, Tensor]
#: Their steps work entry by entry, so that of stacked parameters they are every client's own.
ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")


class _Loss(nn.Module):
    """The loss of a batch, and what the buffers are after it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.module.training_step(batch, batch_idx)  # type: ignore[operator]
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigurationError(f"training_step gives {type(outputs).__name__}, expected a loss.")
        return loss.reshape(())


class BatchedTraining:
    """Trains models of one structure side by side.

    Args:
        module: whose ``training_step`` gives the loss; it is called under ``torch.func``, so it has to be pure: no random
            numbers, no values read off tensors, nothing kept but buffers.
        optimizer: of the module's parameters; its class and options are used, its state is not touched.

    Raises:
        ConfigurationError: an optimizer whose steps are not known to work entry by entry.

    Example:
        >>> class Line(nn.Linear):
        ...     def training_step(self, batch, batch_idx):
        ...         x, y = batch
        ...         return nn.functional.mse_loss(self(x), y)
        >>> line = Line(1, 1, bias=False)
        >>> many = BatchedTraining(line, torch.optim.SGD(line.parameters(), lr=0.5))
        >>> x = torch.ones(2, 1)
        >>> models, losses = many.train({"weight": torch.zeros(2, 1, 1)}, [[(x, x)], [(x, 3 * x), (x, 3 * x)]])
        >>> models["weight"].flatten().tolist(), losses.tolist()
        ([1.0, 3.0], [1.0, 4.5])
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        if type(optimizer).__name__ not in ELEMENTWISE or not type(optimizer).__module__.startswith("torch.optim"):
            raise ConfigurationError(
                f'engine="vmap" steps on the parameters of many clients at once, which {type(optimizer).__name__} is not '
                f"known to allow. Use one of {', '.join(ELEMENTWISE)}, or leave engine out."
            )
        self._loss, self._optimizer = _Loss(module), optimizer
        by_id = {id(parameter): name for name, parameter in module.named_parameters()}
        self._groups = [[by_id[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        self._trained = {
            name for name, parameter in module.named_parameters() if parameter.requires_grad and id(parameter) in by_id
        }
        self._trained &= {name for names in self._groups for name in names}
        one = vmap(grad_and_value(self._of_one, has_aux=True), in_dims=(0, 0, 0, None), randomness="error")
        self._gradients: Callable[..., Any] = one

    def train(self, states: State, batches: Sequence[Sequence[Any]] | Sequence[Iterator[Any]]) -> tuple[State, Tensor]:
        """Train every model on its own batches, one after the other.

        Args:
            states: parameters and buffers by name, ``[k, ...]``. They are trained in place.
            batches: of each model, ``k`` sequences.

        Returns:
            The states, and the mean losses ``[k]``.
        """
        given = [list(each) for each in batches]
        k = len(given)
        # The longest first: who is done leaves a prefix.
        order = sorted(range(k), key=lambda i: -len(given[i]))
        rows = torch.tensor(order, device=next(iter(states.values())).device)
        stacked = {name: tensor.index_select(0, rows) for name, tensor in states.items()}
        lengths = [len(given[i]) for i in order]
        losses = torch.zeros(k, device=rows.device)
        optimizer = _Stacked(self._optimizer, self._groups, stacked, self._trained)
        for step in range(lengths[0] if lengths else 0):
            active = sum(length > step for length in lengths)
            now = [given[i][step] for i in order[:active]]
            gradients, loss = self._step({n: t[:active] for n, t in stacked.items()}, now, step)
            losses[:active] += loss
            optimizer.step(active, gradients)
        for name, tensor in stacked.items():
            states[name][rows] = tensor
        means = torch.empty_like(losses)
        means[rows] = losses / torch.tensor(lengths, device=losses.device).clamp_min(1)
        return states, means

    def _step(self, states: State, batches: list[Any], step: int) -> tuple[State, Tensor]:
        """Gradients by name ``[m, ...]`` and losses ``[m]``; buffers of ``states`` are updated."""
        shapes = [tuple(part.shape for part in _tensors(batch)) for batch in batches]
        if len(set(shapes)) == 1:
            return self._same_size(states, batches, step)
        # Last batches are smaller, and a mean over padding would be another loss: those of one size together.
        gradients: State = {name: torch.empty_like(states[name]) for name in self._trained}
        losses = next(iter(states.values())).new_empty(len(batches))
        for shape in dict.fromkeys(shapes):
            rows = [i for i, each in enumerate(shapes) if each == shape]
            index = torch.tensor(rows, device=losses.device)
            part = {name: tensor.index_select(0, index) for name, tensor in states.items()}
            found, loss = self._same_size(part, [batches[i] for i in rows], step)
            for name, gradient in found.items():
                gradients[name][index] = gradient
            for name in states.keys() - self._trained:
                states[name][index] = part[name]
            losses[index] = loss
        return gradients, losses

    def _same_size(self, states: State, batches: list[Any], step: int) -> tuple[State, Tensor]:
        trained = {name: states[name] for name in self._trained}
        rest = {name: tensor for name, tensor in states.items() if name not in self._trained}
        gradients, (losses, after) = self._gradients(trained, rest, _stack(batches), step)
        for name, tensor in after.items():
            rest[name].copy_(tensor)
        return gradients, losses

    def _of_one(self, trained: State, rest: State, batch: Any, step: int) -> tuple[Tensor, State]:
        # What is written in place within a transformation must be of it.
        rest = {name: tensor.clone() for name, tensor in rest.items()}
        named = {f"module.{name}": tensor for name, tensor in (*trained.items(), *rest.items())}
        loss = functional_call(self._loss, named, (batch, step))
        return loss, rest


class _Stacked:
    """The optimizer of the first so many of stacked models.

    Args:
        like: its class and options.
        groups: names of its parameters, by group.
        stacked: the models.
        trained: names of the parameters that have gradients.
    """

    def __init__(self, like: Optimizer, groups: list[list[str]], stacked: State, trained: set[str]) -> None:
        self._stacked, self._names = stacked, [[name for name in names if name in trained] for names in groups]
        self._active = len(next(iter(stacked.values())))
        self._views = self._of(self._active)
        options = [{k: v for k, v in group.items() if k != "params"} for group in like.param_groups]
        self._optimizer = type(like)(  # type: ignore[call-arg]
            [
                {**option, "params": [self._views[name] for name in names]}
                for option, names in zip(options, self._names)
                if names
            ],
            **like.defaults,
        )

    def step(self, active: int, gradients: State) -> None:
        """One step of the first ``active`` models; the others have ended and stay as they are."""
        if active != self._active:
            self._narrow(active)
        for name, view in self._views.items():
            view.grad = gradients[name]
        self._optimizer.step()

    def _of(self, active: int) -> State:
        return {name: self._stacked[name][:active] for names in self._names for name in names}

    def _narrow(self, active: int) -> None:
        views = self._of(active)
        for group, names in zip(self._optimizer.param_groups, [names for names in self._names if names]):
            group["params"] = [views[name] for name in names]
        for name, before in self._views.items():
            kept = self._optimizer.state.pop(before, None)
            if kept is not None:
                self._optimizer.state[views[name]] = {
                    key: value[:active] if isinstance(value, Tensor) and value.shape == before.shape else value
                    for key, value in kept.items()
                }
        self._views, self._active = views, active


def _tensors(batch: Any) -> list[Tensor]:
    return [part for part in tree_flatten(batch)[0] if isinstance(part, Tensor)]


def _stack(batches: list[Any]) -> Any:
    """Batches of one structure as one, ``[m, B, ...]``."""
    flat = [tree_flatten(batch) for batch in batches]
    leaves = []
    for parts in zip(*(parts for parts, _ in flat)):
        if not all(isinstance(part, Tensor) for part in parts):
            raise ConfigurationError(
                f'engine="vmap" stacks batches of tensors, and they hold {type(parts[0]).__name__}. Leave engine out.'
            )
        leaves.append(torch.stack(parts))
    return tree_unflatten(leaves, flat[0][1])
