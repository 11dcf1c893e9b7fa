"""RowTraining: trains many models of one structure at once, batched as stacked tensors, for ``engine="vmap"``.

A step is ``torch.func.vmap`` of ``torch.func.grad_and_value`` of ``training_step``. Each step is traced again, so that
it sees the module's present attributes and the epoch. For an elementwise optimizer a step on the stacked parameters is
the same as one optimizer per row. The results equal those of training one model after the other up to rounding, since
batched kernels sum in another order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from itertools import count
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call, grad_and_value, vmap
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torchmetrics import Metric, MetricCollection

from flsv._lightning.patches import PatchedAttributes, discarded_logs
from flsv.training.training_step import step_arguments, training_loss
from flsv.utilities.errors import ConfigurationError, NotBatched
from flsv.utilities.seeding import global_rngs, restore_global_rngs

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

    shares_batch = False

    # The module's training_step runs under torch.func, so it must not read a tensor's values (.item()), and may change
    # nothing in the module but buffers. The optimizer must be elementwise. Its class and options are used, and its
    # state is not changed. A parameter that a step's loss does not depend on takes no step, as without batching.
    # `unused` names parameters of which this is expected in all steps.

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        clip: Callable[[State], None] | None = None,
        unused: Collection[str] = (),
    ) -> None:
        self._optimizer = optimizer
        self._clip = clip
        name_by_parameter = {}  # of trained parameters
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                name_by_parameter[parameter] = name

        self._names_by_group: list[list[str]] = []
        self._trained_names: set[str] = set()
        for group in optimizer.param_groups:
            trained = [parameter for parameter in group["params"] if parameter in name_by_parameter]
            names = [name_by_parameter[parameter] for parameter in trained]
            self._names_by_group.append(names)
            self._trained_names.update(names)
        self._step = RowStep(module, sorted(self._trained_names), self.shares_batch, unused)

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
        optimizer = StackedOptimizer(self._optimizer, self._names_by_group, states)
        for step in range(num_batches[0]):
            num_active = sum(count > step for count in num_batches)
            # Views of the models that have a batch left. A step changes the states and losses behind them.
            active_states = {name: tensor[:num_active] for name, tensor in states.items()}
            active_batches = [batches_of_model[step] for batches_of_model in batches[:num_active]]
            gradients = self.compute_gradients(active_states, active_batches, losses[:num_active])
            if self._clip is not None:
                self._clip(gradients)
            optimizer.step(num_active, gradients)
        losses /= torch.tensor(num_batches, device=device)
        return losses

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
            buffer_names = states.keys() - self._trained_names
            for name in buffer_names:
                states[name][indices] = selected_states[name]
        return gradients


class SharedBatchTraining(RowTraining):
    """Training of m models of one structure on the same batches, such as a client's models in m coalitions.

    A step of all models draws the random numbers that a step of one model draws. So if ``batches`` are loaded one by
    one, each model sees the numbers that it sees if it is trained alone.
    """

    shares_batch = True

    def train_shared(
        self,
        states: State,
        batches: Iterable[Any],
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
        chunk: int | None = None,
        indices: Iterable[int] | None = None,
    ) -> tuple[State, Tensor]:
        """Train m models in place on the same batches, ``chunk`` models in a step. Return them and their mean losses
        ``[m]``. ``indices`` are the batches' ``batch_idx``, by default 0, 1, 2, ...
        """
        some_tensor = next(iter(states.values()))
        num_models = len(some_tensor)
        losses = torch.zeros(num_models, device=some_tensor.device)
        chunk = chunk or num_models
        chunks = []
        for first in range(0, num_models, chunk):
            rows = slice(first, first + chunk)
            states_of_chunk = {name: tensor[rows] for name, tensor in states.items()}
            optimizer = StackedOptimizer(self._optimizer, self._names_by_group, states_of_chunk)
            chunks.append((states_of_chunk, losses[rows], optimizer))
        num_batches = 0
        for index, batch in zip(indices or count(), batches):
            num_batches += 1
            self._step.set_batch_index(index)
            generator_states = global_rngs()
            for number, (states_of_chunk, losses_of_chunk, optimizer) in enumerate(chunks):
                if number > 0:
                    restore_global_rngs(generator_states)  # each chunk draws the same numbers
                with context():
                    gradients, step_losses = self._step(states_of_chunk, batch)
                losses_of_chunk += step_losses
                if self._clip is not None:
                    self._clip(gradients)
                optimizer.step(len(losses_of_chunk), gradients)
        losses /= num_batches
        return states, losses


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
    """Optimizer of m stacked models, which are sorted by falling number of steps."""

    def __init__(
        self, template: Optimizer, names_by_group: list[list[str]], stacked: State
    ) -> None:
        self._stacked = stacked
        self._names_by_group = names_by_group  # of the parameters to train
        self._num_active = len(next(iter(stacked.values())))
        self._views = self._views_of_first(self._num_active)
        groups = []
        for group, names in zip(template.param_groups, names_by_group):
            views = [self._views[name] for name in names]
            groups.append({**group, "params": views})  # with the template's options
        # The constructor also makes the state with which Adagrad begins.
        optimizer_class: Any = type(template)
        self._optimizer = optimizer_class(groups)

    @torch.no_grad()
    def step(self, num_active: int, gradients: State) -> None:
        """Take a step of the first ``num_active`` models. The others take no further steps."""
        if num_active != self._num_active:
            self._restrict_to_first(num_active)
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


class BatchIndex:
    """Placeholder for ``batch_idx`` that raises an error when read. Clients are at different batches."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigurationError(
            "training_step reads batch_idx, but clients that train at once are at different batches of their epochs."
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __bool__ = __int__ = __float__ = __index__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __mod__ = __floordiv__ = __truediv__ = _refuse
    __hash__ = __str__ = __format__ = _refuse


