"""RowTraining: trains many models of one structure at once, as rows of stacked tensors.

For an elementwise optimizer a step on the stacked parameters is the same as one optimizer per row. The results equal
those of training one model after the other up to rounding, since batched kernels sum in another order.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from flsv.core.parameter_space import ParameterSpace
from flsv.training.optimizers import SCHEDULED
from flsv.training.rows.row_step import RowStep, State
from flsv.utilities.errors import ConfigurationError

#: Classes of torch's optimizers that step entry by entry, so that a step of stacked parameters is a step of every row.
ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")


class RowTraining:
    """Training of m models of one structure at once, as rows of stacked tensors ``[m, ...]``.

    Example:
        >>> class Line(nn.Linear):
        ...     def training_step(self, batch, batch_idx):
        ...         x, y = batch
        ...         return nn.functional.mse_loss(self(x), y)
        >>> line = Line(1, 1, bias=False)
        >>> many = RowTraining(line, torch.optim.SGD(line.parameters(), lr=0.5))
        >>> x = torch.ones(2, 1)
        >>> batches = GivenBatches([[(x, x)], [(x, 3 * x), (x, 3 * x)]])
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
        self.module, self.optimizer, self.frozen = module, optimizer, frozenset(frozen)
        self._clip = clip
        names = {parameter: name for name, parameter in module.named_parameters()}
        trained = {p for p in names if p.requires_grad and names[p] not in frozen}
        self._groups = [[names[p] for p in group["params"] if p in trained] for group in optimizer.param_groups]
        self._trained = {name for group in self._groups for name in group}
        self._step = RowStep(module, sorted(self._trained))
        self.states: State = {}

    def train(self, states: State, batches: GivenBatches) -> tuple[State, Tensor]:
        """Train m rows, each on its batches, and return their states and mean losses ``[m]``."""
        first = next(iter(states.values()))
        # Rows with more batches come first, so that the rows that still train are always the first ones.
        order = sorted(range(len(first)), key=lambda i: -batches.lengths[i])
        lengths = [batches.lengths[i] for i in order]
        index = None if order == sorted(order) else torch.tensor(order, device=first.device)
        stacked = states if index is None else _rows(states, index)
        losses = torch.zeros(len(order), device=first.device)
        # For a name without an entry in states all rows use the module's own, which steps must not change.
        self.begin(stacked)
        try:
            for step in range(lengths[0]):
                active = sum(length > step for length in lengths)
                now = {name: tensor[:active] for name, tensor in stacked.items()}
                gradients = self._derive(now, batches.at(order[:active], step), losses[:active])
                self.take(gradients, active)
        finally:
            self.end()
        losses /= torch.tensor(lengths, device=losses.device)
        if index is None:
            return stacked, losses
        back = index.argsort()
        return _rows(stacked, back), losses[back]

    def begin(self, states: State) -> None:
        """Set the rows that the next steps train in place, with a fresh optimizer state."""
        self.states = states
        self._stacked = StackedOptimizer(self.optimizer, self._groups, states)

    def end(self) -> None:
        """Release the rows' parameters and buffers, and the state of their optimizer."""
        self.states = {}
        del self._stacked

    def take(self, gradients: State, active: int | None = None) -> None:
        """Let the optimizer step on the first ``active`` rows, with the module's optimizer's options now."""
        self._stacked.follow(self.optimizer)
        if self._clip is not None:
            self._clip(gradients)
        self._stacked.step(active, gradients)

    def _derive(self, now: State, given: Iterable[tuple[list[int], Any]], losses: Tensor) -> State:
        """Compute the gradients of rows that still have batches, and add to ``losses`` and buffers in place."""
        gradients: State = {}
        for places, batch in given:
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


def states_of(space: ParameterSpace, module: nn.Module, models: Tensor) -> State:
    """Convert models ``[m, P]`` into stacked parameters and buffers ``[m, ...]`` by name."""
    held = dict([*module.named_parameters(), *module.named_buffers()])
    states = {name: tensor.to(held[name].dtype, copy=True) for name, tensor in space.unflatten(models).items()}
    rest = {name: tensor for name, tensor in module.named_buffers() if name not in states}
    return states | {name: tensor.expand(len(models), *tensor.shape).clone() for name, tensor in rest.items()}


