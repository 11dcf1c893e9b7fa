"""ParameterSpace, the map between a module's floating-point state and one flat vector."""
# The vector holds the parameters first, then the persistent floating-point buffers (BatchNorm's running statistics),
# but no integer buffers. So a coalition's model and the aggregate are products with the cohort's [k, P] matrix.

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flsv.utilities.classifier_head import head_name
from flsv.utilities.errors import ConfigurationError, listed


@dataclass(frozen=True)
class Head:
    """Position of the classifier head's weights and bias in a model vector ``[P]``."""

    name: str
    num_classes: int
    weight: slice
    bias: slice | None

    def rows(self, vectors: Tensor, include_bias: bool = True) -> Tensor:
        """Select the head's weights ``[..., M, D]`` from ``vectors [..., P]``, with the bias ``[..., M, D+1]``."""
        rows = vectors[..., self.weight].unflatten(-1, (self.num_classes, -1))
        if include_bias and self.bias is not None:
            rows = torch.cat([rows, vectors[..., self.bias].unsqueeze(-1)], dim=-1)
        return rows


class ParameterSpace:
    """The map between a module's floating-point state and vectors ``[P]``.

    The space stores names, shapes and positions, not the module. Any module of the same structure can be read and
    written. :meth:`unflatten` also takes a stack of vectors (for ``torch.func.functional_call`` under ``vmap``).

    Args:
        module: a module of the structure to map. Parameters that several layers share appear once.
        head: the name of the classifier head as in ``module.named_modules()``. By default timm's ``get_classifier()``
            where a submodule has one, else the last ``nn.Linear``.
        private: patterns (``fnmatch``) of the names of parameters and floating-point buffers that each client keeps to
            itself, outside of the vector.
        kept: names of further parameters and persistent buffers, including integer ones, that each client keeps to
            itself.
        constant: names of parameters that never change, outside of the vector.

    Attributes:
        size: P, the length of the vector.
        names: names of the entries that the vector holds, in its order.
        private_names: names of the entries that each client keeps to itself.
        kept_names: those of ``private_names`` that are in ``kept``.
        constant_names: names of the parameters that are not in the vector and are the same at all clients.
        non_finite_names: names of other buffers and frozen parameters with entries that are not finite, such as
            attention masks of -inf. Their averages would be NaN, so the vector does not hold them. They must not
            change.
        num_parameters: the length of the vector's first part, the parameters. The rest are buffers.
        head: the :class:`Head`. None if there is no linear layer, or the vector does not hold the head's weights.
        unshared_head: the head's name if the vector does not hold the head's weights, else None.

    Raises:
        ConfigurationError: ``head`` is unknown or names a layer without a weight matrix, or parameters are complex.

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
        kept: Collection[str] = (),
        constant: Collection[str] = (),
    ) -> None:
        everything = dict(_float_state(module))
        _check_values(everything)
        self._floating = frozenset(everything)
        matching = {
            name for name in everything if any(fnmatchcase(name, pattern) for pattern in private)
        }
        self.private_names = tuple(n for n, _ in named_state(module) if n in matching or n in kept)
        self.constant_names = tuple(n for n in everything if n in constant and n not in matching)
        self.kept_names = tuple(n for n in self.private_names if n in kept)
        self._private, self._constant = (
            frozenset(self.private_names),
            frozenset(self.constant_names),
        )
        apart = self._private | self._constant
        rest = {n: t for n, t in everything.items() if n not in apart}
        self.non_finite_names = tuple(
            n for n, t in rest.items() if not t.requires_grad and not t.isfinite().all()
        )
        self._excluded = self._private.union(self._constant, self.non_finite_names)
        tensors = {
            name: tensor for name, tensor in rest.items() if name not in self.non_finite_names
        }
        if self._excluded and not tensors:
            raise ConfigurationError(
                f"private={list(private)} leaves nothing of the module to share."
            )
        if complexes := [name for name, tensor in tensors.items() if tensor.is_complex()]:
            raise ConfigurationError(
                f"{listed(complexes, show=repr)} is complex: only real numbers can be averaged."
            )
        self.names = tuple(tensors)
        self.shapes = tuple(tensor.shape for tensor in tensors.values())
        self._sizes = [tensor.numel() for tensor in tensors.values()]
        self.size = sum(self._sizes)
        self._num_parameter_tensors = sum(name in tensors for name, _ in module.named_parameters())
        self.num_parameters = sum(self._sizes[: self._num_parameter_tensors])
        # Averages of half-precision models are taken in float32.
        self.dtype = reduce(
            torch.promote_types, (tensor.dtype for tensor in tensors.values()), torch.float32
        )
        self.unshared_head: str | None = None
        self.head = self._locate_head(module, head)

    def read(self, module: nn.Module, out: Tensor | None = None) -> Tensor:
        """Copy the module's state into ``out [P]``, by default a new vector, and return it."""
        tensors = self._shared(module)
        if out is None:
            out = torch.empty(
                self.size, dtype=self.dtype, device=tensors[0].device if tensors else None
            )
        torch._foreach_copy_(list(self._views(out)), [tensor.detach() for tensor in tensors])
        return out

    @torch.no_grad()
    def write(self, module: nn.Module, vector: Tensor) -> None:
        """Copy a vector of length :attr:`size` into the module's parameters and buffers, in place."""
        if vector.shape != (self.size,):
            raise ValueError(
                f"expected a vector of shape ({self.size},), got {tuple(vector.shape)}."
            )
        torch._foreach_copy_(self._shared(module), list(self._views(vector)))

    def check(self, module: nn.Module) -> None:
        """Check that the module has the same parameters and buffers as this space.

        Raises:
            ConfigurationError: entries were added or removed. The message names them.
        """
        now = dict(_float_state(module))
        known = self._floating
        if now.keys() != known:
            raise ConfigurationError(
                f"the module's parameters and buffers have changed since the fit began: {sorted(now.keys() - known)} "
                f"have come, {sorted(known - now.keys())} have gone. Vectors of the clients' models need the same all "
                "along: change the module before the fit, for example in configure_model, and put a callback that "
                "does so in on_fit_start before FederatedLoop."
            )

    def read_private(self, module: nn.Module) -> dict[str, Tensor]:
        """Return copies of the parameters and buffers that the client keeps to itself, ``{name: tensor}``."""
        if not self.private_names:
            return {}
        return {
            n: tensor.detach().clone() for n, tensor in named_state(module) if n in self._private
        }

    @torch.no_grad()
    def write_private(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Write the parameters and buffers that the client keeps to itself into the module."""
        if tensors:
            for name, tensor in named_state(module):
                if name in tensors:
                    tensor.copy_(tensors[name])

    def constants(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the parameters of ``module`` that are in :attr:`constant_names`, ``{name: parameter}``."""
        if not self._constant:
            return {}
        return {
            name: parameter
            for name, parameter in module.named_parameters()
            if name in self._constant
        }

    def described(self) -> dict[str, str]:
        """Describe, ``{kind: text}``, how many entries are shared, private and constant, with their names' hash."""
        parts = {
            "shared": self.names,
            "private": self.private_names,
            "constant": self.constant_names,
        }
        return {
            part: f"{len(names)} tensors ({hashlib.sha256(repr(names).encode()).hexdigest()[:8]})"
            for part, names in parts.items()
        }

    def _shared(self, module: nn.Module) -> list[Tensor]:
        found = [tensor for name, tensor in _float_state(module) if name not in self._excluded]
        if len(found) != len(self.names):  # a callback changed the module after the round's check
            self.check(module)
        return found

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Split vectors ``[..., length]`` into views ``{name: tensor [..., *shape]}``. The length is :attr:`size`, or
        :attr:`num_parameters` for parameters only.
        """
        sizes = (
            self._sizes
            if vector.shape[-1] == self.size
            else self._sizes[: self._num_parameter_tensors]
        )
        parts = vector.split(sizes, dim=-1)
        return {
            n: p.unflatten(-1, s) if s else p.squeeze(-1)
            for n, p, s in zip(self.names, parts, self.shapes)
        }

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Concatenate named tensors into a new vector of length :attr:`size`, the inverse of :meth:`unflatten`."""
        return torch.cat([tensors[name].reshape(-1).to(self.dtype) for name in self.names])

    def _views(self, vector: Tensor) -> Iterator[Tensor]:
        return (part.view(shape) for part, shape in zip(vector.split(self._sizes), self.shapes))

    def _locate_head(self, module: nn.Module, name: str | None) -> Head | None:
        layers, asked = dict(module.named_modules()), name is not None
        name = head_name(module, name)
        if name is None:
            return None
        known = {id(tensor): tensor_name for tensor_name, tensor in _float_state(module)}
        weight, bias = (
            known.get(id(getattr(layers[name], part, None))) for part in ("weight", "bias")
        )
        if weight in self._excluded:
            self.unshared_head = name
            return None
        shapes = dict(zip(self.names, self.shapes))
        if weight is None or len(shapes[weight]) < 2:
            if not asked:
                return None  # the weight is computed from other tensors, as weight_norm does
            raise ConfigurationError(
                f"head={name!r} ({type(layers[name]).__name__}) has no weight matrix with a row per class; "
                "name the last linear layer of the classifier."
            )
        ends = torch.tensor(self._sizes).cumsum(0).tolist()
        place = {n: slice(end - size, end) for n, end, size in zip(self.names, ends, self._sizes)}
        return Head(name, shapes[weight][0], place[weight], place.get(bias) if bias else None)


def named_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, tensor)`` of the parameters, floating-point buffers and other persistent buffers."""
    yield from _float_state(module)
    yield from _buffers(module, floating=False)


def _float_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, tensor)`` of the parameters and the persistent floating-point buffers."""
    yield from module.named_parameters()
    yield from _buffers(module, floating=True)


