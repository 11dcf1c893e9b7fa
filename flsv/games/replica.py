"""A copy of the module into which coalition models are loaded, so that the module itself does not change.

Copies a module, and checks the copy.

What a module keeps beside its layers survives ``copy.deepcopy`` bound to the original: a compiled ``forward``, a
lambda, a hook that closes over ``self``. Every model that is loaded into such a copy would be evaluated as the
original, and all coalitions would be worth the same. So a copy has nothing compiled in it, and before the first model
is evaluated a copy is tried: it must answer to its own vector, and not to the original's.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule, external_utils
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from flsv.core.parameter_space import ParameterSpace, plain_tensors
from flsv.games.scores import Scores
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import isolated_rngs

#: Writes model i's vector into a tensor ``[P]``.
Build = Callable[[int, Tensor], None]
Context = Callable[[], AbstractContextManager[Any]]


class Replica:
    """A copy of the module in evaluation mode, with its own vector.

    Args:
        module: what to copy.
        space: the map between vectors and modules.
        context: entered around every forward pass, such as an autocast context.

    Raises:
        ConfigurationError: the module cannot be copied.
    """

    def __init__(self, module: nn.Module, space: ParameterSpace, context: Context | None = None) -> None:
        self.module = copied(module).eval().requires_grad_(False)
        self.space, self.context = space, context or nullcontext
        self.vector = torch.empty(space.size, dtype=space.dtype, device=module_device(module))
        self._held, self._constant = frozenset(space.names), frozenset(space.constant_names)
        self._mine: list[Tensor] = []
        self._theirs: list[Tensor] = []

    def follow(self, module: nn.Module, private: Mapping[str, Tensor] | None = None) -> None:
        """Take from ``module``, now and at every load, what a vector does not hold (counters, masks, private state), or
        from ``private`` what is there by its name."""
        layers = dict(self.module.named_modules())
        for name, _, own, value in plain_tensors(module):
            layers[name.rpartition(".")[0]].__dict__[own] = value.clone()
        private, mine = private or {}, dict(named_tensors(self.module))
        self._mine, self._theirs = [], []
        for name, theirs in named_tensors(module):
            theirs = private.get(name, theirs)
            if name in self._held or name not in mine or mine[name].shape != theirs.shape:
                continue
            mine[name].copy_(theirs.detach())
            if name not in self._constant:  # which no forward pass changes
                self._mine.append(mine[name])
                self._theirs.append(theirs.detach())

    def load(self, build: Build, index: int) -> None:
        """Become model ``index``."""
        build(index, self.vector)
        self.space.write(self.module, self.vector)
        if self._mine:
            torch._foreach_copy_(self._mine, self._theirs)

    @torch.inference_mode(False)
    def check(self, module: nn.Module, x: Any) -> None:
        """Whether this is a copy of ``module``, by its outputs for ``x``: see :func:`check_copies`.

        Raises:
            ConfigurationError: it is not.
        """

        def outputs(vector: Tensor) -> Any:
            self.load(rows_of(vector[None]), 0)
            with isolated_rngs(0, "trial"), self.context():
                return self.module(x)

        check_copies(module, self.space, outputs)


def rows_of(vectors: Tensor) -> Build:
    """Model i is row i of ``vectors [K, P]``."""

    def build(index: int, out: Tensor) -> None:
        out.copy_(vectors[index])

    return build


class VectorEvaluator(ABC):
    """Gives scores of models of one structure, as vectors."""

    space: ParameterSpace

    def __call__(self, vectors: Tensor) -> Scores:
        """The scores of the models in the rows of ``vectors [K, P]``."""
        if vectors.ndim != 2 or vectors.shape[1] != self.space.size:
            raise ValueError(f"expected vectors [K, {self.space.size}], got {list(vectors.shape)}.")
        return self.evaluate(rows_of(vectors), len(vectors))

    @abstractmethod
    def evaluate(self, build: Build, count: int) -> Scores:
        """The scores of ``count`` models that exist one or a chunk at a time; see :data:`Build`."""


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Its parameters, then its buffers."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def module_device(module: nn.Module) -> torch.device:
    """The device of the module's first parameter or buffer."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


#: Of what a change of all weights does to the outputs, how much rounding may do.
_TOLERANCE = 1e-3

AnyModule = TypeVar("AnyModule", bound=nn.Module)

#: Evaluates the model with a vector ``[P]`` in a copy: whatever it gives.
Outputs = Callable[[Tensor], Any]


def copied(module: AnyModule, instead: Mapping[int, Any] | None = None) -> AnyModule:
    """A deep copy that shares factories, and is not compiled.

    What the command line makes optimizers with holds its parser, which takes longer to copy than a small module does,
    and nothing of the module.

    Args:
        module: what to copy.
        instead: by their ``id``, objects of the module to what takes their place in the copy.

    Raises:
        ConfigurationError: it cannot be copied, naming the attributes to blame.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> net.compile()
        >>> copied(net)._compiled_call_impl is None
        True
    """
    memo: dict[int, Any] = {}
    for layer in module.modules():
        memo |= {id(value): value for value in vars(layer).values() if isinstance(value, partial) and _makes(value)}
    memo.update(instead or {})
    try:
        with _OutputsDetached():
            own = copy.deepcopy(module, memo)
    except Exception as error:
        kept = [(prefix, *item) for prefix, layer in module.named_modules() for item in vars(layer).items()]
        kinds = [(".".join(filter(None, (prefix, name))), type(value).__name__) for prefix, name, value in kept]
        blamed = [f"{type(module).__name__}.{name} ({kind})" for name, kind in kinds if f"'{kind}'" in str(error)]
        raise ConfigurationError(
            f"{type(module).__name__} cannot be copied ({error}), and models are evaluated in copies of the module: "
            f"{', '.join(blamed) or 'something that it keeps'} is to blame. Keep generators, locks and open files out "
            "of its attributes, or make them where they are used."
        ) from error
    for layer in module.modules():
        _uncompile(layer, memo[id(layer)], memo)
    return own