# If only linear layers are trained, as in softmax regressions and MLPs, vmap computes the losses only, and autograd
# differentiates their sum, since no model's loss depends on another model. This saves the cost of a transformed
# backward pass per operation, which dominates for small models. Weights W and inputs x then multiply as W x^T: for few
# outputs this batched product takes little more than half the time of x W^T. Convolutions have a slower batched
# backward pass in autograd, and recurrent layers none.
class RowStep:
    """Callable that computes losses of m stacked models, and gradients with respect to ``trained`` parameters, except
    those that the losses do not depend on. ``unused`` names parameters of which this is expected.

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
        shares_batch: bool = False,
        unused: Collection[str] = (),
    ) -> None:
        self._module = module
        self._trained_names = list(trained)
        self._expected_names = set(trained).difference(unused)
        # Whether the loss of the last call depends on each of the trained parameters.
        self._is_used: list[bool] = []
        # If all models share one batch, they also share its random numbers, such as the masks of dropout.
        self._dims = (0, 0, None) if shares_batch else 0
        self._randomness = "same" if shares_batch else "error"
        self.set_batch_index(BatchIndex())
        self._training_step = _TrainingStep(module)
        self._paths = _tensor_paths(module)

    def set_batch_index(self, index: Any) -> None:
        """Set the ``batch_idx`` of the next steps."""
        self._index_arguments = step_arguments(self._module, None, index)[1:]

    @cached_property
    def _trains_linear_layers_only(self) -> bool:
        """Return whether all parameters that are expected to be used are of linear layers and autocast is off."""
        return has_linear_layers_only(self._module, self._expected_names)

    @cached_property
    def _batched_loss(self) -> Any:
        """Return :meth:`_loss_of_one` batched over models by ``vmap``."""
        return vmap(self._loss_of_one, self._dims, randomness=self._randomness)

    @cached_property
    def _batched_gradients(self) -> Any:
        """Return a function of the same arguments as :attr:`_batched_loss`, which returns the gradients, too."""
        gradients_and_loss = grad_and_value(self._loss_and_use_of_one, has_aux=True)
        return vmap(gradients_and_loss, self._dims, randomness=self._randomness)

    def __call__(self, states: State, batch: Any) -> tuple[State, Tensor]:
        """Return gradients ``[m, ...]`` and losses ``[m]`` on batches ``[m, B, ...]``, and update buffers in place."""
        parameters = [states[name] for name in self._trained_names]
        # Buffers, and parameters that are not trained.
        other_tensors = {
            name: tensor for name, tensor in states.items() if name not in self._trained_names
        }
        if self._trains_linear_layers_only:
            compute_gradients = self._gradients_by_autograd
        else:
            compute_gradients = self._gradients_by_transformation
        gradients, losses_and_tensors = compute_gradients(parameters, other_tensors, batch)
        losses, new_tensors = losses_and_tensors
        for name, tensor in new_tensors.items():
            states[name].copy_(tensor.detach())
        gradients_by_name = {}
        for name, gradient in zip(self._trained_names, gradients):
            if gradient is not None:
                gradients_by_name[name] = gradient
        return gradients_by_name, losses.detach()

    def _gradients_by_transformation(
        self, parameters: list[Tensor], other_tensors: State, batch: Any
    ) -> Any:
        """Return what :attr:`_batched_gradients` returns, but None as the gradient of an unused parameter."""
        gradients, losses_and_tensors = self._batched_gradients(parameters, other_tensors, batch)
        # torch.func returns zeros for unused parameters, by which an optimizer with momentum or decay would step.
        used_gradients = []
        for gradient, is_used in zip(gradients, self._is_used):
            used_gradients.append(gradient if is_used else None)
        return used_gradients, losses_and_tensors

    def _gradients_by_autograd(
        self, parameters: list[Tensor], other_tensors: State, batch: Any
    ) -> Any:
        """Return what :meth:`_gradients_by_transformation` returns, by autograd through the sum of the losses."""
        leaves = [tensor.detach().requires_grad_() for tensor in parameters]
        with torch.enable_grad():
            losses, new_tensors = self._batched_loss(leaves, other_tensors, batch)
            gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        return gradients, (losses, new_tensors)

    def _loss_and_use_of_one(
        self, parameters: list[Tensor], other_tensors: State, batch: Any
    ) -> tuple[Tensor, State]:
        """Return what :meth:`_loss_of_one` returns, and store which parameters the loss depends on."""
        loss, new_tensors = self._loss_of_one(parameters, other_tensors, batch)
        nodes = _nodes_of_graph(loss)
        self._is_used = [get_gradient_edge(parameter).node in nodes for parameter in parameters]
        return loss, new_tensors

    def _loss_of_one(
        self, parameters: list[Tensor], other_tensors: State, batch: Any
    ) -> tuple[Tensor, State]:
        """Return one model's loss on one batch, and its updated ``other_tensors``."""
        tensors_by_path = self._tensors_by_path(parameters, other_tensors)
        product_order: AbstractContextManager[Any] = nullcontext()
        if self._trains_linear_layers_only:
            product_order = _WeightFirst(parameters)
        arguments = batch, *self._index_arguments
        with product_order:
            # `_paths` has every name of a tied weight. If torch tied the weights itself, stacked tensors would stay in
            # a layer that has two names.
            outputs = functional_call(
                self._training_step, tensors_by_path, arguments, tie_weights=False
            )

        new_tensors = {}
        for name in other_tensors:
            # Where a step replaces a buffer, functional_call has put the new tensor into `tensors_by_path`.
            first_path = self._paths[name][0]
            new_tensors[name] = tensors_by_path[first_path]
        return training_loss(outputs), new_tensors

    def _tensors_by_path(self, parameters: list[Tensor], other_tensors: State) -> State:
        """Return one model's tensors by all their names in ``_TrainingStep``."""
        tensors = dict(zip(self._trained_names, parameters))
        for name, tensor in other_tensors.items():
            # Tensors that are changed in place within a torch.func transformation must be made within it.
            tensors[name] = tensor.clone()
        tensors_by_path = {}
        for name, tensor in tensors.items():
            for path in self._paths[name]:
                tensors_by_path[path] = tensor
        return tensors_by_path


