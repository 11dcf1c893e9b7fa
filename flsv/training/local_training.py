"""LocalTraining: a client's training in a Trainer in one round, from the server's Instruction to its ClientUpdate.

If clients train at once, ``begin`` is called for all of them before ``end`` is called for the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import lightning as L
import torch
from torch import Tensor

from flsv.core import ClientUpdate, Instruction, LocalData, Strategy, Traffic, opened
from flsv.core.parameter_space import ParameterSpace
from flsv.functional.distances import all_finite
from flsv.training.algorithms import ClientContext
from flsv.training.client_batches import LocalSteps
from flsv.training.optimizer_steps import ClientSteps, GradientSteps, uses_gradients
from flsv.training.shared_objects import SharedObjectCheck
from flsv.training.store import ClientStore
from flsv.training.swapped_optimizer import Policy
from flsv.training.trainer_state import TrainerState
from flsv.uploads.base import Upload, UploadContext, sanitize_report, upload
from flsv.utilities.errors import ConfigurationError


class ClientParts(Protocol):
    """Settings of a federation that a client's training reads."""

    @property
    def client_algorithm(self) -> Any: ...

    @property
    def personalizer(self) -> Any: ...

    @property
    def strategies(self) -> Mapping[str, Strategy]: ...

    @property
    def uploads(self) -> Sequence[Upload]: ...

    @property
    def optimizer_state(self) -> Policy: ...

    @property
    def is_private(self) -> bool: ...


