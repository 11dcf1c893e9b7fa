"""ParameterSpace, the map between a module's floating-point state and one flat vector."""
# The vector holds the parameters first, then the persistent floating-point buffers (BatchNorm's running statistics),
# but no integer buffers. So a coalition's model and the aggregate are products with the cohort's [k, P] matrix.

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flsv.utilities.classifier_head import find_head
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.plain_values import has_floats, is_dense


@dataclass(frozen=True)
class Head:
    """Position of the classifier head's weights and bias in a model vector ``[P]``."""

    name: str
    num_classes: int
    weight: slice
    bias: slice | None

    def rows(self, vectors: Tensor, include_bias: bool = True) -> Tensor:
        """Select the head's weights ``[..., M, D]`` from ``vectors [..., P]``, with the bias ``[..., M, D+1]``."""
        weight = vectors[..., self.weight]  # [..., M * features]
        rows = weight.unflatten(-1, (self.num_classes, -1))  # [..., M, features]
        if not include_bias or self.bias is None:
            return rows
        bias = vectors[..., self.bias].unsqueeze(-1)  # [..., M, 1]
        return torch.cat([rows, bias], dim=-1)


class ParameterSpace:
    """The map between a module's floating-point state and vectors ``[P]``.

    The space stores names, shapes and positions, not the module. Any module of the same structure can be read and
    written. :meth:`unflatten` also takes a stack of vectors (for ``torch.func.functional_call`` under ``vmap``).

    Args:
        module: a module of the structure to map. Parameters that several layers share appear once.
        head: the name of the classifier head as in ``module.named_modules()``. By default timm's ``get_classifier()``
            where a submodule has one, else the last ``nn.Linear``, if it is trained.
        private: patterns (``fnmatch``) of the names of parameters and floating-point buffers that each client keeps to
            itself, outside of the vector.
        kept_names: names of further parameters and persistent buffers, including integer ones, that each client keeps
            to itself.
        constant: names of parameters that never change, outside of the vector.
        non_finite: names of tensors that the vector does not hold although they are finite now, because they were not
            finite when a resumed run began.

    Attributes:
        size: P, the length of the vector.
        names: names of the parameters and buffers that the vector holds, in its order.
        private_names: names of the parameters and buffers that each client keeps to itself.
        kept_names: those of ``private_names`` that are in the argument ``kept_names``.
        constant_names: names of the parameters that are not in the vector and are the same at all clients.
        non_finite_names: names of other buffers and frozen parameters with elements that are not finite, such as
            attention masks of -inf. Their averages would be NaN, so the vector does not hold them. Clients must not
            change them.
        num_parameters: the length of the vector's first part, the parameters. The rest are buffers.
        head: the :class:`Head`. None if there is none, or the vector does not hold the head's weights.
        unshared_head: the head's name if the vector does not hold the head's weights, else None.
        why_no_head: the reason why the module has no ``head``. Else empty.

    Raises:
        ConfigurationError: there are no parameters, some are complex, or ``head`` is unknown or names a layer without a
            weight matrix.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> space = ParameterSpace(net)
        >>> space.size, space.head.name, space.head.num_classes
        (15, '1', 3)
        >>> vector = space.read(net)
        >>> space.write(net, torch.zeros(15))
        >>> net[1].bias.tolist()
        [0.0, 0.0, 0.0]
        >>> space.head.rows(vector).shape
        torch.Size([3, 5])
    """

    def __init__(
        self,
        module: nn.Module,
        head: str | None = None,
        private: Sequence[str] = (),
        *,
        kept_names: Collection[str] = (),
        constant: Collection[str] = (),
        non_finite: Collection[str] = (),
    ) -> None:
        _check_has_parameters(module)
        float_state = dict(_float_state(module))
        _check_values(float_state)
        self._floating = frozenset(float_state)
        self._assign_names(module, private, kept_names=kept_names, candidate_constants=constant)
        self.non_finite_names = self._frozen_not_finite(float_state, former_names=non_finite)
        self._excluded = self._private_set.union(self._constant_set, self.non_finite_names)
        shared = self._shared_state(float_state, private)

        self.names = tuple(shared)
        self.shapes = tuple(tensor.shape for tensor in shared.values())
        self._sizes = [tensor.numel() for tensor in shared.values()]
        self.size = sum(self._sizes)
        # Parameters come first in the vector, then buffers.
        self._num_parameter_tensors = sum(name in shared for name, _ in module.named_parameters())
        self.num_parameters = sum(self._sizes[: self._num_parameter_tensors])
        # Averages of half-precision models are taken in float32.
        dtypes = [tensor.dtype for tensor in shared.values()]
        self.dtype = reduce(torch.promote_types, dtypes, torch.float32)

        # If there is no head, `_locate_head` sets the reason.
        self.unshared_head: str | None = None
        self.why_no_head = ""
        self.head = self._locate_head(module, head)

    def _shared_state(
        self,
        float_state: Mapping[str, Tensor],
        private: Sequence[str],
    ) -> dict[str, Tensor]:
        entries = float_state.items()
        shared = {name: tensor for name, tensor in entries if name not in self._excluded}
        if self._excluded and not shared:
            raise ConfigurationError(
                f"private={list(private)} excludes all parameters and buffers of the module, so there is no model to "
                "share."
            )
        _check_real(shared)
        return shared

    def _assign_names(
        self,
        module: nn.Module,
        patterns: Sequence[str],
        *,
        kept_names: Collection[str],
        candidate_constants: Collection[str],
    ) -> None:
        """Determine which tensors each client keeps to itself, and which are constant."""
        # A client keeps floating-point tensors whose names match a pattern, and those in `kept_names` (a name may be
        # both), also integer ones. Candidates that match no pattern are constant. All names are in the module's order.
        private_by_pattern = set()
        for name in self._floating:
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                private_by_pattern.add(name)
        self._private_set = private_by_pattern.union(kept_names)
        self._constant_set = set(candidate_constants) - private_by_pattern

        names = [name for name, _ in named_state(module)]
        self.private_names = tuple(name for name in names if name in self._private_set)
        self.kept_names = tuple(name for name in names if name in kept_names)
        self.constant_names = tuple(name for name in names if name in self._constant_set)

    def _frozen_not_finite(
        self, state: Mapping[str, Tensor], former_names: Collection[str]
    ) -> tuple[str, ...]:
        """Return the names of tensors that are neither private, constant nor trained, and are or were not finite."""
        names = []
        for name, tensor in state.items():
            if name in self._private_set or name in self._constant_set:
                continue
            is_frozen = not tensor.requires_grad
            if name in former_names or (is_frozen and not tensor.isfinite().all()):
                names.append(name)
        return tuple(names)

    def read(
        self,
        module: nn.Module,
        out: Tensor | None = None,
    ) -> Tensor:
        """Copy the module's state into ``out [P]``, by default a new vector, and return it."""
        tensors = self._shared_tensors(module)
        if out is None:
            device = tensors[0].device if tensors else None
            out = torch.empty(self.size, dtype=self.dtype, device=device)
        detached = [tensor.detach() for tensor in tensors]
        views = self._views(out)  # one for each tensor
        torch._foreach_copy_(views, detached)
        return out

    @torch.no_grad()
    def write(self, module: nn.Module, vector: Tensor) -> None:
        """Copy a vector of length :attr:`size` into the module's parameters and buffers, in place."""
        if vector.shape != (self.size,):
            raise ValueError(
                f"expected a vector of shape ({self.size},), got {tuple(vector.shape)}."
            )
        torch._foreach_copy_(self._shared_tensors(module), self._views(vector))

    def check(self, module: nn.Module) -> None:
        """Raise ConfigurationError if the module's tensors have other names or shapes than this space's."""
        tensors = dict(_float_state(module))
        names = tensors.keys()
        if names == self._floating:
            self._check_shapes(tensors)
            return
        added = sorted(names - self._floating)
        removed = sorted(self._floating - names)
        raise ConfigurationError(
            f"the module's parameters and buffers have changed since the fit began: {added} are new, {removed} are "
            "missing. The clients' models need the same parameters in all rounds. Make the new ones in the module's "
            "__init__, or in its setup, where trainer.datamodule has the data (the weight of a loss). A callback that "
            "makes them has to come before FederatedLoop."
        )

    def _check_shapes(self, tensors: Mapping[str, Tensor]) -> None:
        changes = [
            f"{name} was {list(shape)} and is {list(tensors[name].shape)}"
            for name, shape in zip(self.names, self.shapes)
            if tensors[name].shape != shape
        ]
        if changes:
            raise ConfigurationError(
                f"training changes the sizes of the module's parameters or buffers: {listed(changes)}. Models of "
                "different sizes cannot be averaged. Set a buffer's size in __init__, or register it with "
                "persistent=False."
            )

    def read_private(self, module: nn.Module) -> dict[str, Tensor]:
        """Return copies of the parameters and buffers that the client keeps to itself, ``{name: tensor}``."""
        if not self.private_names:
            return {}
        return {
            name: tensor.detach().clone()
            for name, tensor in named_state(module)
            if name in self._private_set
        }

    @torch.no_grad()
    def write_private(
        self,
        module: nn.Module,
        tensors: Mapping[str, Tensor],
    ) -> None:
        """Write the parameters and buffers that the client keeps to itself into the module."""
        if not tensors:
            return
        for name, tensor in named_state(module):
            if name in tensors:
                tensor.copy_(tensors[name])

    def constants(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the parameters of ``module`` that are in :attr:`constant_names`, ``{name: parameter}``."""
        if not self._constant_set:
            return {}
        parameters = dict(module.named_parameters())
        return {name: parameters[name] for name in parameters if name in self._constant_set}

    def described(self) -> dict[str, str]:
        """Describe, ``{kind: text}``, how many tensors are shared, private and constant, with their names' hash."""
        names_by_part = {
            "shared": self.names,
            "private": self.private_names,
            "constant": self.constant_names,
        }
        descriptions = {}
        for part, names in names_by_part.items():
            digest = hashlib.sha256(repr(names).encode()).hexdigest()
            descriptions[part] = f"{len(names)} tensors ({digest[:8]})"
        return descriptions

    def _shared_tensors(self, module: nn.Module) -> list[Tensor]:
        tensors = [tensor for name, tensor in _float_state(module) if name not in self._excluded]
        # Training or a callback may have changed the module after the round's check.
        if [tensor.shape for tensor in tensors] != list(self.shapes):
            self.check(module)  # raises an error that names the tensors
        return tensors

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Split vectors ``[..., length]`` into views ``{name: tensor [..., *shape]}``. The length is :attr:`size`, or
        :attr:`num_parameters` for parameters only.
        """
        if vector.shape[-1] == self.size:
            sizes = self._sizes
        else:  # a vector of the parameters without buffers
            sizes = self._sizes[: self._num_parameter_tensors]

        tensors = {}
        parts = vector.split(sizes, dim=-1)
        for name, part, shape in zip(self.names, parts, self.shapes):
            if shape:
                tensors[name] = part.unflatten(-1, shape)
            else:
                tensors[name] = part.squeeze(-1)
        return tensors

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Concatenate named tensors ``[..., *shape]`` into new vectors ``[..., size]``, the inverse of
        :meth:`unflatten`.
        """
        vectors = []
        for name, shape in zip(self.names, self.shapes):
            tensor = tensors[name]
            vector = tensor.flatten(-len(shape)) if shape else tensor[..., None]
            vectors.append(vector.to(self.dtype))
        return torch.cat(vectors, dim=-1)

    def _views(self, vector: Tensor) -> list[Tensor]:
        parts = vector.split(self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes)]

    def _slices(self) -> dict[str, slice]:
        slices = {}
        begin = 0
        for name, size in zip(self.names, self._sizes):
            slices[name] = slice(begin, begin + size)
            begin += size
        return slices

    def _locate_head(self, module: nn.Module, requested: str | None) -> Head | None:
        layer_name, self.why_no_head = find_head(module, requested)
        if layer_name is None:
            return None
        layer = module.get_submodule(layer_name)
        weight_name, bias_name = _names_in_model(module, layer)
        if weight_name in self._excluded:
            self.unshared_head = layer_name
            self.why_no_head = f"its head {layer_name!r} is not shared"
            return None

        shape_by_name = dict(zip(self.names, self.shapes))
        if weight_name is None or len(shape_by_name[weight_name]) < 2:  # no matrix
            if requested is not None:
                raise _no_weight_matrix(layer_name, layer)
            # A layer that is found without a request is linear. Its weight is computed, as by weight_norm.
            self.why_no_head = (
                f"the weight of its head {layer_name!r} is computed from other tensors"
            )
            return None

        num_classes = shape_by_name[weight_name][0]
        slice_by_name = self._slices()
        bias = None if bias_name is None else slice_by_name.get(bias_name)
        return Head(layer_name, num_classes, weight=slice_by_name[weight_name], bias=bias)


