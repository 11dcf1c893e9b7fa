"""The kernel: trains many models of one structure at once, as rows of stacked tensors.

One call gives every row's gradient (:mod:`flsv.training.rows.row_step`); the module's own optimizer then steps on the
stacked parameters, which for an optimizer that works entry by entry is the same as one optimizer per row. Equal to
training one after the other up to rounding, since batched kernels sum in another order. ``engine="vmap"`` has a client
a row, each on batches of its own; ``flsv retrain`` a coalition a row, on the batches of the client that all of them
have in common, as :class:`flsv.metrics.ShadowShapley` has, which takes step after step beside the client's own.
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
from flsv.training.group_options import SCHEDULED
from flsv.training.rows.row_step import RowStep, State
from flsv.utilities.errors import ConfigurationError

#: Of parameters, what they were at the start, and gradients, which are changed in place.
Change = Callable[[list[Tensor], list[Tensor], list[Tensor]], None]

#: Their steps work entry by entry, so that of stacked parameters they are every row's own.
ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")


class RowTraining:
    """Trains models of one structure side by side.

    Args:
        module: whose ``training_step`` gives the loss; it is called under ``torch.func``, so it has to be pure: no
            values read off tensors, nothing kept but buffers.
        optimizer: of the module's parameters, :func:`is_elementwise`; its class and options are used, its state is not
            touched.
        clip: changes gradients ``[m, ...]`` by name in place before a step, see :func:`clipping`; None: nothing.
        apart: names of parameters that are not trained: they have no gradient, or are in no row.
        shared: all rows take the same batches. What they draw then, all draw alike; rows of batches of their own must
            not draw.
        change: changes all rows' gradients before each step, see :class:`flsv.training.algorithms.ClientAlgorithm`.

    Attributes:
        module, optimizer, apart: as given.
        states: of the rows that train, ``[m, ...]`` by name.

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
        module: nn.Module,
        optimizer: Optimizer,
        clip: Callable[[State], None] | None = None,
        apart: Collection[str] = (),
        shared: bool = False,
        change: Change | None = None,
    ) -> None:
        self.module, self.optimizer, self.apart = module, optimizer, frozenset(apart)
        self._clip, self._change = clip, change
        names = {parameter: name for name, parameter in module.named_parameters()}
        trained = {p for p in names if p.requires_grad and names[p] not in apart}
        self._groups = [[names[p] for p in group["params"] if p in trained] for group in optimizer.param_groups]
        self._trained = {name for group in self._groups for name in group}
        self._step = RowStep(module, sorted(self._trained), shared)
        self.states: State = {}
        self._starts: State = {}

    def train(
        self, states: State, batches: GivenBatches | SharedBatches, after_step: Callable[[], None] = lambda: None
    ) -> tuple[State, Tensor]:
        """Train every row on its batches, one after the other.

        Args:
            states: parameters and buffers by name, ``[m, ...]``, which are used up; the module's own stand for what is
                not among them, and nothing may write into these.
            batches: of each row, in the order of the states.
            after_step: called after every step, such as a schedule's.

        Returns:
            The states after it, and the mean losses ``[m]``.
        """
        first = next(iter(states.values()))
        # The longest first: who is done leaves a prefix.
        order = sorted(range(len(first)), key=lambda i: -batches.lengths[i])
        lengths = [batches.lengths[i] for i in order]
        index = None if order == sorted(order) else torch.tensor(order, device=first.device)
        stacked = states if index is None else _rows(states, index)
        losses = torch.zeros(len(order), device=first.device)
        self.begin(stacked)
        try:
            for step in range(lengths[0]):
                active = sum(length > step for length in lengths)
                now = {name: tensor[:active] for name, tensor in stacked.items()}
                gradients = self._derive(now, batches.at(order[:active], step), losses[:active])
                self.take(gradients, active)
                after_step()
        finally:
            self.end()
        losses /= torch.tensor(lengths, device=losses.device)
        if index is None:
            return stacked, losses
        back = index.argsort()
        return _rows(stacked, back), losses[back]

    def begin(self, states: State) -> None:
        """Other rows, whose states are changed in place from now on."""
        self.states = states
        self._starts = {name: states[name].clone() for name in self._trained} if self._change else {}
        self._stacked = StackedOptimizer(self.optimizer, self._groups, states)

    def end(self) -> None:
        """Keep nothing of the rows."""
        self.states, self._starts = {}, {}
        del self._stacked

    def gradients(self, batch: Any) -> State:
        """Gradients ``[m, ...]`` of all rows on a batch that they share, by name; buffers move."""
        return self._step(self.states, batch)[0]

    def take(self, gradients: State, active: int | None = None) -> None:
        """An optimizer's step of all rows, or of the first ones, by their gradients ``[m, ...]``, with the options that
        schedulers have given the module's optimizer."""
        self._stacked.follow(self.optimizer)
        if self._change is not None:
            now, before = ([part[name][:active] for name in gradients] for part in (self.states, self._starts))
            self._change(now, before, list(gradients.values()))
        if self._clip is not None:
            self._clip(gradients)
        self._stacked.step(active, gradients)

    def _derive(self, now: State, given: Iterable[tuple[list[int], Any]], losses: Tensor) -> State:
        """Of the rows that still train, on batches of one size after the other; their losses are added to."""
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
    """Models ``[m, P]`` as states to train: a module's parameters and buffers ``[m, ...]`` by name.

    Counters that no vector holds are the module's; as in a round, they are not averaged.
    """
    held = dict([*module.named_parameters(), *module.named_buffers()])
    states = {name: tensor.to(held[name].dtype, copy=True) for name, tensor in space.unflatten(models).items()}
    rest = {name: tensor for name, tensor in module.named_buffers() if name not in states}
    return states | {name: tensor.expand(len(models), *tensor.shape).clone() for name, tensor in rest.items()}


