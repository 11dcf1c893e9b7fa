"""ClientAlgorithm: changes how a client trains, without changes to its module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flsv._lightning.patches import metric_states, put_metric_states, unlogged
from flsv.core import Instruction, LocalData
from flsv.core.parameter_space import ParameterSpace
from flsv.core.strategy import Strategy
from flsv.training.non_vector_state import NonVectorState
from flsv.training.rows.row_step import loss_of, step_arguments
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for, isolated_rngs


class ClientContext:
    """One client's training in one round, as a client algorithm sees it.

    Attributes:
        instruction: what the server said.
        local: the client's own data; they are open in every hook of its algorithm.
        state: what the client keeps between rounds.
        start: ``[P]``, what it started from.
        num_steps: optimizer steps so far.
        lr_sum: the learning rates of these steps, added up.
        optimizer: that takes the present step; None before the first.
        module: in which it trains.
        samples: how many training samples the client has.
        batches: how many batches it trains on in the round.
        position: how many of them it has trained on.
        local_epochs: that these are the batches of.
        epoch: the local epoch, from 0, that the present step belongs to.
        trained: ``[P]``, what it has made of it; None before the end.
        sent: ``[P]``, the model that leaves, after the uploads; None before the end. What a client reports follows from
            this one: from ``trained`` it would tell what noise hides, and differ from what the server sees.
        upload: ``upload(vector, start, name)`` gives another model of this client's as it leaves, ``[P]`` each: after
            the uploads, which keep what they keep of it under this name. Before the end it leaves as it is.
    """

    def __init__(
        self,
        module: nn.Module,
        space: ParameterSpace,
        instruction: Instruction,
        local: LocalData,
        start: Tensor,
        samples: int = 0,
        batches: int = 0,
        local_epochs: int = 1,
    ) -> None:
        self.module, self.space, self.instruction, self.local, self.start = module, space, instruction, local, start
        self.samples, self.batches, self.local_epochs = samples, batches, local_epochs
        self.state = local.state
        self.optimizer: Any = None
        self.num_steps, self.lr_sum, self.epoch, self.position = 0, 0.0, 0, 0
        self.trained: Tensor | None = None
        self.sent: Tensor | None = None
        self.upload: Callable[[Tensor, Tensor, str], Tensor] = lambda vector, start, name: vector
        self.loss = start.new_zeros(())  # summed over its batches
        self._names: dict[Tensor, str] = {
            parameter: name for name, parameter in module.named_parameters() if name in space.names
        }
        self._streams: dict[str, Iterator[Any]] = {}
        self._unsaved: NonVectorState | None = None
        self._steps = 0

    @property
    def num_parameters(self) -> int:
        """How many leading entries of a vector are parameters; the rest are buffers."""
        return self.space.num_parameters

    def received(self, name: str) -> Tensor:
        """A tensor that the server sent under this name."""
        return self.instruction.tensors[name]

    def entries(self, vector: Tensor, parameters: list[Tensor]) -> list[Tensor]:
        """The entries of a vector (``[P]``, or its leading parameters) that belong to these parameters, in their shapes
        and dtypes: views."""
        views = self.space.unflatten(vector)
        return [views[self._names[parameter]].to(parameter.dtype) for parameter in parameters]

    def flat(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> Tensor:
        """``[num_parameters]``: tensors, such as gradients, at the places of these parameters; 0 elsewhere."""
        vector = self.start.new_zeros(self.num_parameters)
        views = self.space.unflatten(vector)
        for parameter, tensor in zip(parameters, tensors):
            if tensor is not None:
                views[self._names[parameter]].copy_(tensor)
        return vector

    def is_shared(self, parameter: Tensor) -> bool:
        """Whether a vector holds this parameter."""
        return parameter in self._names

    def shared(self, parameters: list[Tensor], gradients: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Those of the parameters that a vector holds, and their gradients."""
        pairs = [(p, g) for p, g in zip(parameters, gradients) if p in self._names]
        return [p for p, _ in pairs], [g for _, g in pairs]

    def own_model(self, name: str) -> Tensor:
        """``[P]``: a second model of this client's own, which is changed in place. It lies in the client's state under
        this name: it is kept from round to round and saved with the run. At first it is the model that the client has
        started from."""
        if name not in self.state:
            self.state[name] = self.start.clone()
        return self.state[name]

    def own_batches(self, name: str) -> Iterator[Any]:
        """The client's own training batches beside those that it trains on, as ``training_step`` gets them: pass after
        pass without an end, each shuffled by the random stream of this name, the round and the client. A second call
        in the same round goes on where the first one was."""
        return self._streams.setdefault(name, self._drawn(name))

    def _drawn(self, name: str) -> Iterator[Any]:
        told = self.instruction
        for epoch in count():
            path = name, told.round_index, told.client_id, epoch
            batches = iter(self.local.batches(generator_for(told.seed, *path)))
            for index in count():
                with isolated_rngs(told.seed, *path, index):  # of augmentation
                    found = list(islice(batches, 1))
                if not found:
                    break
                yield found[0]

    def step(self, model: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss of a batch at another model, and its gradient: what an optimizer step of that model starts from.

        ``training_step`` runs with this model in the place of the client's. Afterwards the module is as it was, with
        its buffers, gradients and metrics; what the step logs is left out, and it draws random numbers of its own. So
        the client's training goes on as if nothing had happened.

        Args:
            model: ``[P]``. Its buffers (BatchNorm's statistics) move in place, its parameters do not. Parameters that
                are not shared are those of the client's module.
            batch: as ``training_step`` gets it: that of :meth:`ClientAlgorithm.begin_batch`, or one of
                :meth:`own_batches`.

        Returns:
            The loss, a scalar, and its gradient ``[num_parameters]`` by the shared trainable parameters, 0 for others.

        Raises:
            ConfigurationError: a module that steps its optimizers itself, or a ``training_step`` that gives no loss.
        """
        module: Any = self.module
        if not getattr(module, "automatic_optimization", True):
            raise ConfigurationError(
                f"training_step of {type(module).__name__} steps its optimizers itself (automatic_optimization = "
                "False), so that no other model can be put through it. Use automatic optimization."
            )
        told, space = self.instruction, self.space
        self._unsaved = self._unsaved or NonVectorState(module)
        trainer = getattr(module, "_trainer", None)
        run = module.training_step if trainer is None else trainer.strategy.training_step
        trained = [parameter for parameter in self._names if parameter.requires_grad]
        before = space.read(module), space.read_private(module), self._unsaved.read(), metric_states(module)
        path = "second model", told.round_index, told.client_id, self._steps
        self._steps += 1
        with isolated_rngs(told.seed, *path), unlogged(module), torch.enable_grad():
            space.write(module, model)
            try:
                place = self.position % max(self.batches // self.local_epochs, 1)  # it begins anew in every local epoch
                loss = loss_of(run(*step_arguments(module, batch, place)))
                gradients = torch.autograd.grad(loss, trained, allow_unused=True)
                model[self.num_parameters :] = space.read(module)[self.num_parameters :]
            finally:
                space.write(module, before[0])
                space.write_private(module, before[1])
                self._unsaved.write(before[2])
                put_metric_states(before[3])
        return loss.detach(), self.flat(trained, gradients)


class ClientAlgorithm(Strategy):
    """Base class. It works with any module, precision, accumulation and optimizer.

    Of its two sides, what takes a :class:`ClientContext` happens at a client: it may use its arguments and the
    constructor's. What a client keeps goes into ``context.state``, what it reports is declared in ``reports``. What
    :class:`flsv.core.strategy.Strategy` has beside ``report`` happens at the server.

    Attributes:
        uses: the name of the :meth:`ClientContext.own_model` that a client uses, and is tested with; None: it uses what
            it is sent.
    """

    uses: ClassVar[str | None] = None
    #: Whether clients take other steps than without it.
    changes_steps: bool = True
    #: Whether all that it does is :meth:`change`: then it also trains models that are rows of stacked tensors.
    entrywise: ClassVar[bool] = False

    def change(self, parameters: list[Tensor], starts: list[Tensor], gradients: list[Tensor]) -> None:
        """Before every step: change gradients in place, entry by entry, by parameters and what they were at the start
        of the visit. The tensors are those of one model, or of many, stacked."""

    def check_fit(self, trainer: Any, config: Any) -> None:
        """At the server, before the first round of a fit, whose trainer has its optimizers set up.

        Args:
            trainer: the fit's.
            config: the federation's parts, a :class:`flsv.configuration.federation_config.FederationConfig`.

        Raises:
            ConfigurationError: what it cannot work with.
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


def used_model(local: LocalData, instruction: Instruction, strategies: Mapping[str, Any]) -> Tensor | None:
    """At a client: the model ``[P]`` that it uses, and is tested with: its algorithm's, else its personalizer's, else
    the one that it is sent."""
    algorithm, personalizer = strategies.get("client_algorithm"), strategies.get("personalizer")
    if algorithm is not None and algorithm.uses is not None and algorithm.uses in local.state:
        return local.state[algorithm.uses]
    return instruction.start if personalizer is None else personalizer.own(local, instruction)