def _buffers(module: nn.Module, floating: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, tensor)`` of a module's persistent buffers, either floating-point ones or the others."""
    seen = set()
    for prefix, layer in module.named_modules():
        for name, buffer in layer._buffers.items():
            if buffer is None or name in layer._non_persistent_buffers_set or id(buffer) in seen:
                continue
            if (buffer.is_floating_point() or buffer.is_complex()) == floating:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer


def _check_values(state: Mapping[str, Tensor]) -> None:
    """Raise ConfigurationError if a parameter has no shape, or a trainable one is not finite."""
    lazy = [name for name, tensor in state.items() if is_lazy(tensor)]
    if lazy:
        raise ConfigurationError(
            f"{lazy} have no shape before the first batch (lazy layers), and a federation starts from the model that "
            "all clients are sent. Give the layers their sizes, or run a batch through the module before the fit."
        )
    broken = [
        name
        for name, tensor in state.items()
        if tensor.requires_grad and not tensor.isfinite().all()
    ]
    if broken:
        raise ConfigurationError(
            f"the parameters {broken} hold NaN or infinite values before training starts: initialize them, or set "
            "requires_grad=False where they are constants."
        )


# Methods that share only some entries: FedBN (Li et al., ICLR 2021), FedPer (Arivazhagan et al., 2019), and federated
# training of adapters such as LoRA.
Share = str | list[str] | Callable[[str, Tensor], bool]
"""The entries that are shared: ``"all"``, ``"trainable"``, a list of patterns, or a function of an entry's name and
tensor that returns whether it is shared.
"""

