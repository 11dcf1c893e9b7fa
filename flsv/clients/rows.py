"""Rows: models of one structure that take the batches of one client together, step by step, beside its own training.

Where :mod:`flsv.clients.batched` gives each model batches of its own, these are shared, so that what depends on the
batch alone is computed once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from flsv.clients.batched import BatchedTraining, Factors, StackedOptimizer, clip, put_together
from flsv.clients.batched_step import BatchedStep, State


class RowTraining:
    """Trains rows on one batch after the other.

    Args:
        module: as for :class:`flsv.clients.batched.BatchedTraining`. What of it is in no row is the module's own, as it
            is at the time of the step, and is not changed.
        optimizer: of the module: at every step its class and its options as they are then.
        states: the rows' parameters and buffers by name, ``[m, ...]``, changed in place.
        clip_norm: the largest norm of a row's gradient.
        unused: names of parameters without a gradient.
        step: what derives by all that is trained, on a shared batch; None: a new :class:`BatchedStep`.

    Raises:
        ConfigurationError: an optimizer whose steps are not known to work entry by entry.

    Example:
        >>> import torch
        >>> class Line(nn.Linear):
        ...     def training_step(self, batch, batch_idx):
        ...         x, y = batch
        ...         return nn.functional.mse_loss(self(x), y)
        >>> line = Line(1, 1, bias=False)
        >>> states = {"weight": torch.tensor([[[0.0]], [[1.0]]])}
        >>> rows = RowTraining(line, torch.optim.SGD(line.parameters(), lr=0.25), states)
        >>> for _ in range(2):
        ...     rows.step((torch.ones(2, 1), torch.ones(2, 1))).tolist()
        [1.0, 0.0]
        [0.25, 0.0]
        >>> states["weight"].flatten().tolist()
        [0.75, 1.0]
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        states: State,
        clip_norm: float | None = None,
        unused: Collection[str] = (),
        step: BatchedStep | None = None,
    ) -> None:
        named = (*module.named_parameters(), *module.named_buffers())
        self._beside = {name: tensor for name, tensor in named if name not in states}
        training = BatchedTraining(module, optimizer, clip_norm, {*unused, *self._beside})
        self._optimizer, self._clip_norm = optimizer, clip_norm
        self.states = states
        self._stacked = StackedOptimizer(optimizer, training.groups, states)
        # Each model draws what the client's own draws: see whoever puts the random state there.
        self._step = step or BatchedStep(module, sorted(training.trained), training.fused, "same", shared=True)
        self._count = len(next(iter(states.values())))

    def step(self, batch: Any) -> Tensor:
        """One batch of all rows, and their losses ``[m]``."""
        gradients, losses = self._derive(batch)
        self.take(gradients, self._step.factors)
        return losses

    def gradients(self, batch: Any) -> State:
        """Of all rows on a batch, ``[m, ...]`` by name; buffers move."""
        gradients, _ = self._derive(batch)
        put_together(gradients, self._step.factors)
        return gradients

    def take(self, gradients: State, factors: Factors | None = None) -> None:
        """An optimizer's step of all rows, by their gradients ``[m, ...]``."""
        self._stacked.follow(self._optimizer)
        if self._clip_norm is not None:
            clip(gradients, self._clip_norm)
        self._stacked.step(self._count, gradients, factors)

    def _derive(self, batch: Any) -> tuple[State, Tensor]:
        beside = {n: t.detach() if isinstance(t, nn.Parameter) else t.clone() for n, t in self._beside.items()}
        return self._step(self.states, batch, beside)


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
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 1))
        >>> reused = ReusedOutputs(net, {"2.weight", "2.bias"})
        >>> found = net(torch.ones(1, 2))
        >>> with reused.again():
        ...     print(bool(net(torch.zeros(1, 2)) == found))
        True
        >>> reused.remove()
    """

    def __init__(self, module: nn.Module, part: Collection[str], reached: Callable[[], None] = lambda: None) -> None:
        owners = {name.rpartition(".")[0] for name in part}
        holds = {owner[:end] for owner in owners for end in _ends(owner)}
        layers = _outermost(module, "", holds)
        self._kept: dict[nn.Module, deque[Any]] = {
            layer: deque() for layer in layers if _costs(layer) and "" not in owners
        }
        self._hooks = [layer.register_forward_hook(self._keep) for layer in self._kept]
        self._hooks += [module.get_submodule(owner).register_forward_pre_hook(self._reach) for owner in owners]
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


def _costs(layer: nn.Module) -> bool:
    """Whether it is worth keeping, or must not be done twice: it has a state, or draws."""
    parts = layer.modules()
    return any(p._parameters or p._buffers or "Drop" in type(p).__name__ for p in parts)


def _ends(name: str) -> list[int]:
    """Where the names end that a dotted one lies within: ``"a.b"`` is in ``""``, ``"a"`` and ``"a.b"``."""
    return [0, *(place for place, sign in enumerate(name) if sign == "."), len(name)]


def _outermost(layer: nn.Module, name: str, holds: Collection[str]) -> Iterator[nn.Module]:
    for key, child in layer.named_children():
        inner = f"{name}.{key}" if name else key
        if inner in holds:
            yield from _outermost(child, inner, holds)
        else:
            yield child
