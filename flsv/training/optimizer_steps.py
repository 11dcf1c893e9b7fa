"""ClientSteps: callbacks at every batch and every optimizer step of a client.

Lightning's hook ``on_before_optimizer_step`` is called by its own wrapper of an optimizer. A module may step the
optimizer without it (``self.optimizers(use_pl_optimizer=False)``), or one that Lightning has never seen. torch's hooks
around ``Optimizer.step`` are called by all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from flsv._lightning.patches import PatchedAttributes
from flsv.core import Instruction, opened
from flsv.training.algorithms.base import ClientAlgorithm, ClientContext, overrides
from flsv.training.swapped_optimizer import parameters_of
from flsv.training.trainer_state import TrainerState
from flsv.training.training_step import training_loss
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import seed_generators, seed_global_rngs

#: Function that evaluates a batch's loss and its gradients, which an optimizer's ``step`` calls.
Closure = Callable[[], Any]


class ClientSteps(L.Callback):
    """Callback that counts a client's batches and optimizer steps, and calls the client algorithm for each batch.

    Attributes:
        context: the context of the client that trains now, else None.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        state: TrainerState,
        algorithm: Any,  # a ClientAlgorithm or None
    ) -> None:
        self.context: ClientContext | None = None
        # Optimizers of copies of the module have its constant parameters, too.
        constants = state.space.constants(state.module).values()
        self._parameters = set(state.module.parameters()).difference(constants)
        self._generators = state.generators
        self._optimizers = state.optimizers
        self._epoch_loop: Any = trainer.fit_loop.epoch_loop  # a ClientEpochLoop
        self._algorithm = algorithm
        self._added_loss: AddedLoss | None = None
        self._handles: list[RemovableHandle] = []
        # The optimizers of the client's model that have stepped.
        self._client_optimizers: list[Any] = []
        # The optimizers whose steps have begun, the innermost last.
        self._stepping: list[Any] = []

    def begin(self, context: ClientContext) -> None:
        """Watch the batches and steps of a client from now on."""
        self.context = context
        self._handles = [
            register_optimizer_step_pre_hook(partial(self._before_step, context)),
            register_optimizer_step_post_hook(partial(self._after_step, context)),
        ]

    def end(self) -> None:
        """Stop watching until the next client begins."""
        self.context = None
        self._epoch_loop.batch = None
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._client_optimizers = []
        self._stepping = []
        self._remove_added_loss()

    def seed(self, instruction: Instruction) -> None:
        """Seed all generators for a client's training."""
        purpose = "train", instruction.round_index, instruction.client_id
        seed_global_rngs(instruction.seed, *purpose)
        seed_generators(self._generators, instruction.seed, *purpose)

    # ---- Lightning's hooks

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        context = self.context
        if context is None:
            return
        self._stepping = []  # drop a step that an error has interrupted
        self._epoch_loop.batch = batch
        if context.position == 0:  # `begin_client` and transfer hooks have drawn random numbers
            self.seed(context.instruction)

        if self._algorithm is not None:
            with opened(context.local):  # the algorithm may read the client's data
                self._algorithm.begin_batch(context, batch)
        if context.loss_terms:
            self._added_loss = AddedLoss(trainer, context)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        context = self.context
        if context is None:
            return
        loss = _loss_among(outputs)
        num_accumulated = trainer.accumulate_grad_batches
        if pl_module.automatic_optimization and num_accumulated != 1:
            loss = loss * num_accumulated  # Lightning has divided the loss
        context.loss += loss.detach().to(context.loss).mean()
        context.position += 1
        self._epoch_loop.batch = None
        self._remove_added_loss()

    def _remove_added_loss(self) -> None:
        """Let ``training_step`` return its own loss again."""
        if self._added_loss is not None:
            self._added_loss.remove()
            self._added_loss = None

    # ---- torch's hooks

    def _before_step(
        self, context: ClientContext, optimizer: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        # torch takes the step with the returned arguments, or after None with its own.
        if optimizer not in self._client_optimizers:
            if self._parameters.isdisjoint(parameters_of(optimizer)):
                return None  # it trains something else
            self._optimizers.enter_new_optimizer(optimizer)
            self._client_optimizers.append(optimizer)

        self._stepping.append(optimizer)  # which `_after_step` removes
        context.optimizer = self._stepping[0]
        return None

    def _after_step(self, context: ClientContext, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._stepping or self._stepping[-1] is not optimizer:
            return
        self._stepping.pop()
        if self._stepping:  # another optimizer's step has taken this one
            return
        context.num_steps += 1
        context.lr_sum += optimizer.param_groups[0]["lr"]


class GradientSteps(ClientSteps):
    """ClientSteps with a client algorithm that changes the gradients of each step."""

    def __init__(self, trainer: L.Trainer, *options: Any) -> None:
        super().__init__(trainer, *options)
        self._changes_gradients = _changes_gradients(self._algorithm)
        # Whether the algorithm has seen the gradients of the present step.
        self._has_shown_gradients = False
        if self._changes_gradients:
            self._check_optimizers(trainer)

    def on_train_batch_start(self, *hook_arguments: Any) -> None:
        self._has_shown_gradients = False
        super().on_train_batch_start(*hook_arguments)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        # Before Lightning clips the gradients.
        if self.context is not None:
            self._show_gradients(self.context, optimizer)

    def _before_step(
        self, context: ClientContext, optimizer: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        super()._before_step(context, optimizer, args, kwargs)
        if self._stepping != [optimizer]:
            return None  # a step of something else, or one that another optimizer's step takes

        closure = _closure_among(args, kwargs)
        if closure is None:
            # The algorithm sees the gradients that the parameters have now.
            if not self._has_shown_gradients:
                self._check_is_whole(optimizer)
                self._show_gradients(context, optimizer)
            return None

        # The closure computes the gradients, after which the algorithm sees them.
        wrapped_closure = self._wrap_closure(context, closure, optimizer)
        return _with_closure(wrapped_closure, args, kwargs)

    def _after_step(self, context: ClientContext, optimizer: Any, args: Any, kwargs: Any) -> None:
        super()._after_step(context, optimizer, args, kwargs)
        if not self._stepping:
            self._has_shown_gradients = False

    def _wrap_closure(self, context: ClientContext, closure: Closure, optimizer: Any) -> Closure:
        """Return a closure that lets the client algorithm change the gradients of ``closure``."""
        if context.num_steps == 0:
            closure = self._closure_with_check(closure, optimizer)

        def wrapped_closure() -> Any:
            # Lightning's closure calls `on_before_optimizer_step`, which sets this to True.
            self._has_shown_gradients = False
            loss = closure()
            if not self._has_shown_gradients:
                self._show_gradients(context, optimizer)
            return loss

        return wrapped_closure

    def _closure_with_check(self, closure: Closure, optimizer: Any) -> Closure:
        """Return a closure that raises an error if the step has moved the model before its first call."""
        parameters = parameters_of(optimizer)
        values_before_step = [parameter.detach().clone() for parameter in parameters]

        def checked_closure() -> Any:
            for value_before_step, parameter in zip(values_before_step, parameters):
                if not torch.equal(value_before_step, parameter):
                    raise self._unseen_gradients(
                        optimizer, "its step moves the model by gradients from before the step"
                    )
            values_before_step.clear()  # only the first call is checked
            return closure()

        return checked_closure

    def _show_gradients(self, context: ClientContext, optimizer: Any) -> None:
        self._has_shown_gradients = True
        context.optimizer = optimizer
        context.epoch = context.position // context.epoch_batches
        parameters = _with_gradient(parameters_of(optimizer))
        for parameter in self._algorithm.frozen_parameters(context, parameters):
            parameter.grad = None
        if self._changes_gradients:
            self._change_gradients(context, _with_gradient(parameters))

    def _change_gradients(self, context: ClientContext, parameters: list[Tensor]) -> None:
        gradients = []
        for parameter in parameters:
            assert parameter.grad is not None
            if parameter.grad.is_sparse:  # the algorithm's term is dense
                parameter.grad = parameter.grad.to_dense()
            gradients.append(parameter.grad)
        shared_parameters, shared_gradients = context.shared(parameters, gradients)
        with opened(context.local):  # the algorithm may read the client's data
            self._algorithm.gradients(context, shared_parameters, shared_gradients)

    # ---- errors

    def _check_optimizers(self, trainer: L.Trainer) -> None:
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, torch.optim.SparseAdam):
                raise ConfigurationError(
                    f"{self._algorithm!r} adds a dense term to the gradients, but SparseAdam takes sparse gradients "
                    "only. Use torch.optim.Adam."
                )

    def _check_is_whole(self, optimizer: Any) -> None:
        """Check that a step is not the last part of another optimizer's step."""
        outer = self._optimizers.outer_optimizer_of(optimizer)
        if outer is not None:
            inner_name = type(optimizer).__name__
            raise self._unseen_gradients(
                outer, f"its {inner_name} takes a step outside of {_step_name(outer)}"
            )

    def _unseen_gradients(self, optimizer: Any, reason: str) -> ConfigurationError:
        """Return the error for gradients that the client algorithm has not seen."""
        return ConfigurationError(
            f"{self._algorithm!r} changes the gradients of every step of {type(optimizer).__name__}, but {reason}, so "
            f"it does not receive all gradients. Take whole steps by {_step_name(optimizer)}(closure) with a closure "
            "that computes all gradients, as automatic optimization does, or remove the client algorithm."
        )


def _closure_among(args: Any, kwargs: Any) -> Closure | None:
    """Return the closure among the arguments of ``Optimizer.step``."""
    closure = None
    if "closure" in kwargs:
        closure = kwargs["closure"]
    elif len(args) > 1:
        closure = args[1]  # as in step(closure)
    if callable(closure):
        return closure
    return None


def _with_closure(closure: Closure, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of ``Optimizer.step`` with another closure."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    optimizer, _, *further_arguments = args
    return (optimizer, closure, *further_arguments), kwargs


def _with_gradient(parameters: list[Tensor]) -> list[Tensor]:
    return [parameter for parameter in parameters if parameter.grad is not None]


def _loss_among(outputs: Any) -> Tensor:
    """Return the loss in the outputs of ``training_step``, NaN if there is none."""
    loss = outputs
    if isinstance(outputs, dict):
        loss = outputs.get("loss")
    if isinstance(loss, Tensor):
        return loss
    return torch.tensor(math.nan)


def _step_name(optimizer: Any) -> str:
    return f"{type(optimizer).__name__}.step"


def uses_gradients(algorithm: ClientAlgorithm | None) -> bool:
    """Return whether a client algorithm changes gradients."""
    if algorithm is None:
        return False
    return _changes_gradients(algorithm) or overrides(algorithm, "frozen_parameters")


def _changes_gradients(algorithm: ClientAlgorithm) -> bool:
    return overrides(algorithm, "gradients") or overrides(algorithm, "add_proximal_gradients")


class AddedLoss:
    """Adds a context's loss terms to the result of ``training_step``, until :meth:`remove`.

    Lightning divides the sum by the number of accumulated batches, and scales it in half precision, as the loss alone.
    """

    def __init__(self, trainer: L.Trainer, context: ClientContext) -> None:
        strategy = trainer.strategy
        self._context = context
        self._training_step = strategy.training_step
        self._term_context = strategy.precision_plugin.train_step_context
        self._handles = [term.watch() for term in context.loss_terms]
        self._patch = PatchedAttributes([(strategy, "training_step", self._step)])

    def remove(self) -> None:
        """Restore ``training_step``, and forget the terms."""
        self._patch.restore()
        for handle in self._handles:
            handle.remove()
        self._context.loss_terms = []

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._training_step(*args, **kwargs)
        terms = self._context.loss_terms
        if not terms or outputs is None:  # Lightning skips a batch without a loss
            return outputs

        loss = training_loss(outputs)
        with self._term_context():
            for term in terms:
                loss = loss + term.value()
        if isinstance(outputs, Mapping):
            return {**outputs, "loss": loss}
        return loss