def models_of(space: ParameterSpace, states: State, like: Tensor) -> Tensor:
    """Convert stacked parameters and buffers into vectors ``[m, P]``."""
    return torch.cat([states[name].flatten(1).to(like) for name in space.names], 1)


def _rows(states: State, index: Tensor) -> State:
    """Return copies of the models at the indices ``index``."""
    return {name: tensor.index_select(0, index) for name, tensor in states.items()}


class StackedOptimizer:
    """Optimizer of m stacked models, sorted so that those at the end stop stepping first."""

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
    def step(self, active: int | None, gradients: State) -> None:
        """Step on the first ``active`` models, now and later, or on as many as before."""
        if active is not None and active != self._active:
            self._narrow(active)
        for name, view in self._views.items():
            view.grad = gradients[name]
        self._optimizer.step()

    def follow(self, like: Optimizer) -> None:
        """Copy the options that schedulers change, such as the learning rate."""
        for group, theirs in zip(self._optimizer.param_groups, like.param_groups):
            group.update({name: value for name, value in theirs.items() if name in SCHEDULED})

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
                key: value[:active] if isinstance(value, Tensor) and value.shape == before.shape else value
                for key, value in states.pop(before, {}).items()
            }
        self._views, self._active = views, active


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to step entry by entry (:data:`ELEMENTWISE`)."""
    return type(optimizer).__name__ in ELEMENTWISE and type(optimizer).__module__.startswith("torch.optim")


def clipping(trainer: L.Trainer) -> Callable[[State], None] | None:
    """Return a function that clips each row's gradients ``[m, ...]`` in place as a trainer does, or None."""
    limit: Any = trainer.gradient_clip_val
    if limit is None:
        return None
    return partial(_clip_values if trainer.gradient_clip_algorithm == "value" else clip, limit=limit)


def clip(gradients: State, limit: float) -> None:
    """Clip the norm of every model's gradients ``[m, ...]``, in place."""
    squares = torch.stack([g.flatten(1).norm(dim=1) if g.ndim > 1 else g.abs() for g in gradients.values()])
    factors = (limit / (squares.norm(dim=0) + 1e-6)).clamp(max=1.0)
    for gradient in gradients.values():
        gradient.mul_(factors.view(-1, *[1] * (gradient.ndim - 1)))


def _clip_values(gradients: State, limit: float) -> None:
    for gradient in gradients.values():
        gradient.clamp_(-limit, limit)


class GivenBatches:
    """The batches of several clients, of which those of the same size are stacked.

    Example:
        >>> many = GivenBatches([[torch.zeros(4, 2)], [torch.ones(4, 2), torch.ones(1, 2)], [torch.ones(3, 2)]])
        >>> [(places, list(batch.shape)) for places, batch in many.at([0, 1, 2], 0)]
        [([0, 1], [2, 4, 2]), ([2], [1, 3, 2])]
    """

    def __init__(self, given: Sequence[Sequence[Any]]) -> None:
        self._given, self.lengths = given, [len(batches) for batches in given]

    def at(self, clients: Sequence[int], step: int) -> Iterator[tuple[list[int], Any]]:
        """Yield the positions and stacked batches of ``clients`` at a step, for each size of batch."""
        flat = [tree_flatten(self._given[client][step]) for client in clients]
        shapes = [tuple(map(_shape, leaves)) for leaves, _ in flat]
        for shape in dict.fromkeys(shapes):
            places = [place for place, each in enumerate(shapes) if each == shape]
            leaves = [torch.stack(parts) for parts in zip(*(flat[place][0] for place in places))]
            yield places, tree_unflatten(leaves, flat[places[0]][1])


def _shape(leaf: Any) -> Any:
    """Return the shape of one tensor of a batch, or raise ConfigurationError."""
    if not isinstance(leaf, Tensor):
        raise ConfigurationError(
            f'engine="vmap" stacks the clients\' batches, which have to hold tensors only, and one holds a '
            f'{type(leaf).__name__}. Let the data set give tensors, or train with engine="sequential".'
        )
    return leaf.shape