def has_linear_layers_only(module: nn.Module, names: Collection[str] | None = None) -> bool:
    """Return whether the parameters ``names``, by default all, are of linear layers and autocast is off."""
    # Autocast would round a product of stacked weights differently from a product of one layer's weights.
    device_types = {parameter.device.type for parameter in module.parameters()}
    if any(map(torch.is_autocast_enabled, device_types)):
        return False
    layers = dict(module.named_modules())
    if names is None:
        names = [name for name, _ in module.named_parameters()]
    for name in names:
        layer_name = name.rpartition(".")[0]
        if type(layers[layer_name]) is not nn.Linear:
            return False
    return True


class _TrainingStep(nn.Module):
    """A module whose ``forward`` is the ``training_step`` of another module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module: Any = module

    def forward(self, *arguments: Any) -> Any:
        return self.module.training_step(*arguments)


def _nodes_of_graph(loss: Tensor) -> set[Any]:
    """Return the nodes of autograd's graph of a loss."""
    nodes = set()
    next_nodes = [loss.grad_fn]
    while next_nodes:
        node = next_nodes.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            next_nodes += [next_node for next_node, _ in node.next_functions]
    return nodes


def _tensor_paths(module: nn.Module) -> dict[str, list[str]]:
    """Return ``{name in module: names in _TrainingStep(module)}``, several names for tied weights."""
    name_of_id = {
        id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }

    paths = defaultdict(list)
    for prefix, layer in module.named_modules(prefix="module"):
        layer_tensors = {**layer._parameters, **layer._buffers}
        for name_in_layer, tensor_of_layer in layer_tensors.items():
            if tensor_of_layer is not None:
                name = name_of_id[id(tensor_of_layer)]
                paths[name].append(f"{prefix}.{name_in_layer}")
    return paths