#: Names of normalization layers' classes, also other libraries' (``LlamaRMSNorm``, ``FrozenBatchNorm2d``).
_NORMALISES = re.compile(r"(Batch|Instance|Group|Layer|RMS)_?Norm")

_LORA_A = re.compile(r"\b(lora(?:_embedding)?)_A\b")


def check_share(share: Any) -> None:
    """Check the type of the argument ``FederatedLoop(share=...)``."""
    words = [share] if isinstance(share, str) else share
    if not callable(share) and not (
        isinstance(words, list | tuple)
        and words
        and all(isinstance(word, str) and word.strip("!") for word in words)
    ):
        raise ConfigurationError(
            f'FederatedLoop(share={share!r}): expected "all", "trainable", names such as ["!norm"], or a function.'
        )


class Sharing(NamedTuple):
    """Names of a module's entries that clients keep, and of those that never change."""

    kept: set[str]
    constant: set[str]


def sharing(share: Share, module: nn.Module, head: str | None = None) -> Sharing:
    """Return the names of the module's entries that ``share`` excludes from the model vector."""
    if share == "all":
        return Sharing(set(), set())
    state = dict(named_state(module))
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    excluded: set[str] = set()
    if not isinstance(share, str) and callable(share):
        shared = {name for name, tensor in state.items() if share(name, tensor)}
    else:
        words = [share] if isinstance(share, str) else share
        shared = set(state) if words[0].startswith("!") else set()
        for word in words:
            named = set(_named(word.removeprefix("!"), module, state, frozen, head))
            if not named:
                raise ConfigurationError(
                    f"FederatedLoop(share={share!r}): {word!r} names nothing of the module. It has "
                    f"{listed(list(state), 3, repr)}."
                )
            if word.startswith("!"):
                shared, excluded = shared - named, excluded | named
            else:
                shared, excluded = shared | named, excluded - named
    if not shared & {name for name, tensor in state.items() if tensor.is_floating_point()}:
        raise ConfigurationError(
            f"FederatedLoop(share={share!r}) leaves nothing of the module to share."
        )
    rest = state.keys() - shared
    constant = (rest & frozen) - excluded
    return Sharing(rest - constant, constant)


