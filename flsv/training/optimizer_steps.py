"""ClientSteps: sees every optimizer step of a client, also those that Lightning does not take.

Lightning's hook ``on_before_optimizer_step`` is called by its own wrapper of an optimizer. A module may step the
optimizer without it (``self.optimizers(use_pl_optimizer=False)``), or one that Lightning has never seen. torch's hooks
around ``Optimizer.step`` are called by all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from flsv.core import opened
from flsv.training.algorithms.base import ClientAlgorithm, ClientContext
from flsv.training.optimizers import Optimizers
from flsv.training.swapped_optimizer import parameters_of
from flsv.utilities.errors import ConfigurationError

#: Function that evaluates a batch's loss and its gradients, which an optimizer's ``step`` calls.
Closure = Callable[[], Any]


class ClientSteps:
    """Counter of a client's optimizer steps, which lets the client algorithm change their gradients."""

    def __init__(
        self,
        trainer: L.Trainer,
        optimizers: Optimizers,
        algorithm: Any,  # a ClientAlgorithm or None
    ) -> None:
        self._parameters = set(trainer.lightning_module.parameters())
        self._optimizers = optimizers
        self._algorithm = algorithm
        self._changes_gradients = _overrides(algorithm, "gradients")
        self._uses_gradients = self._changes_gradients or _overrides(algorithm, "frozen_parameters")
        self._context: ClientContext | None = None
        self._handles: list[RemovableHandle] = []
        # The optimizers whose steps have begun, the innermost last.
        self._stepping: list[Any] = []
        self._has_shown_gradients = False
        if self._changes_gradients:
            self._check_optimizers(trainer)

    def begin(self, context: ClientContext) -> None:
        """Watch the steps of a client from now on."""
        self.end()
        self._context = context
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def begin_batch(self) -> None:
        """Forget a step that an error has interrupted."""
        self._stepping = []
        self._has_shown_gradients = False

    def end(self) -> None:
        """Watch no steps until the next client begins."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._context = None
        self.begin_batch()

    # ---- torch's hooks

    def _before_step(
        self,
        optimizer: Any,
        args: Any,
        kwargs: Any,
    ) -> tuple[Any, Any] | None:
        # torch takes the step with the returned arguments, or after None with its own.
        if not self._changes_client_model(optimizer):
            return None
        self._stepping.append(optimizer)  # which `_after_step` removes
        self._optimizers.enter_new_optimizer(optimizer)
        if len(self._stepping) > 1:
            return None  # a step that another optimizer's step takes

        closure = _closure_among(args, kwargs)
        if closure is None or not self._uses_gradients:
            # The algorithm sees the gradients that the parameters have now.
            if not self._has_shown_gradients:
                self._check_is_whole(optimizer)
                self.show_gradients(optimizer)
            return None

        # The closure computes the gradients, after which the algorithm sees them.
        wrapped_closure = self._wrap_closure(closure, optimizer)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped_closure}
        optimizer_argument, _, *further_arguments = args
        new_args = (optimizer_argument, wrapped_closure, *further_arguments)
        return new_args, kwargs

    def _after_step(
        self,
        optimizer: Any,
        args: Any,
        kwargs: Any,
    ) -> None:
        if not self._stepping or self._stepping[-1] is not optimizer:
            return
        self._stepping.pop()
        if self._stepping:  # another optimizer's step has taken this one
            return
        assert self._context is not None
        self._has_shown_gradients = False
        self._context.num_steps += 1
        self._context.lr_sum += optimizer.param_groups[0]["lr"]

    def _wrap_closure(self, closure: Closure, optimizer: Any) -> Closure:
        """Return a closure that lets the client algorithm change the gradients of ``closure``."""
        parameters = parameters_of(optimizer)
        # The client's first step is checked for a move before its closure is called.
        values_before_step: list[Tensor] | None = None
        if self._context is not None and self._context.num_steps == 0:
            values_before_step = [parameter.detach().clone() for parameter in parameters]

        def wrapped_closure() -> Any:
            nonlocal values_before_step
            if values_before_step is not None:
                if not all(map(torch.equal, values_before_step, parameters)):
                    raise self._unseen_gradients(
                        optimizer, "its step moves the model by gradients from before the step"
                    )
                values_before_step = None  # only the closure's first call is checked

            # Lightning's closure calls `show_gradients`, which sets this to True.
            self._has_shown_gradients = False
            loss = closure()
            if not self._has_shown_gradients:
                self.show_gradients(optimizer)
            return loss

        return wrapped_closure

    # ---- the client algorithm

    def show_gradients(self, optimizer: Any) -> None:
        """Let the client algorithm change the gradients of a step."""
        context = self._context
        algorithm = self._algorithm
        if context is None:
            return
        self._has_shown_gradients = True
        context.optimizer = optimizer
        if algorithm is None or not self._uses_gradients:
            return
        context.epoch = context.position // context.epoch_batches

        trained_parameters = [
            parameter for parameter in parameters_of(optimizer) if parameter.grad is not None
        ]
        for parameter in algorithm.frozen_parameters(context, trained_parameters):
            parameter.grad = None
        if not self._changes_gradients:
            return

        parameters = []
        gradients = []
        for parameter in trained_parameters:
            if parameter.grad is None:  # it was frozen above
                continue
            if parameter.grad.is_sparse:  # the algorithm's term has all entries
                parameter.grad = parameter.grad.to_dense()
            parameters.append(parameter)
            gradients.append(parameter.grad)
        shared_parameters, shared_gradients = context.shared(parameters, gradients)
        with opened(context.local):  # the algorithm may read the client's data
            algorithm.gradients(context, shared_parameters, shared_gradients)

    def _changes_client_model(self, optimizer: Any) -> bool:
        """Return whether a client trains, and an optimizer changes its model."""
        if self._context is None:
            return False
        return not self._parameters.isdisjoint(parameters_of(optimizer))

    # ---- what is refused

    def _check_optimizers(self, trainer: L.Trainer) -> None:
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, torch.optim.SparseAdam):
                raise ConfigurationError(
                    f"{self._algorithm!r} adds a term with all entries to the gradients, and SparseAdam takes sparse "
                    "gradients only. Use torch.optim.Adam."
                )

    def _check_is_whole(self, optimizer: Any) -> None:
        """Check that a step is not the last part of another optimizer's."""
        if not self._uses_gradients:
            return
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
            f"that some gradients escape it. Take whole steps by {_step_name(optimizer)}(closure) with a closure that "
            "computes all gradients, as automatic optimization does, or leave out the client algorithm."
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


def _step_name(optimizer: Any) -> str:
    return f"{type(optimizer).__name__}.step"


def _overrides(algorithm: ClientAlgorithm | None, method: str) -> bool:
    """Return whether a client algorithm has its own ``method``."""
    if algorithm is None:
        return False
    return getattr(type(algorithm), method) is not getattr(ClientAlgorithm, method)
