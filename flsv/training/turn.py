"""Turn: one client's turn in a Trainer, from the server's Instruction to the client's ClientUpdate.

The Trainer has one of everything, and every client its own: the module (:mod:`flsv.training.shared_module`), and what
else there is a slot for (:mod:`flsv.training.slots`). A turn enters all of them, the client trains, and the turn leaves
them. What the client keeps is staged in the store (:mod:`flsv.training.store`)::

    turn.begin(instruction, local, samples, batches)    # enter
    for batch in the client's batches:                  # train: Lightning's epoch, or rows of a batched model
        turn.begin_batch(batch)
        turn.begin_step(optimizer)
        turn.end_batch(loss)
    update = turn.end()                                 # leave

A Trainer calls back at every batch, so a turn has a beginning and an end instead of being a function that trains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor

from flsv.configuration.federation_config import FederationConfig
from flsv.core import ClientUpdate, Instruction, LocalData, opened
from flsv.core.parameter_space import ParameterSpace
from flsv.functional.distances import distances
from flsv.training.accumulation import AccumulationWindows
from flsv.training.algorithms import ClientContext
from flsv.training.local_steps import LocalSteps
from flsv.training.loss_scale import LossScale
from flsv.training.optimizer_state import OptimizerState, upload_parameters
from flsv.training.pace import Pace
from flsv.training.shared_module import SharedModule
from flsv.training.slots import Slot, Slots
from flsv.training.store import ClientStore
from flsv.uploads import UploadContext, sanitize_report, upload
from flsv.utilities.seeding import seed_global_rngs


class Turn:
    """The turns of a Trainer's clients, one after the other.

    Args:
        trainer: the trainer, with its module on its device and its optimizers set up.
        space: the map between the module and vectors.
        config: the federation's parts.
        store: the state that clients keep.
        num_clients: n.
        steps: every client's number of optimizer steps in the fit.

    Attributes:
        trainer: the trainer.
        shared: the trainer's module, in which all clients train.
        slots: the other parts of the trainer that each client has of its own.
        upload_seed: the seed of uploads' random numbers, such as the noise of a private update; None: the run's seed,
            which the server knows.
        context: the context of the client in training; None between two turns.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        space: ParameterSpace,
        config: FederationConfig,
        store: ClientStore,
        num_clients: int,
        steps: LocalSteps,
    ) -> None:
        self.shared, self._store = SharedModule(trainer.lightning_module, space), store
        self.trainer: Any = trainer
        self._config, self._num_clients = config, num_clients
        self._algorithm: Any = config.client_algorithm
        self._strategies = list(config.strategies.values())
        self._windows = AccumulationWindows(trainer)
        others: list[Slot] = [steps, *optimizer_slots(trainer, config.optimizer_state, steps)]
        self.slots = Slots([*others, LossScale(trainer), self._windows], store)
        self.context: ClientContext | None = None
        self.upload_seed: int | None = None

    @property
    def position(self) -> int:
        """Return how many batches the client has trained on in this round."""
        return self._own.position

    @property
    def _own(self) -> ClientContext:
        assert self.context is not None
        return self.context

    # ---- enter

    def begin(self, instruction: Instruction, local: LocalData, num_samples: int, batches: int) -> None:
        """Begin a client's turn: put the client's state into the Trainer.

        Args:
            instruction: the server's message to the client.
            local: the client's data.
            num_samples: the client's number of training samples.
            batches: the number of batches that the client will train on.
        """
        personalizer, shared = self._config.personalizer, self.shared
        shared.begin_turns()
        with opened(local):
            start = instruction.start if personalizer is None else personalizer.receive(local, instruction)
            if start is None:
                raise RuntimeError(f"{local!r} was sent no model, and has none of its own.")
            local.set_models(start, None)
            shared.enter(start, local.private)
            self.slots.enter(instruction.client_id)
            seed_global_rngs(instruction.seed, "train", instruction.round_index, instruction.client_id)
            epochs = self._config.local_epochs
            context = ClientContext(
                shared.module, shared.space, instruction, local, start, num_samples, batches, epochs
            )
            if self._algorithm is not None:
                self._algorithm.begin_client(context)
        self.context = context

    # ---- train

    def begin_batch(self, batch: Any = None) -> None:
        """Begin a batch, as the module gets it."""
        own = self._own
        self.slots.begin_batch(own.position, own.batches)
        if self._algorithm is not None:
            with opened(own.local):
                self._algorithm.begin_batch(own, batch)

    def begin_step(self, optimizer: Any) -> None:
        """Begin a step of an optimizer, whose gradients have been computed."""
        if self.context is None:
            return  # a step between two clients is the module's own
        context = self.context
        context.num_steps += 1
        if self._algorithm is not None:
            context.optimizer = optimizer
            context.lr_sum += optimizer.param_groups[0]["lr"]
            context.epoch = context.position * self._config.local_epochs // context.batches
            held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            for parameter in self._algorithm.frozen_parameters(context, held):
                parameter.grad = None
            held = [p for p in held if p.grad is not None]
            parameters, gradients = context.shared(held, [p.grad for p in held])
            with opened(context.local):
                self._algorithm.gradients(context, parameters, gradients)

    def end_batch(self, loss: Tensor | None) -> bool:
        """End a batch, with its training loss if the module gives one. Return whether it was the client's last."""
        own = self._own
        own.loss += float("nan") if loss is None else loss.detach().to(own.loss).mean()
        own.position += 1
        return own.position == own.batches

    def suspend(self) -> ClientContext:
        """Interrupt the turn while the client trains elsewhere, as a row among others, and return its context.

        The module may then become another client's."""
        own, self.context = self._own, None
        self.slots.leave(stage=False)
        return own

    def resume(self, own: ClientContext, loss: Tensor) -> None:
        """Continue the turn of a client that has trained elsewhere, one step a batch. The module holds its model.

        Args:
            own: the context that :meth:`suspend` returned.
            loss: the mean training loss over the client's batches.
        """
        told = own.instruction
        self.slots.enter(told.client_id)
        # Random numbers of its uploads must not depend on other clients.
        seed_global_rngs(told.seed, "train", told.round_index, told.client_id)
        own.position = own.num_steps = own.batches
        own.loss = loss * own.batches
        self.context = own

    # ---- leave

    def end(self, out: Tensor | None = None) -> ClientUpdate | None:
        """End the turn: read the client's model from the Trainer, and stage the state that the client keeps.

        Args:
            out: ``[P]``, the tensor to write the client's vector into.

        Returns:
            The client's update; None where its model is not finite, as if it had not taken part.
        """
        own, self.context = self._own, None
        local, shared = own.local, self.shared
        if self._algorithm is not None:
            self._algorithm.leave_client(own)
        with opened(local):
            vector, private = shared.read(out)
            trained = vector
            if upload_parameters(self.trainer):
                trained = vector.clone()
                shared.space.read(shared.module, out=vector)
            shared.reset_private()
            update = self._sent(own, vector, trained, private)
        self.slots.leave(stage=update is not None)
        return update

    def _sent(
        self, own: ClientContext, vector: Tensor, trained: Tensor, private: Mapping[str, Tensor]
    ) -> ClientUpdate | None:
        """Apply the uploads to the client's model, and gather the client's reports and the state that it keeps."""
        local, told, shared, uploads = own.local, own.instruction, self.shared, self._config.uploads
        leaving = UploadContext(
            told.client_id,
            self._num_clients,
            shared.space.num_parameters,
            told.round_index,
            told.seed if self.upload_seed is None else self.upload_seed,
            local.state,
            start_sent=told.start is not None,
        )
        sent, traffic = upload(uploads, vector, own.start, shared.global_vector, leaving)
        if sent is not vector:
            trained = trained.clone() if trained is vector else trained
            vector.copy_(sent)
        cut = shared.space.num_parameters
        # All numbers at once: reading one waits for the device.
        numbers = [vector.sum(), distances(vector[None, :cut], own.start[:cut])[0], own.loss / own.position]
        total, norm, loss = torch.stack([number.double() for number in numbers]).tolist()
        if not (math.isfinite(total) or vector.isfinite().all()) or shared.is_broken(private):
            return None
        tell = partial(sanitize_report, uploads, leaving) if uploads else None
        loss = loss if tell is None else tell("loss", loss)
        local.set_models(own.start, trained, vector, tell)
        shared.keep_buffers()
        own.trained, own.sent = trained, vector
        if uploads:
            own.upload = partial(self._upload, leaving)
        reports = self._reports(local, own)
        local.private.update(private)
        if self._config.personalizer is not None:
            self._config.personalizer.keep(local)
        return ClientUpdate(told.client_id, own.samples, vector, loss, own.num_steps, norm, reports, traffic)

    def _upload(self, leaving: UploadContext, vector: Tensor, start: Tensor, name: str) -> Tensor:
        """Apply the uploads to another model of the client, see :attr:`ClientContext.upload`."""
        state = {key.removeprefix(name): kept for key, kept in leaving.state.items() if key.startswith(name)}
        sent, _ = upload(self._config.uploads, vector, start, start, replace(leaving, state=state))
        leaving.state.update({name + key: kept for key, kept in state.items()})
        return sent

    def _reports(self, local: LocalData, own: ClientContext) -> dict[str, Tensor]:
        reported: dict[str, Tensor | float] = {}
        if self._algorithm is not None:
            reported |= self._algorithm.end_client(own)
        for strategy in self._strategies:
            reported |= strategy.report(local)
        undeclared = reported.keys() - {name for strategy in self._strategies for name in strategy.reports}
        if undeclared:
            raise RuntimeError(f"clients report {sorted(undeclared)}, which no strategy declares: reports = (...).")
        return {
            name: value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            for name, value in reported.items()
        }

    # ---- around a round's turns

    def discard(self) -> None:
        """Forget an unfinished round: restore the Trainer as it was at the round's start."""
        self.slots.leave(stage=False)
        if self._algorithm is not None and self.context is not None:
            self._algorithm.leave_client(self.context)
        self.context = None
        self.shared.discard()

    def remove(self) -> None:
        """Restore the Trainer's own counting, at the end of a fit."""
        self._windows.remove()


def optimizer_slots(trainer: L.Trainer, policy: Any, steps: LocalSteps | None = None) -> list[Slot]:
    """Make the slots of a Trainer's optimizers and schedules.

    Args:
        trainer: the trainer, with its optimizers set up.
        policy: what becomes of optimizers' state between a client's rounds, ``"reset"`` or ``"persist"``.
        steps: every client's number of steps; None: all clients have the same schedules.

    Raises:
        ConfigurationError: an optimizer or a scheduler cannot serve several clients.
    """
    return [Pace(trainer, policy, steps), OptimizerState(trainer, policy)]