def warn_of_sharing(space: ParameterSpace, module: nn.Module, evaluated: bool) -> None:
    """Warn if trained tensors stay at the clients, or if both factors of LoRA are averaged.

    ``evaluated`` tells whether each client is evaluated with its own tensors.
    """
    if kept := space.kept_names:
        hint = "" if evaluated else " ClientEvaluation(every=1) evaluates each client with its own."
        warnings.warn(
            f"{len(kept)} tensors stay at their clients ({listed(kept, 3, repr)}), and the server has none of them: "
            f"validation, tests and checkpoints of the global model use their initial values.{hint}",
            stacklevel=2,
        )
    trained = {
        name for name, parameter in module.named_parameters() if parameter.requires_grad
    } & set(space.names)
    pairs = [
        name
        for name in sorted(trained)
        if (b := _LORA_A.sub(r"\1_B", name)) != name and b in trained
    ]
    if pairs:
        warnings.warn(
            f"LoRA's A and B are averaged one by one ({listed(pairs, 3, repr)}), and the product of averages is not "
            "the average of the clients' products B A. Freeze A for exact averages (FFA-LoRA): "
            "flsv.models.lora.freeze_a(module).",
            stacklevel=2,
        )


def _named(
    word: str, module: nn.Module, state: Mapping[str, Tensor], frozen: set[str], head: str | None
) -> Collection[str]:
    """Return the names in ``state`` that match ``word``, a pattern of ``share`` without its ``!``."""
    if word == "all":
        return state
    if word == "trainable":  # of a module that is frozen as a whole, nothing
        return state.keys() - frozen if len(frozen) < sum(1 for _ in module.parameters()) else ()
    if word == "norm":
        norms = [
            each
            for each in module.modules()
            if any(_NORMALISES.search(k.__name__) for k in type(each).__mro__)
        ]
        return _held_by(norms, state)
    if word == "head":
        found = head_name(module, head)
        return () if found is None else _held_by([module.get_submodule(found)], state)
    return [name for name in state if fnmatchcase(name, word)]


def _held_by(layers: Iterable[nn.Module], state: Mapping[str, Tensor]) -> list[str]:
    """Return the names in ``state`` of the layers' own parameters and buffers."""
    own = {
        id(t)
        for layer in layers
        for part in (layer._parameters, layer._buffers)
        for t in part.values()
    }
    return [name for name, tensor in state.items() if id(tensor) in own]
