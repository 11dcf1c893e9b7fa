"""RowTraining: trains many models of one structure at once, batched as stacked tensors, for ``engine="vmap"``.

A step is ``torch.func.vmap`` of ``torch.func.grad_and_value`` of ``training_step``. Each step is traced again, so that
it sees the module's present attributes and the epoch. For an elementwise optimizer a step on the stacked parameters is
the same as one optimizer per row. The results equal those of training one model after the other up to rounding, since
batched kernels sum in another order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, count
from typing import Any, Self

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from flsv.isolation.reachable import find_generators
from flsv.training.algorithms import ClientAlgorithm
from flsv.training.shared_objects import SHARED_TYPES
from flsv.training.swapped_optimizer import initial_state
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import (
    generator_state,
    global_rngs,
    restore_generator,
    restore_global_rngs,
)
from flsv.utilities.stop_signals import stop_if_signaled
from flsv.vmap.row_step import RowStep, State


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

    shares_batch = False

    # The module's training_step runs under torch.func, so it must not read a tensor's values (.item()), and may change
    # nothing in the module but buffers. The optimizer must be elementwise. Its class and options are used, and its
    # state is not changed. A parameter that a step's loss does not depend on takes no step, as without batching.
    # `unused` names parameters of which this is expected in all steps. A client algorithm adds proximal gradients.

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        clip: Callable[[State], None] | None = None,
        unused: Collection[str] = (),
        algorithm: ClientAlgorithm | None = None,
    ) -> None:
        self._module = module
        self._optimizer = optimizer
        self._clip = clip
        self._algorithm = algorithm
        self._names_by_group = names_of_trained(module, optimizer)
        self.trained_names = set(chain.from_iterable(self._names_by_group))
        self._step = RowStep(module, sorted(self.trained_names), self.shares_batch, unused)

    @classmethod
    def of(
        cls,
        trainer: L.Trainer,
        unused: Collection[str] = (),
        algorithm: ClientAlgorithm | None = None,
    ) -> Self:
        """Make the training of rows of a Trainer's module."""
        return cls(
            trainer.lightning_module,
            trainer.optimizers[0],
            clip_function(trainer),
            unused,
            algorithm,
        )

    def train(self, states: State, batches: Sequence[Sequence[Any]]) -> tuple[State, Tensor]:
        """Train m models, each on its own list of batches. Return their states and mean losses ``[m]``."""
        # Each state is [m, *shape]. For a name without an entry in states all rows use the module's own, which steps
        # must not change. Models with more batches come first, so that those that still train are the first ones.
        models = list(range(len(batches)))
        order = sorted(models, key=lambda model: -len(batches[model]))
        if order == models:
            return states, self._train_sorted(states, batches)

        device = next(iter(states.values())).device
        indices = torch.tensor(order, device=device)
        sorted_states = _select_models(states, indices)
        losses = self._train_sorted(sorted_states, [batches[model] for model in order])
        original_order = indices.argsort()
        return _select_models(sorted_states, original_order), losses[original_order]

    def _train_sorted(
        self,
        states: State,
        batches: Sequence[Sequence[Any]],
    ) -> Tensor:
        """Train models in place, those with more batches first. Return their mean losses ``[m]``."""
        device = next(iter(states.values())).device
        num_batches = [len(batches_of_model) for batches_of_model in batches]  # descending
        losses = torch.zeros(len(batches), device=device)
        optimizer = self._make_optimizer(states)
        for step in range(num_batches[0]):
            stop_if_signaled()
            num_active = sum(count > step for count in num_batches)
            # Views of the models that have a batch left. A step changes the states and losses behind them.
            active_states = {name: tensor[:num_active] for name, tensor in states.items()}
            active_batches = [batches_of_model[step] for batches_of_model in batches[:num_active]]
            gradients = self.compute_gradients(active_states, active_batches, losses[:num_active])
            optimizer.step(num_active, gradients)
        losses /= torch.tensor(num_batches, device=device)
        return losses

    def _make_optimizer(self, states: State) -> StackedOptimizer:
        return StackedOptimizer(
            self._optimizer,
            self._names_by_group,
            states,
            clip=self._clip,
            algorithm=self._algorithm,
        )

    def compute_gradients(self, states: State, batches: Sequence[Any], losses: Tensor) -> State:
        """Return the gradients of stacked models, without those of unused parameters. Add to ``losses``, and update
        buffers in place.
        """
        gradients: State = {}
        used_names: Collection[str] | None = None
        # Models whose batches have the same shape take one step together.
        for positions, batch in stacked_batches(batches):
            if len(positions) == len(batches):  # all have one shape: no model is copied
                gradients, step_losses = self._step(states, batch)
                losses += step_losses
                break

            indices = torch.tensor(positions, device=losses.device)
            selected_states = _select_models(states, indices)
            selected_gradients, step_losses = self._step(selected_states, batch)
            if used_names is not None and used_names != selected_gradients.keys():
                raise ConfigurationError(
                    "which parameters have gradients depends on the size of a batch"
                )
            used_names = selected_gradients.keys()
            # Write the rows of these models into the results of all.
            losses.index_add_(0, indices, step_losses.to(losses))
            for name, gradient in selected_gradients.items():
                if name not in gradients:
                    gradients[name] = torch.empty_like(states[name])
                gradients[name][indices] = gradient
            buffer_names = states.keys() - self.trained_names
            for name in buffer_names:
                states[name][indices] = selected_states[name]
        return gradients


