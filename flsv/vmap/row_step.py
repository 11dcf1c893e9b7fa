"""RowStep: computes the losses and gradients of many models of one structure at once, by their own training_step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call, grad_and_value, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric, MetricCollection

from flsv._lightning.patches import Patch, PatchedAttributes, discarded_logs
from flsv.training.training_step import step_arguments, training_loss
from flsv.utilities.errors import ConfigurationError, NotBatched

State = dict[str, Tensor]


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
        try:
            yield
        finally:
            _forget_weights_of_rows(module)


def _forget_weights_of_rows(module: nn.Module) -> None:
    """Let recurrent layers, which remember the weights of their last step, have the module's again."""
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase):
            layer._init_flat_weights()


def _in_words(module: nn.Module, message: str) -> str | None:
    """Return in words what an error of torch's says of layers that cannot be stacked. None: they are not known."""
    layers = list(module.modules())
    for words_of_torch, is_cause, reason in _CAUSES:
        if words_of_torch in message and any(map(is_cause, layers)):
            return reason
    return None


def _has_cumulative_average(layer: nn.Module) -> bool:
    return isinstance(layer, nn.modules.batchnorm._NormBase) and layer.momentum is None


def _has_spectral_norm(layer: nn.Module) -> bool:
    hooks = map(type, layer._forward_pre_hooks.values())
    return any("SpectralNorm" in kind.__name__ for kind in (type(layer), *hooks))


def _is_sparse(layer: nn.Module) -> bool:
    return bool(getattr(layer, "sparse", False))


def _is_recurrent(layer: nn.Module) -> bool:
    return isinstance(layer, nn.RNNBase)


#: Words of an error of torch's, the layers that cause it, and the reason.
_CAUSES: tuple[tuple[str, Callable[[nn.Module], bool], str], ...] = (
    (
        ".item()",
        _has_cumulative_average,
        "batch normalization with momentum=None reads the value of its counter",
    ),
    (
        "Batching rule not implemented",
        _has_spectral_norm,
        "a spectral norm writes into its buffers by an operation that torch cannot stack",
    ),
    ("Sparse", _is_sparse, "an embedding with sparse=True has gradients that torch cannot stack"),
    ("storage", _is_recurrent, "torch cannot stack a recurrent layer of packed sequences"),
)


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
        reason = _in_words(module, message) or first_line.split(". ")[0].rstrip(".")
        if "broadcast shape" in message:
            reason += ": a step changes in place a tensor that all models share; write x = x + y, not x += y"
        raise not_batched_error(module, reason) from error


def not_batched_error(
    module: nn.Module, reason: str, kind: type[NotBatched] = NotBatched
) -> NotBatched:
    """Return a NotBatched error whose message names the module and ``reason``."""
    return kind(
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


def _silence_metrics(module: nn.Module) -> PatchedAttributes:
    """Silence a module's torchmetrics within this context, since their states cannot be stacked."""
    names = ("forward", "update", "compute", "reset")
    return PatchedAttributes(silent_metrics(module, names, _refuse_in_step))


def silent_metrics(
    module: nn.Module,
    names: Collection[str],
    refuse: Callable[[str], Exception],
) -> list[Patch]:
    """Return changes by which methods of a module's torchmetrics do nothing, and return a number that can only be
    logged.
    """
    changes: list[Patch] = []
    for name, layer in module.named_modules():
        number = UnknownNumber.make(partial(refuse, f"the metric {name!r}"))
        if isinstance(layer, MetricCollection):
            method = partial(_return_constant, dict.fromkeys(layer.keys(), number))
        elif isinstance(layer, Metric):
            method = partial(_return_constant, number)
        else:
            continue
        changes += [(layer, method_name, method) for method_name in names]
    return changes


class UnknownNumber(Tensor):
    """Result of a metric that was not computed. It can be passed on and written, and any other use raises an error."""

    _error: Callable[[], Exception]

    @classmethod
    def make(cls, error: Callable[[], Exception]) -> UnknownNumber:
        number = torch.zeros(()).as_subclass(cls)
        number._error = error
        return number

    def __format__(self, spec: str) -> str:
        return format(float("nan"), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "nan"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _WAYS_TO_PASS_ON:
            return args[0]
        if getattr(func, "__name__", "") == "__get__":  # such as its shape
            return super().__torch_function__(func, types, args, kwargs or {})
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, cls):
                raise value._error()
        return super().__torch_function__(func, types, args, kwargs or {})


_WAYS_TO_PASS_ON = frozenset({"detach", "clone", "cpu", "cuda", "to", "float", "double"})


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
    with PatchedAttributes([(part, "_trainer", trainer) for part in parts]), ExitStack() as stack:
        for part in parts:
            stack.enter_context(discarded_logs(part))
        yield
