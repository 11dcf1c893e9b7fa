"""The models of one client's coalitions, while it trains: rows of the kernel, which take every batch with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from flsv.clients.algorithms.base import ClientContext
from flsv.clients.kernel import RowTraining
from flsv.clients.pure_steps import NotBatched, batched_steps, purely
from flsv.clients.row_checks import clip_norm
from flsv.clients.row_step import State
from flsv.errors import ConfigurationError
from flsv.metrics.shadow import Part
from flsv.parameters import ParameterSpace
from flsv.seeding import restore_torch_rngs, torch_rngs

#: How far a row may be from the client's own model where both are the same training, relative to how far it went; and
#: in bf16-mixed.
TOLERANCE, ROUNDED = 0.01, 0.1


class Entries:
    """Which entries of a vector are a part of the module.

    Args:
        space: the map between modules and vectors.
        part: see :class:`flsv.metrics.ShadowShapley`.

    Attributes:
        names: of the tensors.
        size: Q, the number of entries.
        num_parameters: how many of them, the leading ones, are parameters'.

    Raises:
        ConfigurationError: the module has no such part.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> head = Entries(ParameterSpace(net), "head")
        >>> head.names, head.of(torch.arange(9.0)).tolist()
        (('1.weight', '1.bias'), [6.0, 7.0, 8.0])
    """

    def __init__(self, space: ParameterSpace, part: Part) -> None:
        self.names = space.names
        if part != "all":
            if part == "head" and space.head is None:
                raise ConfigurationError(
                    'ShadowShapley(part="head"): the module has no linear layer. Name a part by patterns, such as '
                    'part=["classifier.*"].'
                )
            patterns = [f"{space.head.name}.*"] if part == "head" else list(part)  # type: ignore[union-attr]
            self.names = tuple(n for n in space.names if any(fnmatchcase(n, pattern) for pattern in patterns))
        numbers = space.unflatten(torch.arange(space.size))
        self._shapes = [numbers[name].shape for name in self.names]
        self._index = torch.cat([numbers[name].flatten() for name in self.names] or [torch.empty(0, dtype=torch.long)])
        self.size = len(self._index)
        self.num_parameters = int((self._index < space.num_parameters).sum())
        if not self.num_parameters:
            raise ConfigurationError(
                f"ShadowShapley(part={part!r}) matches no parameter of the module, which has {list(space.names)}."
            )

    def of(self, vector: Tensor) -> Tensor:
        """Of a vector ``[P]``: ``[Q]``."""
        return vector[self._index.to(vector.device)]

    def put(self, vector: Tensor, row: Tensor) -> None:
        """Write a row ``[Q]`` into a vector ``[P]``."""
        vector[self._index.to(vector.device)] = row

    def unflatten(self, rows: Tensor) -> State:
        """Rows ``[m, Q]`` as tensors ``[m, ...]`` by name."""
        parts = rows.split([shape.numel() for shape in self._shapes], dim=1)
        return {n: part.reshape(len(rows), *shape) for n, part, shape in zip(self.names, parts, self._shapes)}

    def flatten(self, states: State, like: Tensor) -> Tensor:
        """The inverse, in the dtype of ``like``."""
        return torch.cat([states[name].flatten(1).to(like) for name in self.names], 1)


class CoalitionRows:
    """Trains the coalitions' models of one client at once, in a Trainer's fit of the client's own.

    Args:
        context: the client's.
        rows: ``[m, Q]``, the models of its coalitions, or of a part of them.
        entries: which part.
        kernel: of a visit before.

    Attributes:
        kernel: for the next visit; its recordings are of this one's round.

    Raises:
        ConfigurationError: in the first step, a module that does not allow it; at the end, a model that differs from
            the client's own though both started from the same and took the same batches.
    """

    def __init__(self, context: ClientContext, rows: Tensor, entries: Entries, kernel: RowTraining | None) -> None:
        self._context, self._rows, self._entries, self.kernel = context, rows, entries, kernel
        self._start = entries.of(context.start)
        # At first all coalitions are the initial model: what becomes of one becomes of all, and of the client's own.
        self._alike = bool(len(rows)) and bool((rows == self._start).all())
        self._states: State = {}
        self._batch: Any = None
        self._whole = len(entries.names) == len(context.space.names)
        part = None if self._whole or not len(rows) else entries.names
        self._reused = None if part is None else ReusedOutputs(context.module, part, self._remember)
        self._drawn: Any = None

    def begin_batch(self, batch: Any) -> None:
        """Before the client's own step on it."""
        self._batch = batch
        if self._reused is None:
            self._remember()
        else:
            self._reused.begin()

    def _remember(self) -> None:
        """What the client's own model draws from here on, all draw."""
        self._drawn = torch_rngs(self._rows.device)

    def step(self) -> None:
        """On the same batch; the client's own gradients are there, and it has not taken its step."""
        if not len(self._rows):
            return
        module: Any = self._context.module
        before = self.kernel
        kernel = self._begin(module.trainer) if not self._states else self.kernel
        assert kernel is not None
        gradients = kernel.played(self._batch)
        if gradients is None:
            try:
                with nullcontext() if kernel is before else purely(module), self._as_the_client():
                    gradients = kernel.gradients(self._batch, self._beside())
            except NotBatched as error:
                raise ConfigurationError(
                    f"ShadowShapley trains the models of many coalitions as one batched model, and training_step of "
                    f"{type(module).__name__} does not allow it: {error.reason}. Value the run by flsv retrain."
                ) from error
        kernel.take(gradients)

    def _begin(self, trainer: Any) -> RowTraining:
        module = self._context.module
        own = dict(module.named_parameters())
        rows = self._rows[:1] if self._alike else self._rows
        self._states = {
            name: tensor.to(own[name].dtype if name in own else tensor.dtype, copy=True)
            for name, tensor in self._entries.unflatten(rows).items()
        }
        if self._whole:
            # Counters that no vector holds are, as in a round, not averaged.
            rest = {name: tensor for name, tensor in module.named_buffers() if name not in self._states}
            self._states |= {name: tensor.expand(len(rows), *tensor.shape).clone() for name, tensor in rest.items()}
        apart = {name for name, parameter in own.items() if parameter.grad is None or name not in self._states}
        optimizer, kernel = trainer.optimizers[0], self.kernel
        if kernel is None or (kernel.module, kernel.optimizer, kernel.apart) != (module, optimizer, apart):
            self.kernel = kernel = RowTraining(module, optimizer, clip_norm(trainer), apart, shared=True)
        kernel.begin(self._states)
        return kernel

    def _beside(self) -> State:
        """What is in no row: the client's own, which is not changed."""
        module = self._context.module
        named = (*module.named_parameters(), *module.named_buffers())
        left = {name: tensor for name, tensor in named if name not in self._states}
        return {n: t.detach() if isinstance(t, nn.Parameter) else t.clone() for n, t in left.items()}

    @contextmanager
    def _as_the_client(self) -> Iterator[None]:
        """Within it rows draw what the client's own model has drawn of this batch, and have its features of it."""
        module: Any = self._context.module
        now, device = torch_rngs(self._rows.device), self._rows.device
        restore_torch_rngs(self._drawn or now, device)
        try:
            with batched_steps(module.trainer), nullcontext() if self._reused is None else self._reused.again():
                yield
        finally:
            restore_torch_rngs(now, device)

    def leave(self) -> None:
        """The client has trained, or failed."""
        if self._reused is not None:
            self._reused.remove()

    def trained(self) -> Tensor:
        """``[m, Q]``, what has become of the rows."""
        if not self._states:
            return self._rows
        rows = self._entries.flatten(self._states, self._rows)
        if not self._alike:
            return rows
        context: Any = self._context
        own = self._entries.of(context.trained)
        allowed = ROUNDED if context.module.trainer.precision == "bf16-mixed" else TOLERANCE
        apart, way = (rows[0] - own).norm(), (own - self._start).norm()
        if own.isfinite().all() and not apart <= allowed * way + 1e-6 * self._start.norm():
            raise ConfigurationError(
                f"ShadowShapley: at client {context.instruction.client_id} the model of a coalition differs by "
                f"{100 * float(apart / way.clamp_min(1e-12)):.1f} % from the client's own, and both began alike and "
                "saw the same: the module, its optimizer or its schedule does something that batched training does "
                "not. Value the run by flsv retrain."
            )
        return rows.expand(len(self._rows), -1)