class SharedBatchTraining(RowTraining):
    """Training of m models of one structure on the same batches, such as a client's models in m coalitions.

    A step of all models draws the random numbers that a step of one model draws. So if ``batches`` are loaded one by
    one, each model sees the numbers that it sees if it is trained alone.
    """

    shares_batch = True

    def train(
        self,
        states: State,
        batches: Sequence[Iterable[Any]],
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
        chunk: int | None = None,
        indices: Iterable[int] | None = None,
    ) -> tuple[State, Tensor]:
        """Train m models in place, ``chunk`` models in a step. ``batches`` has the same batches m times. Return the
        models' states and mean losses ``[m]``. ``indices`` are the batches' ``batch_idx``, by default 0, 1, 2, ...
        """
        some_tensor = next(iter(states.values()))
        num_models = len(some_tensor)
        losses = torch.zeros(num_models, device=some_tensor.device)
        chunk = chunk or num_models
        chunks = []
        for first in range(0, num_models, chunk):
            rows = slice(first, first + chunk)
            states_of_chunk = {name: tensor[rows] for name, tensor in states.items()}
            optimizer = self._make_optimizer(states_of_chunk)
            chunks.append((states_of_chunk, losses[rows], optimizer))
        own_generators = find_generators(self._module, closed=SHARED_TYPES)
        num_batches = 0
        for index, batch in zip(indices or count(), batches[0]):
            stop_if_signaled()
            num_batches += 1
            self._step.set_batch_index(index)
            global_states = global_rngs()
            own_states = [generator_state(generator) for generator in own_generators]
            for number, (states_of_chunk, losses_of_chunk, optimizer) in enumerate(chunks):
                if number > 0:  # each chunk draws the same numbers
                    restore_global_rngs(global_states)
                    for generator, state in zip(own_generators, own_states):
                        restore_generator(generator, state)
                with context():
                    gradients, step_losses = self._step(states_of_chunk, batch)
                losses_of_chunk += step_losses
                optimizer.step(len(losses_of_chunk), gradients)
        losses /= num_batches
        return states, losses