class _WeightFirst(TorchFunctionMode):
    """Mode in which linear layers compute (W x^T)^T + b, which takes less time than x W^T + b if W is stacked over
    models.
    """

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self._weights = set(map(id, weights))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.linear or kwargs:
            return func(*args, **(kwargs or {}))
        inputs, weight, *_ = args
        if id(weight) not in self._weights or inputs.ndim == 1:
            return func(*args)

        flat_inputs = inputs.flatten(0, -2)  # [samples, in]
        products = weight.matmul(flat_inputs.mT).mT  # (W x^T)^T, [samples, out]
        outputs = products.unflatten(0, inputs.shape[:-1])
        bias = args[2] if len(args) > 2 else None
        if bias is not None:
            return outputs + bias
        return outputs


@contextmanager
def batched_steps(trainer: L.Trainer) -> Iterator[None]:
    """Allow steps of stacked models within this context, in the trainer's precision, without logs."""
    module = trainer.lightning_module
    with (
        convert_errors(module),
        deny_client_attributes(module),
        _silence_metrics(module),
        trainer.precision_plugin.train_step_context(),
    ):
        yield


@contextmanager
def convert_errors(
    module: nn.Module,
    expected_errors: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Convert errors of torch.func, ConfigurationErrors and ``expected_errors`` to NotBatched, except out-of-memory
    errors."""
    try:
        yield
    except Exception as error:
        if isinstance(error, NotBatched) or is_oom_error(error):
            raise
        if isinstance(error, ConfigurationError) or "vmap" in str(error):
            message = str(error)
        elif isinstance(error, expected_errors):
            message = f"{type(error).__name__}: {error}"
        else:
            raise  # an error of the module itself

        # The other sentences of torch's messages are advice for its developers.
        first_line = message.splitlines()[0]
        reason = first_line.split(". ")[0].rstrip(".")
        if "broadcast shape" in message:
            reason += ": a step changes in place a tensor that all models share; write x = x + y, not x += y"
        raise not_batched_error(module, reason) from error


def not_batched_error(module: nn.Module, reason: str) -> NotBatched:
    """Return a NotBatched error whose message names the module and ``reason``."""
    return NotBatched(
        f'engine="vmap" trains many clients as one batched model, and training_step of {type(module).__name__} does '
        f'not allow it: {reason}. Change training_step, or set engine="sequential".',
        reason=f"{reason}.",
    )


#: Attributes of a Trainer that belong to the one client that trains in it.
_CLIENT_ATTRIBUTES = frozenset(
    {"callback_metrics", "callbacks", "estimated_stepping_batches", "fit_loop", "global_step"}
    | {"is_last_batch", "logged_metrics", "lr_scheduler_configs", "num_training_batches"}
    | {"optimizers", "progress_bar_metrics", "strategy", "train_dataloader"}
)


class _TrainerOfManyClients:
    """Replacement for the trainer that raises ``refuse(what is read)`` for attributes of a single client."""

    def __init__(self, trainer: L.Trainer, refuse: Callable[[str], Exception]) -> None:
        self._trainer = trainer
        self._refuse = refuse

    def __getattr__(self, name: str) -> Any:
        if name in _CLIENT_ATTRIBUTES:
            raise self._refuse(f"trainer.{name}")
        return getattr(self._trainer, name)


@contextmanager
def _silence_metrics(module: nn.Module) -> Iterator[None]:
    """Make a module's torchmetrics return 0 within this context. Their states cannot be stacked."""
    changes = []
    for layer in module.modules():
        zero = torch.zeros(())
        if isinstance(layer, MetricCollection):
            return_zero = partial(_return_constant, dict.fromkeys(layer.keys(), zero))
        elif isinstance(layer, Metric):
            return_zero = partial(_return_constant, zero)
        else:
            continue
        for name in ("forward", "update", "compute", "reset"):
            changes.append((layer, name, return_zero))
    patches = PatchedAttributes(changes)
    try:
        yield
    finally:
        patches.restore()


def _return_constant(constant: Any, *_: Any, **__: Any) -> Any:
    return constant


def _refuse_in_step(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"training_step reads {what}, which differs between the clients that train at once."
    )


@contextmanager
def deny_client_attributes(
    module: L.LightningModule, refuse: Callable[[str], Exception] = _refuse_in_step
) -> Iterator[None]:
    """Drop what ``training_step`` logs within this context, and raise ``refuse(what it reads)`` if it reads an
    attribute of the trainer that belongs to a single client."""
    trainer = _TrainerOfManyClients(module.trainer, refuse)
    # Layers may be LightningModules, too, which have the module's trainer.
    parts = [layer for layer in module.modules() if isinstance(layer, L.LightningModule)]
    patches = PatchedAttributes([(part, "_trainer", trainer) for part in parts])
    try:
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(discarded_logs(part))
            yield
    finally:
        patches.restore()