def _no_weight_matrix(layer_name: str, layer: nn.Module) -> ConfigurationError:
    return ConfigurationError(
        f"head={layer_name!r} ({type(layer).__name__}) has no weight matrix with a row per class. "
        "Name the last linear layer of the classifier."
    )


def _names_in_model(module: nn.Module, layer: nn.Module) -> tuple[str | None, str | None]:
    # Tensors are found by identity, since a weight that several layers share has one name.
    name_by_tensor = {id(tensor): name for name, tensor in _float_state(module)}
    weight_name = name_by_tensor.get(id(_stored_tensor(layer, "weight")))
    bias_name = name_by_tensor.get(id(_stored_tensor(layer, "bias")))
    return weight_name, bias_name


def _stored_tensor(layer: nn.Module, name: str) -> Tensor | None:
    """Return a layer's parameter or buffer, without computing it from others as a parametrization does."""
    for tensors in (layer._parameters, layer._buffers):
        if name in tensors:
            return tensors[name]
    return None


def named_state(
    module: nn.Module,
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, tensor)`` of the parameters, floating-point buffers and other persistent buffers."""
    yield from _float_state(module)
    yield from _buffers(module, floating=False)


def _float_state(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return ``(name, tensor)`` of the parameters and the persistent floating-point buffers."""
    return [*module.named_parameters(), *_buffers(module, floating=True)]