def names_of_trained(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of the parameters that an optimizer trains, for each of its groups."""
    name_by_parameter = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            name_by_parameter[parameter] = name

    names_by_group = []
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter in name_by_parameter]
        names_by_group.append([name_by_parameter[parameter] for parameter in trained])
    return names_by_group


def _select_models(states: State, index: Tensor) -> State:
    """Return copies of the models at the indices ``index``."""
    return {name: tensor.index_select(0, index) for name, tensor in states.items()}


def stacked_batches(batches: Sequence[Any]) -> Iterator[tuple[list[int], Any]]:
    """Stack batches of the same size, and yield the stacks with their positions.

    Example:
        >>> many = stacked_batches([torch.zeros(4, 2), torch.ones(4, 2), torch.ones(3, 2)])
        >>> [(positions, list(batch.shape)) for positions, batch in many]
        [([0, 1], [2, 4, 2]), ([2], [1, 3, 2])]
    """
    # A batch is a tree, such as a tuple or a dict, whose leaves are tensors. Several models may share one batch.
    leaves_by_id: dict[int, list[Tensor]] = {}
    structures_by_id: dict[int, Any] = {}
    shapes_by_id: dict[int, Any] = {}
    positions_by_shapes = defaultdict[Any, list[int]](list)
    for position, batch in enumerate(batches):
        if id(batch) not in leaves_by_id:
            leaves, structures_by_id[id(batch)] = tree_flatten(batch)
            _check_are_tensors(leaves)
            leaves_by_id[id(batch)] = leaves
            shapes_by_id[id(batch)] = tuple(leaf.shape for leaf in leaves)
        positions_by_shapes[shapes_by_id[id(batch)]].append(position)

    for positions in positions_by_shapes.values():
        ids = [id(batches[position]) for position in positions]
        distinct_ids = list(dict.fromkeys(ids))
        # The tensors at one place in all batches of the group are stacked.
        leaves_of_group = zip(*(leaves_by_id[distinct_id] for distinct_id in distinct_ids))
        stacked_leaves = [torch.stack(tensors) for tensors in leaves_of_group]
        if len(distinct_ids) < len(ids):
            row_by_id = {distinct_id: row for row, distinct_id in enumerate(distinct_ids)}
            rows = torch.tensor([row_by_id[batch_id] for batch_id in ids])
            stacked_leaves = [leaf.index_select(0, rows.to(leaf.device)) for leaf in stacked_leaves]
        yield positions, tree_unflatten(stacked_leaves, structures_by_id[ids[0]])


def _check_are_tensors(leaves: Sequence[Any]) -> None:
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise ConfigurationError(
                f'engine="vmap" stacks the clients\' batches, which must hold tensors only, but a batch holds a '
                f'{type(leaf).__name__}. Return tensors from the data set, or set engine="sequential".'
            )


class StackedOptimizer:
    """Optimizer of m stacked models, which are sorted by falling number of steps. Before a step it adds the proximal
    gradients of ``algorithm``, and clips.
    """

    def __init__(
        self,
        template: Optimizer,
        names_by_group: list[list[str]],
        stacked: State,
        clip: Callable[[State], None] | None,
        algorithm: ClientAlgorithm | None,
    ) -> None:
        self._stacked = stacked
        self._names_by_group = names_by_group  # of the parameters to train
        self._clip = clip
        self._algorithm = algorithm
        self._num_active = len(next(iter(stacked.values())))
        self._views = self._views_of_first(self._num_active)
        # Only a client algorithm reads them.
        self._initial: State = {}
        if algorithm is not None:
            self._initial = {name: view.clone() for name, view in self._views.items()}
        groups = []
        for group, names in zip(template.param_groups, names_by_group):
            views = [self._views[name] for name in names]
            groups.append({**group, "params": views})  # with the template's options
        optimizer_class: Any = type(template)
        self._optimizer = optimizer_class(groups)
        # The constructor has not got those options of the template that belong to no group.
        self._optimizer.state.update(initial_state(template, groups))

    @torch.no_grad()
    def step(self, num_active: int, gradients: State) -> None:
        """Take a step of the first ``num_active`` models. The others take no further steps."""
        if num_active != self._num_active:
            self._restrict_to_first(num_active)
        if self._algorithm is not None:
            self._algorithm.add_proximal_gradients(
                [self._views[name] for name in gradients],
                [*gradients.values()],
                [self._initial[name][:num_active] for name in gradients],
            )
        if self._clip is not None:
            self._clip(gradients)
        for name, view in self._views.items():
            view.grad = gradients.get(name)  # without a gradient, it takes no step
        self._optimizer.step()

    def _views_of_first(self, num_active: int) -> State:
        """Return views of the trained parameters of the first ``num_active`` models, by name."""
        views = {}
        for names in self._names_by_group:
            for name in names:
                views[name] = self._stacked[name][:num_active]
        return views

    def _restrict_to_first(self, num_active: int) -> None:
        """Restrict the optimizer and its state to the first ``num_active`` models."""
        # Views of the models that still have batches take the place of the former views, with their state.
        views = self._views_of_first(num_active)
        for group, names in zip(self._optimizer.param_groups, self._names_by_group):
            group["params"] = [views[name] for name in names]

        for name, former_view in self._views.items():
            former_state = self._optimizer.state.pop(former_view, {})
            state = {}
            for key, value in former_state.items():
                # Other values, such as a counter of steps, are the same for all models.
                is_stacked = isinstance(value, Tensor) and value.shape == former_view.shape
                state[key] = value[:num_active] if is_stacked else value
            self._optimizer.state[views[name]] = state
        self._views = views
        self._num_active = num_active


def clip_function(trainer: L.Trainer) -> Callable[[State], None] | None:
    """Return a function that clips each model's gradients ``[m, ...]`` in place, None without clipping."""
    limit: Any = trainer.gradient_clip_val
    if limit is None or limit <= 0:  # as for Lightning
        return None
    if trainer.gradient_clip_algorithm == "value":
        return partial(_clip_values, limit=limit)
    return partial(clip, limit=limit)


def clip(gradients: State, limit: float) -> None:
    """Clip the norm of every model's gradients ``[m, ...]``, in place."""
    # Each gradient is [m, *shape] for m models.
    if not gradients:
        return
    norms_of_parameters = []
    for gradient in gradients.values():
        if gradient.ndim > 1:
            norms_of_parameters.append(gradient.flatten(1).norm(dim=1))
        else:
            norms_of_parameters.append(gradient.abs())
    norms = torch.stack(norms_of_parameters).norm(dim=0)  # [m]
    factors = (limit / (norms + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
    for gradient in gradients.values():
        trailing_ones = [1] * (gradient.ndim - 1)
        gradient.mul_(factors.view(-1, *trailing_ones))  # factors [m, 1, 1, ...]


def _clip_values(gradients: State, limit: float) -> None:
    for gradient in gradients.values():
        gradient.clamp_(-limit, limit)