def models_of(space: ParameterSpace, states: State, like: Tensor) -> Tensor:
    """The inverse: ``[m, P]``, in the dtype of ``like``."""
    return torch.cat([states[name].flatten(1).to(like) for name in space.names], 1)


def _rows(states: State, index: Tensor) -> State:
    return {name: tensor.index_select(0, index) for name, tensor in states.items()}


class StackedOptimizer:
    """One optimizer for the first of the stacked models.

    Args:
        like: its class and options.
        groups: names of the parameters with gradients, by its groups.
        stacked: the models, which are stepped in place.
    """

    def __init__(self, like: Optimizer, groups: list[list[str]], stacked: State) -> None:
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
        """One step of the first ``active`` models (None: all); the others have ended and stay as they are."""
        if active is not None and active != self._active:
            self._narrow(active)
        for name, view in self._views.items():
            view.grad = gradients[name]
        self._optimizer.step()

    def follow(self, like: Optimizer) -> None:
        """Take over what schedulers have written into another's groups."""
        for group, theirs in zip(self._optimizer.param_groups, like.param_groups):
            group.update({name: value for name, value in theirs.items() if name in SCHEDULED})

    def _of(self, active: int) -> State:
        return {name: self._stacked[name][:active] for names in self._groups for name in names}

    def _narrow(self, active: int) -> None:
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
    """Whether its steps are known to work entry by entry."""
    return type(optimizer).__name__ in ELEMENTWISE and type(optimizer).__module__.startswith("torch.optim")


def clipping(trainer: L.Trainer) -> Callable[[State], None] | None:
    """Return what shortens the gradients ``[m, ...]`` of many models, by name and in place, as a trainer shortens those
    of one; None: it does not."""
    limit: Any = trainer.gradient_clip_val
    if limit is None:
        return None
    return partial(_clip_values if trainer.gradient_clip_algorithm == "value" else clip, limit=limit)


def clip(gradients: State, limit: float) -> None:
    """As ``torch.nn.utils.clip_grad_norm_`` does it, for every model."""
    squares = torch.stack([g.flatten(1).norm(dim=1) if g.ndim > 1 else g.abs() for g in gradients.values()])
    factors = (limit / (squares.norm(dim=0) + 1e-6)).clamp(max=1.0)
    for gradient in gradients.values():
        gradient.mul_(factors.view(-1, *[1] * (gradient.ndim - 1)))


def _clip_values(gradients: State, limit: float) -> None:
    for gradient in gradients.values():
        gradient.clamp_(-limit, limit)


class GivenBatches:
    """Stacks existing batches.

    Args:
        given: of every client.

    Attributes:
        lengths: every client's number of batches.

    Example:
        >>> many = GivenBatches([[torch.zeros(4, 2)], [torch.ones(4, 2), torch.ones(1, 2)], [torch.ones(3, 2)]])
        >>> [(places, list(batch.shape)) for places, batch in many.at([0, 1, 2], 0)]
        [([0, 1], [2, 4, 2]), ([2], [1, 3, 2])]
    """

    def __init__(self, given: Sequence[Sequence[Any]]) -> None:
        self._given, self.lengths = given, [len(batches) for batches in given]

    def at(self, clients: Sequence[int], step: int) -> Iterator[tuple[list[int], Any]]:
        """The ``step``-th batches of some clients. Those of one size come together, since a mean over padding would be
        another loss: places among ``clients``, and their batches stacked.

        Raises:
            ConfigurationError: batches that hold something else than tensors.
        """
        flat = [tree_flatten(self._given[client][step]) for client in clients]
        shapes = [tuple(map(_shape, leaves)) for leaves, _ in flat]
        for shape in dict.fromkeys(shapes):
            places = [place for place, each in enumerate(shapes) if each == shape]
            leaves = [torch.stack(parts) for parts in zip(*(flat[place][0] for place in places))]
            yield places, tree_unflatten(leaves, flat[places[0]][1])


class SharedBatches:
    """The same batches for all rows, as they come.

    Args:
        batches: as the module gets them.
        count: how many.
        rows: that train on them.
    """

    def __init__(self, batches: Iterator[Any], count: int, rows: int) -> None:
        self._batches, self.lengths = batches, [count] * rows

    def at(self, clients: Sequence[int], step: int) -> Iterator[tuple[list[int], Any]]:
        yield list(range(len(clients))), next(self._batches)


def _shape(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        raise ConfigurationError(
            f'engine="vmap" stacks the clients\' batches, which have to hold tensors only, and one holds a '
            f'{type(leaf).__name__}. Let the data set give tensors, or train with engine="sequential".'
        )
    return leaf.shape
