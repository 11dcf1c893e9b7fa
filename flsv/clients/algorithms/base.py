"""ClientAlgorithm: changes how a client trains, without changes to its module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from flsv.parameters import ParameterSpace
from flsv.participants import State
from flsv.round import Instruction
from flsv.strategy import Strategy


class ClientContext:
    """One client's training in one round, as a client algorithm sees it.

    Attributes:
        instruction: what the server said.
        state: what the client keeps between rounds.
        start: ``[P]``, what it started from.
        num_steps: optimizer steps so far.
        lr_sum: the learning rates of these steps, added up.
        optimizer: that takes the present step; None before the first.
        module: in which it trains.
        samples: how many training samples the client has.
        batches: how many batches it trains on in the round.
        local_epochs: that these are the batches of.
        epoch: the local epoch, from 0, that the present step belongs to.
        trained: ``[P]``, what it has made of it; None before the end.
        sent: ``[P]``, the model that leaves, after the uploads; None before the end. What a client reports follows from
            this one: from ``trained`` it would tell what noise hides, and differ from what the server sees.
    """

    def __init__(
        self,
        module: nn.Module,
        space: ParameterSpace,
        instruction: Instruction,
        state: State,
        start: Tensor,
        samples: int = 0,
        batches: int = 0,
        local_epochs: int = 1,
    ) -> None:
        self.module, self.samples, self.batches, self.local_epochs = module, samples, batches, local_epochs
        self.optimizer: Any = None
        self.instruction, self.state, self.start, self.space = instruction, state, start, space
        self.num_steps, self.lr_sum, self.epoch = 0, 0.0, 0
        self.trained: Tensor | None = None
        self.sent: Tensor | None = None
        self._names: dict[Tensor, str] = {
            parameter: name for name, parameter in module.named_parameters() if name in space.names
        }
        self._views: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}

    @property
    def num_parameters(self) -> int:
        """How many leading entries of a vector are parameters; the rest are buffers."""
        return self.space.num_parameters

    def received(self, name: str) -> Tensor:
        """A tensor that the server sent under this name."""
        return self.instruction.tensors[name]

    def entries(self, vector: Tensor, parameters: list[Tensor]) -> list[Tensor]:
        """The entries of a vector (``[P]``, or its leading parameters) that belong to these parameters, in their shapes
        and dtypes: views. They are kept until the visit ends: not for vectors that are made for one step."""
        if id(vector) not in self._views:
            self._views[id(vector)] = (vector, self.space.unflatten(vector))
        views = self._views[id(vector)][1]
        return [views[self._names[parameter]].to(parameter.dtype) for parameter in parameters]

    def is_shared(self, parameter: Tensor) -> bool:
        """Whether a vector holds this parameter."""
        return parameter in self._names

    def shared(self, parameters: list[Tensor], gradients: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Those of the parameters that a vector holds, and their gradients."""
        pairs = [(p, g) for p, g in zip(parameters, gradients) if p in self._names]
        return [p for p, _ in pairs], [g for _, g in pairs]


class ClientAlgorithm(Strategy):
    """Base class. It works with any module, precision, accumulation and optimizer.

    Of its two sides, what takes a :class:`ClientContext` happens at a client: it may use its arguments and the
    constructor's. What a client keeps goes into ``context.state``, what it reports is declared in ``reports``. What
    :class:`flsv.strategy.Strategy` has beside ``report`` happens at the server.
    """

    def begin_client(self, context: ClientContext) -> None:
        """A client is about to train."""

    def begin_batch(self, context: ClientContext, batch: Any) -> None:
        """Before every batch, as ``training_step`` gets it. Several of them are one step's where gradients are
        accumulated."""

    def frozen_parameters(self, context: ClientContext, parameters: Sequence[Tensor]) -> Iterable[Tensor]:
        """Before every optimizer step: those of the parameters that it is to leave as they are.

        Args:
            context: the client's.
            parameters: all that have a gradient, whether they are shared or not.
        """
        return ()

    def gradients(self, context: ClientContext, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Before every optimizer step, and before gradient clipping: change the gradients, in place.

        Args:
            context: the client's.
            parameters: the trainable parameters that have a gradient and are shared.
            gradients: their gradients.
        """

    def leave_client(self, context: ClientContext) -> None:
        """The client trains no more, in this round or ever: whatever :meth:`begin_client` has done to the module is
        undone. Called before :meth:`end_client`, and also where the model is not finite or training has failed."""

    def end_client(self, context: ClientContext) -> Mapping[str, Tensor | float]:
        """The client has trained: ``context.trained`` and ``context.sent`` are there. What it reports, by names
        declared in ``reports``. Not called where the model is not finite."""
        return {}