class LocalTraining:
    """Training of clients in a Trainer, one after the other.

    Args:
        trainer: the Trainer, whose module is trained.
        space: the map between the module and its shared vectors ``[P]``.
        parts: the loop's settings for clients.
        store: the states that clients keep between their rounds.
        steps: the batches of the client in training.
        checks_shared_objects: whether the first client's training is checked for changes of objects that clients share.
        upload_seed: the seed of the uploads' random numbers. None: that of the instruction.
        upload_secret: the secret key of the uploads' noise.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        space: ParameterSpace,
        parts: ClientParts,
        store: ClientStore,
        steps: LocalSteps,
        checks_shared_objects: bool = True,
        upload_seed: int | None = None,
        upload_secret: bytes = b"",
    ) -> None:
        self.trainer = trainer
        self._parts = parts
        self._store = store
        self._steps = steps
        self._algorithm = parts.client_algorithm
        self.state = TrainerState(
            trainer, space, policy=parts.optimizer_state, store=store, steps=steps
        )
        steps_class = GradientSteps if uses_gradients(self._algorithm) else ClientSteps
        self.client_steps = steps_class(trainer, self.state, self._algorithm)

        self._upload_seed = upload_seed
        self._upload_secret = upload_secret
        # Norms of the tensors in each client's update of the first round.
        self.first_updates: dict[int, Tensor] = {}
        self._checks_shared_objects = checks_shared_objects
        self._shared_object_check: SharedObjectCheck | None = None
        self._trains_at_once = False

    @property
    def is_trained(self) -> bool:
        """Return whether the client in training has seen all batches of the round, or has failed."""
        context = self.client_steps.context
        if context is None:
            return False
        return context.broken or context.position == context.batches

    # ---- enter

    def begin(
        self, instruction: Instruction, local: LocalData, num_samples: int, lengths: Sequence[int]
    ) -> None:
        """Load a client's model and state into the Trainer. ``lengths`` are the local epochs' numbers of batches."""
        self._steps.client = instruction.client_id
        self.state.begin_clients()  # has an effect for the round's first client only
        # Strategies can read the client's data only in this context.
        with opened(local):
            initial_model = self._initial_model(instruction, local)
            local.set_models(initial_model, model=None)
            self._enter(instruction, local, initial_model)
            context = ClientContext(
                module=self.state.module,
                space=self.state.space,
                instruction=instruction,
                local=local,
                initial_model=initial_model,
                samples=num_samples,
                lengths=lengths,
            )
            if self._algorithm is not None:
                self._algorithm.begin_client(context)
        self.client_steps.begin(context)

    def _initial_model(self, instruction: Instruction, local: LocalData) -> Tensor:
        model: Tensor | None
        if self._parts.personalizer is None:
            model = instruction.start
        else:
            model = self._parts.personalizer.receive(local, instruction)
        if model is None:
            raise RuntimeError(f"{local!r} received no model and has no model in its state.")
        return model

    def _enter(self, instruction: Instruction, local: LocalData, initial_model: Tensor) -> None:
        """Put the client's model and state into the Trainer."""
        unshared_tensors: Mapping[str, Tensor] = {}
        if self.state.space.private_names:
            unshared_tensors = local.private
        self.state.enter(initial_model, unshared_tensors)
        self.client_steps.seed(instruction)  # for `begin_client`; the first batch begins anew
        if self._checks_shared_objects:
            self._shared_object_check = SharedObjectCheck(self.trainer)

    # ---- training outside of the Trainer

    def suspend(self) -> ClientContext:
        """Interrupt the client's training, to train its model outside of the Trainer. Return its context."""
        context = self.client_steps.context
        assert context is not None
        self._trains_at_once = True
        self.client_steps.end()
        self.state.leave(keep=False)
        return context

    def resume(self, context: ClientContext, mean_loss: Tensor) -> None:
        """Continue a suspended training whose batches were all trained outside of the Trainer."""
        instruction = context.instruction
        self._steps.client = instruction.client_id
        self.state.enter()
        # The random numbers of the client's uploads must not depend on other clients.
        self.client_steps.seed(instruction)
        context.position = context.batches
        context.num_steps = context.batches  # one step per batch
        context.loss = mean_loss * context.batches  # the sum over batches
        self.client_steps.context = context

    # ---- leave

    def end(self, out: Tensor | None = None) -> ClientUpdate | None:
        """Return the client's update, with its model in ``out [P]`` (None if the model is not finite), and restore the
        Trainer's own state."""
        context = self.client_steps.context
        assert context is not None
        self.client_steps.end()
        if self._algorithm is not None:
            self._algorithm.leave_client(context)

        # Strategies can read the client's data only in this context.
        with opened(context.local):
            update = self._read_update(context, out)
        is_usable = update is not None and not context.broken
        self.state.leave(keep=is_usable)

        # Only the first client is checked. Then the check's copies of the shared objects are freed.
        if self._shared_object_check is not None:
            self._shared_object_check.warn_of_changes()
            self._shared_object_check = None
            self._checks_shared_objects = False
        return update

    def _read_update(self, context: ClientContext, out: Tensor | None) -> ClientUpdate | None:
        """Make the trained client's update, None if its model is not finite."""
        vector, trained_model, unshared_tensors = self.state.read(out)
        has_differential_privacy = self._parts.is_private
        if has_differential_privacy:  # an error would reveal something about the data
            context.broken |= not all_finite(vector)
        else:
            self._check_steps(context, trained_model)
        context.broken |= self.state.is_broken(unshared_tensors)

        if not context.broken:
            return self._make_update(context, vector, trained_model, unshared_tensors)
        if has_differential_privacy:
            return self._make_update_without_training(context, vector)
        return None

    def _make_update_without_training(
        self, context: ClientContext, vector: Tensor
    ) -> ClientUpdate | None:
        """Make the update of a client whose failure must not be seen: the global model plus noise."""
        # The client's staged state is dropped before the uploads run, since these store in it what they do not send.
        self._store.discard(context.instruction.client_id)
        vector.copy_(self._steps.state.model())
        return self._make_update(context, vector, vector, unshared_tensors={})

    def _check_steps(self, context: ClientContext, trained: Tensor) -> None:
        """Check that a client without an optimizer step has not changed its model."""
        if context.num_steps > 0 or context.broken:
            return
        num_parameters = context.num_parameters
        if not torch.equal(trained[:num_parameters], context.start[:num_parameters]):
            raise ConfigurationError(
                f"training of {type(context.module).__name__} changes the model without a step of a torch optimizer, "
                "so steps cannot be counted and client algorithms cannot work. Change the parameters by the step of a "
                "torch.optim.Optimizer."
            )

    def _make_update(
        self,
        context: ClientContext,
        vector: Tensor,
        trained: Tensor,
        unshared_tensors: Mapping[str, Tensor],
    ) -> ClientUpdate | None:
        """Apply attacks, noise and compression, and make the update, None if it is not finite."""
        instruction = context.instruction
        upload_context = self._upload_context(context)
        traffic = self._write_upload(context, vector, trained, upload_context)
        loss = _loss_if_finite(context, vector)
        if loss is None:
            return None

        reported_loss = sanitize_report(self._parts.uploads, upload_context, "loss", loss)
        self._store_models(context, upload_context)
        reports = self._reports(context)
        self._keep_unshared_state(context.local, unshared_tensors)

        update = ClientUpdate(instruction.client_id, context.samples, vector, traffic=traffic)
        if self._parts.is_private:  # no other field may reveal something about the data
            num_steps = self._steps.steps_in_round(context.lengths, instruction.round_index)
            return replace(update, num_steps=num_steps)
        return replace(update, loss=reported_loss, num_steps=context.num_steps, reports=reports)

    def _write_upload(
        self, context: ClientContext, vector: Tensor, trained: Tensor, upload_context: UploadContext
    ) -> Traffic:
        """Overwrite ``vector [P]`` with the model that the client sends. Return its size in transmission."""
        sent, traffic = upload(
            self._parts.uploads,
            vector,
            initial_model=context.start,
            global_vector=self._steps.state.model(),
            context=upload_context,
        )
        context.trained = trained
        context.sent = vector
        if sent is not vector:
            if trained is vector:
                context.trained = trained.clone()  # `vector` is overwritten next
            vector.copy_(sent)
        return traffic

    def _store_models(self, context: ClientContext, upload_context: UploadContext) -> None:
        """Store the models for strategies that read the client's data, and the module's values for the round's end."""
        assert context.trained is not None
        uploads = self._parts.uploads
        context.upload = partial(self._upload_another_model, upload_context)
        tell = partial(sanitize_report, uploads, upload_context) if uploads else None
        context.local.set_models(context.start, context.trained, sent=context.sent, tell=tell)
        self._store_first_update(context, context.trained - context.start)
        self.state.keep_values(context.instruction.client_id, context.samples)

    def _keep_unshared_state(
        self, local: LocalData, unshared_tensors: Mapping[str, Tensor]
    ) -> None:
        """Store what the client does not send: unshared parameters, and what the personalizer keeps."""
        local.private.update(unshared_tensors)
        if self._parts.personalizer is not None:
            self._parts.personalizer.keep(local)

    def _store_first_update(self, context: ClientContext, update: Tensor) -> None:
        """Store the norms of an update's tensors in the first round."""
        # The rounding of models that are trained at once depends on the other models in the batch.
        if context.instruction.round_index > 0 or self._trains_at_once:
            return
        tensors = self.state.space.unflatten(update).values()
        norms = torch._foreach_norm([tensor.float() for tensor in tensors])
        self.first_updates[context.instruction.client_id] = torch.stack(norms)

    def _upload_context(self, context: ClientContext) -> UploadContext:
        instruction = context.instruction
        seed = instruction.seed if self._upload_seed is None else self._upload_seed
        return UploadContext(
            client=instruction.client_id,
            num_clients=self._steps.state.num_clients,
            num_parameters=self.state.space.num_parameters,
            round_index=instruction.round_index,
            seed=seed,
            state=context.local.state,  # read it now: the state of a broken client was replaced
            start_sent=instruction.start is not None,
            secret=self._upload_secret,
        )

    def _upload_another_model(
        self, upload_context: UploadContext, vector: Tensor, initial_model: Tensor, name: str
    ) -> Tensor:
        """Apply attacks, noise and compression to another model of the client, trained from ``initial_model``."""
        # Each model has its own state of the uploads, such as a residual. The client's state holds it under keys
        # that begin with the model's name.
        client_state = upload_context.state
        state_of_model = {
            key.removeprefix(name): value
            for key, value in client_state.items()
            if key.startswith(name)
        }
        sent_vector, _ = upload(
            self._parts.uploads,
            vector,
            initial_model=initial_model,
            global_vector=initial_model,
            context=replace(upload_context, state=state_of_model),
        )
        # The uploads have changed `state_of_model` in place.
        for key, value in state_of_model.items():
            client_state[name + key] = value
        return sent_vector

    def _reports(self, context: ClientContext) -> dict[str, Tensor]:
        reported: dict[str, Tensor | float] = {}
        if self._algorithm is not None:
            reported |= self._algorithm.end_client(context)
        declared_names = set()
        for strategy in self._parts.strategies.values():
            reported |= strategy.report(context.local)
            declared_names |= set(strategy.reports)

        surplus_names = sorted(reported.keys() - declared_names)
        if surplus_names:
            raise RuntimeError(
                f"clients report {surplus_names}, but no strategy has these names in its `reports`. Add them there."
            )
        return {name: _as_report(value) for name, value in reported.items()}

    # ---- when a round is aborted

    def discard(self) -> None:
        """Restore the Trainer's state from the round's start."""
        context = self.client_steps.context
        if self._algorithm is not None and context is not None:
            self._algorithm.leave_client(context)
        self.client_steps.end()
        self.state.discard()


def _loss_if_finite(context: ClientContext, vector: Tensor) -> float | None:
    """Return the client's mean loss, or None if its model ``vector [P]`` is not finite."""
    mean_loss = context.loss / context.position
    # Read both numbers at once: each read waits for the device.
    total, loss = torch.stack([vector.sum().double(), mean_loss.double()]).tolist()
    is_finite = math.isfinite(total) or vector.isfinite().all()
    return loss if is_finite else None


def _as_report(value: Tensor | float) -> Tensor:
    """Return a reported value as a tensor without a graph."""
    if isinstance(value, Tensor):
        return value.detach()
    return torch.tensor(value, dtype=torch.float64)
