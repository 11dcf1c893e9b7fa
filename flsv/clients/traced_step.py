"""A step of many models at once that is recorded once and played back.

What ``torch.func.vmap`` adds to each call of a small model is more than its arithmetic. It is the same in every step
on batches of one shape: so the tensor operations that it comes to are recorded
(:func:`torch.fx.experimental.proxy_tensor.make_fx`), and later steps do these alone, with the same results. A recording
holds whatever Python decided on the way. So it is of no use where that may change: a step that draws, keeps something
or reads values off tensors is not recorded, and a recording is good within one training, in which neither the epoch nor
what the module holds beside its parameters and buffers moves on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten

from flsv.clients.batched_checks import NotBatched, Watch, purely
from flsv.clients.batched_step import BatchedStep, State
from flsv.seeding import isolated_rngs

#: Steps of a kind from which on a recording pays: it takes as long as what it saves in so many.
OFTEN = 100


class TracedStep(BatchedStep):
    """As :class:`BatchedStep` of a shared batch, recorded once it has been done often.

    Args:
        module: see there.
        trained: likewise.
        factors: likewise; steps that leave factors are not recorded: their time is arithmetic.
        often: steps on batches of the same shape before they are recorded.

    Example:
        >>> class Line(nn.Linear):
        ...     def training_step(self, batch, batch_idx):
        ...         return self(batch).sum()
        >>> step = TracedStep(Line(2, 1), ["weight"], often=1)
        >>> states = {"weight": torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), "bias": torch.zeros(2, 1)}
        >>> [step(states, torch.tensor([[1.0, 1.0]]))[1].tolist() for _ in range(3)]
        [[3.0, 7.0], [3.0, 7.0], [3.0, 7.0]]
        >>> step.recorded
        1
    """

    def __init__(self, module: nn.Module, trained: Collection[str], factors: bool = False, often: int = OFTEN) -> None:
        super().__init__(module, trained, factors, "same", shared=True)
        self._often, self._seen = often, Counter[Any]()
        self._played: dict[Any, Callable[..., tuple[State, Tensor, State]] | None] = {}

    @property
    def recorded(self) -> int:
        """How many kinds of steps are played back."""
        return sum(play is not None for play in self._played.values())

    def _derive(self, states: State, batch: Any, beside: State | None = None) -> tuple[State, Tensor, State]:
        leaves, spec = tree_flatten((states, batch))
        if beside or not all(isinstance(leaf, Tensor) for leaf in leaves):
            return super()._derive(states, batch, beside)
        key = str(spec), tuple((leaf.shape, leaf.dtype, leaf.device) for leaf in leaves)
        if (play := self._played.get(key)) is not None:
            self.factors = {}
            with torch.no_grad():
                return play(states, batch)
        watch = Watch(self._module) if not self._seen[key] else None
        found = super()._derive(states, batch)
        self._seen[key] += 1
        if watch is not None and watch.changed():
            self._seen[key] = self._often  # never again as many
        elif self._seen[key] == self._often and not self.factors:
            self._played[key] = self._record(states, batch)
        return found

    def _record(self, states: State, batch: Any) -> Callable[..., tuple[State, Tensor, State]] | None:
        derive = super()._derive
        try:
            with isolated_rngs(0, "recording"), purely(self._module):
                return make_fx(lambda states, batch: derive(states, batch))(states, batch)
        except NotBatched:
            return None