class ReusedOutputs:
    """Keeps what a module's outer layers give before a part of it is reached, to give the same once more.

    So a second pass for other parameters of the part costs what comes from the part on, and layers before it that draw
    or count (dropout, BatchNorm's statistics) do so once. What is called after the first layer of the part may depend
    on it, and is called again.

    Args:
        module: its layers are hooked from now on; :meth:`remove` undoes that.
        part: names of parameters and buffers.
        reached: called when a forward pass comes to the part.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 1))
        >>> reused = ReusedOutputs(net, {"2.weight", "2.bias"})
        >>> first = net(torch.ones(1, 2))
        >>> with reused.again():
        ...     print(bool(net(torch.zeros(1, 2)) == first))
        True
        >>> reused.remove()
    """

    def __init__(self, module: nn.Module, part: Collection[str], reached: Callable[[], None] = lambda: None) -> None:
        owners = {module.get_submodule(name.rpartition(".")[0]) for name in part}
        layers = () if module in owners else _outermost(module, owners)
        self._kept: dict[nn.Module, deque[Any]] = {layer: deque() for layer in layers}
        self._hooks = [layer.register_forward_hook(self._keep) for layer in self._kept]
        self._hooks += [owner.register_forward_pre_hook(self._reach) for owner in owners]
        self._reached, self._again, self._past = reached, False, False

    def begin(self) -> None:
        """Another forward pass comes: forget the one before."""
        self._past = False
        for outputs in self._kept.values():
            outputs.clear()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within it layers give what they gave, in the same order."""
        self._again = True
        own = {layer: vars(layer).get("forward") for layer in self._kept}
        for layer, outputs in self._kept.items():
            vars(layer)["forward"] = partial(_give, outputs, layer.forward)
        try:
            yield
        finally:
            self._again = False
            for layer, forward in own.items():
                del vars(layer)["forward"]
                if forward is not None:
                    vars(layer)["forward"] = forward
            self.begin()

    def remove(self) -> None:
        """Hook nothing any more."""
        for hook in self._hooks:
            hook.remove()

    def _reach(self, layer: nn.Module, given: Any) -> None:
        if not (self._again or self._past):
            self._past = True
            self._reached()

    def _keep(self, layer: nn.Module, given: Any, output: Any) -> None:
        if not (self._again or self._past):
            self._kept[layer].append(tree_map_only(Tensor, Tensor.detach, output))


def _give(outputs: deque[Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return outputs.popleft() if outputs else forward(*args, **kwargs)


def _outermost(layer: nn.Module, owners: Collection[nn.Module]) -> Iterator[nn.Module]:
    """The largest layers that hold none of the owners, and have a state or draw."""
    for child in layer.children():
        parts = set(child.modules())
        if child not in owners and parts & set(owners):
            yield from _outermost(child, owners)
        elif child not in owners and any(p._parameters or p._buffers or "Drop" in type(p).__name__ for p in parts):
            yield child