def _buffers(
    module: nn.Module,
    floating: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, tensor)`` of a module's persistent buffers, either floating-point ones or the others."""
    yielded_ids = set()  # several layers may share a buffer
    for prefix, layer in module.named_modules():
        for name, buffer in layer._buffers.items():
            if buffer is None or name in layer._non_persistent_buffers_set:
                continue
            if id(buffer) in yielded_ids:
                continue
            if has_floats(buffer) == floating:
                yielded_ids.add(id(buffer))
                full_name = f"{prefix}.{name}" if prefix else name
                yield full_name, buffer


def _check_has_parameters(module: nn.Module) -> None:
    if next(module.parameters(), None) is None:
        raise ConfigurationError(
            f"{type(module).__name__} has no parameters, so there is nothing to train or to average. Give it a "
            "parameter, or evaluate it without a federation: Trainer.validate."
        )


def _check_values(state: Mapping[str, Tensor]) -> None:
    """Raise ConfigurationError if a parameter has no shape or is not dense, or a trainable one is not finite."""
    lazy_names = [name for name, tensor in state.items() if is_lazy(tensor)]
    if lazy_names:
        raise ConfigurationError(
            f"{lazy_names} have no shape before the first batch (lazy layers), but a federation starts by sending the "
            "model to all clients. Set the layers' sizes, or run a batch through the module before the fit."
        )

    other_names = [name for name, tensor in state.items() if not is_dense(tensor)]
    if other_names:
        raise ConfigurationError(
            f"{listed(other_names, show=repr)} is sparse, nested, quantized or on the meta device, but only dense "
            "parameters can be averaged. Register tensors that are not trained as buffers."
        )

    broken_names = []
    for name, tensor in state.items():
        if tensor.requires_grad and not tensor.isfinite().all():
            broken_names.append(name)
    if broken_names:
        raise ConfigurationError(
            f"the parameters {broken_names} hold NaN or infinite values before training starts. Initialize them, or "
            "set requires_grad=False if they are constants."
        )


def _check_real(state: Mapping[str, Tensor]) -> None:
    complex_names = [name for name, tensor in state.items() if tensor.is_complex()]
    if complex_names:
        raise ConfigurationError(
            f"{listed(complex_names, show=repr)} is complex, but only real numbers can be averaged. Store its real and "
            "imaginary parts."
        )