class _OutputsDetached(TorchFunctionMode):
    """Within it, a tensor in the middle of a graph is copied without the graph, wherever it is kept: torch copies none
    (an output in a list, a pruned layer's weight)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__ or args[0].is_leaf:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        return memo.setdefault(id(tensor), tensor.detach().clone())


def _makes(factory: partial) -> bool:
    """Whether it makes objects of a class, as optimizers are made from a configuration."""
    command_line = any(type(held).__module__.startswith("jsonargparse.") for held in factory.args)
    return isinstance(factory.func, type) or command_line


def _uncompile(layer: nn.Module, own: nn.Module, memo: dict[int, Any]) -> None:
    vars(own).pop("_compiled_call_impl", None)
    if isinstance(own, OptimizedModule):
        vars(own)["forward"] = own._orig_mod.__call__
        return
    if vars(own).get("_compiler_ctx") is not None:
        vars(own)["_compiler_ctx"] = None  # Lightning's note that it is compiled
    for name, value in vars(layer).items():
        plain = getattr(value, "_torchdynamo_orig_callable", None)
        if plain is not None and name in vars(own) and not isinstance(value, nn.Module):
            if isinstance(plain, FunctionType) and plain.__code__.co_filename == external_utils.__file__:
                plain = plain.__wrapped__  # type: ignore[attr-defined]  # a frame that dynamo puts around torch's own
            vars(own)[name] = copy.deepcopy(plain, memo)  # a method is bound to the copy


@torch.inference_mode(False)
@torch.no_grad()
def check_copies(
    module: nn.Module,
    space: ParameterSpace,
    outputs: Outputs,
    sensitive: bool = True,
) -> None:
    """Whether models that are evaluated in copies of the module are the models that they are said to be.

    Models of random weights, near the module's, are tried, so that a last layer of zeros hides nothing. The module's
    tensors hold other memory meanwhile; what they held is not written.

    Args:
        module: the original.
        space: the map between the module and vectors.
        outputs: evaluates a model in a copy, from the same random state every time.
        sensitive: whether outputs of two models must differ; accuracies of few samples need not.

    Raises:
        ConfigurationError: the outputs depend on the module's weights, or do not depend on the copy's.
    """
    before = space.read(module)
    for scale in (0.3, 0.03, 0.003):
        first, second = (_near(space, before, scale, seed) for seed in (1, 2))
        answer, other = _numbers(outputs(first)), _numbers(outputs(second))
        with _holding(module, space, second):
            again = _numbers(outputs(first))
        # NaN and infinity tell nothing: try weights that are nearer.
        if all(each.isfinite().all() for each in (answer, other)):
            break
    else:
        return
    if not answer.numel():
        return
    moved = (answer - other).abs().max()
    name = type(module).__name__
    independent = answer.shape == again.shape and (answer - again).abs().max() <= _TOLERANCE * moved
    if not independent:
        raise ConfigurationError(
            f"a copy of {name} with weights of its own gives other outputs when the weights of the original change: "
            "something that it keeps or calls is bound to the original, so that models would be evaluated with the "
            "wrong weights. Make a method, as def f(self, x): return self.net(x), of every lambda, function or hook "
            "in its attributes that holds the module or a layer."
        )
    if sensitive and moved == 0:
        raise ConfigurationError(
            f"{name} gives the same outputs whatever its weights are: no model that it is copied for could be told "
            "from another. Let its forward use its layers' weights as they are when it is called (a traced or frozen "
            "network holds others)."
        )


@contextmanager
def _holding(module: nn.Module, space: ParameterSpace, vector: Tensor) -> Iterator[None]:
    """Within it, the module's tensors hold a vector, in other memory: whoever has a tensor sees it."""
    values, named = space.unflatten(vector), dict([*module.named_parameters(), *module.named_buffers()])
    before = {name: named[name].data for name in space.names}
    try:
        for name in space.names:
            named[name].data = values[name].to(named[name].dtype, copy=True)
        yield
    finally:
        for name, data in before.items():
            named[name].data = data


def _near(space: ParameterSpace, vector: Tensor, scale: float, seed: int) -> Tensor:
    """Every parameter moves by a share of its tensor's size; buffers stay positive where they are, as variances do."""
    generator = torch.Generator(vector.device).manual_seed(seed)
    noise = torch.randn(vector.shape, generator=generator, dtype=vector.dtype, device=vector.device)
    cut = space.num_parameters
    noise[cut:] = noise[cut:].abs().clamp(max=3) * (vector[cut:].abs() + 0.1)
    parameters = space.unflatten(vector[:cut]) if cut else {}
    for name, part in space.unflatten(noise[:cut]).items() if cut else ():
        part *= parameters[name].square().mean().sqrt().clamp(min=0.1)
    return vector + scale * noise


def _numbers(outputs: Any) -> Tensor:
    parts = [torch.as_tensor(leaf) for leaf in tree_leaves(outputs) if isinstance(leaf, (Tensor, int, float))]
    kept = [part.detach().double().flatten().cpu() for part in parts if not part.is_complex()]
    return torch.cat(kept) if kept else torch.zeros(0, dtype=torch.float64)
