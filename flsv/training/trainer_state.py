"""TrainerState: swaps the states of clients and of the federation in the one Trainer.

A client enters with the model to start from and the state that it has kept: its unshared parameters, optimizers,
schedules and loss scale. When it leaves, the Trainer has the federation's again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import compress
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from flsv.core.parameter_space import ParameterSpace
from flsv.training.client_batches import LocalSteps
from flsv.training.entry_trial import SHARED_TYPES
from flsv.training.module_attributes import (
    Attribute,
    ModuleAttributes,
    loaded_values,
    saved_values,
)
from flsv.training.optimizers import Optimizers
from flsv.training.store import ClientStore
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.object_states import ObjectState, states_of
from flsv.utilities.reachable import find_generators

#: What :meth:`NonVectorState.read` returns: ``{"buffers": {name: tensor or None}, "attributes": {name: value}}``.
State = dict[str, dict[str, Any]]


class _ModuleState(NamedTuple):
    vector: Tensor  # [P]
    non_vector: State
    private: dict[str, Tensor]  # the parameters that clients do not share


class TrainerState:
    """State of a Trainer that is swapped between clients: model, unshared parameters, optimizers, loss scale."""

    global_vector: Tensor

    def __init__(
        self,
        trainer: L.Trainer,
        space: ParameterSpace,
        policy: Literal["reset", "persist"],
        store: ClientStore,
        steps: LocalSteps,
    ) -> None:
        self.module = trainer.lightning_module
        self.space = space
        self._store = store
        self._steps = steps
        self.optimizers = Optimizers(trainer, policy, steps)
        # States from a checkpoint are moved to the optimizers' device.
        store.convert("optimizer", self.optimizers.move_states)
        self._non_vector_state = NonVectorState(self.module, space.non_finite_names)
        self._constants = space.constants(self.module)
        self._buffers: State | None = None
        self._next_objects: list[Attribute] | None = None
        #: Random generators to which the module and its optimizers refer.
        self.generators = find_generators(self.module, trainer.optimizers, closed=SHARED_TYPES)
        self._generator_states: list[ObjectState] = []
        self._is_in_round = False
        self._client: int | None = None
        self.next_buffers: State | None = None

    # ---- a round

    def remember(self) -> None:
        """Store a copy of the module, before any hook of a round."""
        self._state_before_round = self._read()
        # The global model keeps its parameters that clients do not share.
        self._private = self._state_before_round.private
        self._is_in_round = True

    def begin_round(self) -> None:
        """Store a copy of the clients' initial model, which hooks may have changed."""
        self.space.check(self.module)
        self._steps.steps_before_round = self._steps.steps_so_far()
        self._non_vector_state.attributes.begin_round()
        self._state_at_start = self._non_vector_state.read()
        vector = self.space.read(self.module)
        if torch.equal(vector, self._state_before_round.vector):
            self.global_vector = self._state_before_round.vector  # one copy in memory
        else:  # a hook has changed the model
            self.global_vector = vector
        self._constants_at_start = _norms_and_sums(self._constants.values())
        # `begin_clients` reads the counters that clients start with: transfer hooks may still change them.
        self._buffers = None
        self._next_objects = None
        self.next_buffers = None

    def begin_clients(self) -> None:
        """Copy the counters and masks that are not in the vector, before the first client trains."""
        if self._buffers is None:
            self._buffers = self._non_vector_state.read()
            self._objects = self._non_vector_state.attributes.objects()
            for generator in self.generators:
                self._generator_states.extend(states_of(generator))

    def end_clients(self) -> None:
        """Restore the copied counters and masks, and the generators, after the last client's training."""
        self._restore_generators()
        if self._buffers is not None:
            self._non_vector_state.attributes.restore_objects(self._objects)
            self._non_vector_state.write(self._buffers)

    def end_round(self, vector: Tensor) -> None:
        """Write the next global model ``vector [P]`` into the module."""
        if self._next_objects is not None:
            self._non_vector_state.attributes.restore_objects(self._next_objects)
        # What is not in the vector: integer buffers and attributes.
        if self.next_buffers is None:  # no client's counters and masks were kept
            non_vector = self._state_at_start
        else:
            non_vector = self.next_buffers
        self._write(_ModuleState(vector, non_vector, self._private))
        self._non_vector_state.attributes.end_round()
        self.global_vector = vector
        self._is_in_round = False

    def discard(self) -> None:
        """Restore the state from before the round."""
        self.leave(keep=False)
        self._restore_generators()
        self._write(self._state_before_round)

    def _restore_generators(self) -> None:
        for state in self._generator_states:
            state.restore()
        self._generator_states = []

    # ---- a client

    def enter(
        self,
        client: int,
        model: Tensor | None = None,
        private: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Load a client's optimizer state into the Trainer, and ``model [P]`` with its ``private`` parameters into the
        module. Without ``model`` the module keeps its weights."""
        if model is not None:
            self.begin_clients()
            assert self._buffers is not None
            # Objects come before the tensors within them.
            self._non_vector_state.attributes.restore_objects(self._objects)
            # A client without private parameters of its own has those of the global model.
            private_parameters = {**self._private, **(private or {})}
            self._write(_ModuleState(model, self._buffers, private_parameters))

        self._client = client
        self._steps.client = client
        self._steps.steps_before_client = self._steps.steps_so_far()
        self.optimizers.enter(client, self._store.committed(client))

    def read(self, out: Tensor | None = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the model ``[P]`` to send (in ``out``), the trained model, and the parameters that stay at the
        client."""
        self._non_vector_state.check()
        self._non_vector_state.attributes.end_client()
        vector = self.space.read(self.module, out=out)
        private_entries = self.space.read_private(self.module)
        self._check_constants()
        trained_model = vector
        # An optimizer may overwrite the module's trained weights by those to send.
        is_overwritten = self.optimizers.write_upload()
        if is_overwritten:
            trained_model = vector.clone()
            self.space.read(self.module, out=vector)
        # What follows reads the module, and must not see the client's private parameters.
        self.space.write_private(self.module, self._private)
        return vector, trained_model, private_entries

    def is_broken(self, private: Mapping[str, Tensor]) -> bool:
        """Return whether training has made a parameter that stays at the client infinite or NaN."""
        for name, tensor in private.items():
            if not tensor.isfinite().all() and self._private[name].isfinite().all():
                return True
        return False

    def keep_buffers(self) -> None:
        """Store the first client's counters and masks, which the next global model gets."""
        if self.next_buffers is None:
            self.next_buffers = self._non_vector_state.read()
            self._next_objects = self._non_vector_state.attributes.objects()

    def leave(self, keep: bool) -> None:
        """Restore the federation's optimizers, schedules and scale. With ``keep`` stage the client's in the store."""
        if self._client is None:
            return
        client_state = self.optimizers.leave()
        if keep:
            self._store.stage(self._client, client_state)
        self._client = None
        self._steps.client = None
        self._steps.last_batch = None
        self._steps.is_in_batch = False

    # ---- checkpoints

    def buffers(self) -> State:
        """Return the global model's counters and masks."""
        if self._is_in_round:  # the module now has a client's
            state = self._state_before_round.non_vector
        else:
            state = self._non_vector_state.read()
        # After a round each list holds what all clients have added.
        attributes = self._non_vector_state.attributes.values_for_next_round(state["attributes"])
        return {"buffers": state["buffers"], "attributes": saved_values(attributes)}

    def restore(self, buffers: State) -> None:
        """Write the counters and masks in ``buffers`` into the module."""
        self._non_vector_state.resume(buffers)

    def global_state_dict(self) -> dict[str, Any]:
        """Return the ``state_dict`` of the global model from before the round."""
        client_state = self._read()
        # The module has the global model's values only until `state_dict` is copied.
        with ExitStack() as version_guards:
            # Autograd must not take this for a change of the tensors that a forward pass has stored.
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                if not tensor.is_inference():
                    version_guards.enter_context(_unsafe_preserve_version_counter(tensor))
            self._write(self._state_before_round)
            state_dict = {name: value.clone() for name, value in self.module.state_dict().items()}
            self._write(client_state)
        return state_dict

    def _check_constants(self) -> None:
        """Check that frozen parameters have not changed."""
        if not self._constants:
            return
        norms_and_sums = _norms_and_sums(self._constants.values())
        is_changed = (norms_and_sums != self._constants_at_start).any(0).tolist()  # per tensor
        changed_names = list(compress(self._constants, is_changed))
        if changed_names:
            raise ConfigurationError(
                f"{listed(map(repr, changed_names))} required no gradient when the fit began, so that they were taken "
                "to be the same at all clients, and training changes them, as where one network follows another or "
                'layers are unfrozen. Say what they are: FederatedLoop(share=["trainable", "name.*"]) shares them, '
                'share=["trainable", "!name.*"] keeps them at their client.'
            )

    def _read(self) -> _ModuleState:
        return _ModuleState(
            vector=self.space.read(self.module),
            non_vector=self._non_vector_state.read(),
            private=self.space.read_private(self.module),
        )

    @torch.no_grad()
    def _write(self, state: _ModuleState) -> None:
        self.space.write(self.module, state.vector)
        self._non_vector_state.write(state.non_vector)
        self.space.write_private(self.module, state.private)


@torch.no_grad()
def _norms_and_sums(tensors: Iterable[Tensor]) -> Tensor:
    """Return the tensors' norms and sums ``[2, n]``, by which a later change is detected."""
    float_tensors = []
    for tensor in tensors:
        if tensor.is_floating_point():
            float_tensors.append(tensor)
        else:  # only real numbers are compared
            placeholder = tensor.new_zeros(1, dtype=torch.float32)
            float_tensors.append(placeholder)
    if not float_tensors:
        return torch.empty(2, 0)
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(float_tensors)])
    sums = torch.stack([tensor.sum().double() for tensor in float_tensors])
    return torch.stack([norms, sums]).nan_to_num()  # NaN equals NaN in a comparison of these


class NonVectorState:
    """Tensors of a module outside of its vector, such as counters, masks and memory banks.

    The next global model takes those of the cohort's first client, since averages of counters have no meaning."""

    def __init__(self, module: nn.Module, non_finite_names: Collection[str] = ()) -> None:
        self._module = module
        tensors: dict[str, Tensor] = dict(module.named_parameters())
        tensors.update(module.named_buffers())
        self._non_finite_tensors = []
        for name in non_finite_names:
            initial_tensor = tensors[name].detach().clone()
            self._non_finite_tensors.append((name, tensors[name], initial_tensor))
        self.attributes = ModuleAttributes(module)

    def read(self) -> State:
        """Return copies of these tensors by name."""
        buffers = {}
        for name, _, _, buffer in self._buffers():
            buffers[name] = None if buffer is None else buffer.clone()
        return {"buffers": buffers, "attributes": self.attributes.read()}

    @torch.no_grad()
    def write(self, state: State, keeps_others: bool = False) -> None:
        """Write tensors from :meth:`read` into the module. Unless ``keeps_others``, delete attributes that hold other
        tensors."""
        self._write_buffers(state["buffers"])
        self.attributes.write(state["attributes"], keeps_others)

    def resume(self, state: State) -> None:
        """Write tensors from a checkpoint into the module."""
        device = _device_of(self._module)
        attributes = loaded_values(state["attributes"], device)
        self.write({"buffers": state["buffers"], "attributes": attributes}, keeps_others=True)

    def check(self) -> None:
        """Check that entries that were infinite or NaN at the start have not changed."""
        changed_names = []
        for name, tensor, initial_tensor in self._non_finite_tensors:
            if not _are_equal(tensor, initial_tensor):
                changed_names.append(name)
        if changed_names:
            raise ConfigurationError(
                f"{changed_names} held infinite values or NaN when training started, and training has changed them: "
                "such values cannot be averaged. Register the buffers with persistent=False, so that every client has "
                "its own for a round, or start them from finite values."
            )

    def _write_buffers(self, state: Mapping[str, Tensor | None]) -> None:
        unwritten = dict(state)
        for name, layer, name_in_layer, buffer in list(self._buffers()):  # the loop deletes buffers
            if name not in state:  # training has made this buffer
                delattr(layer, name_in_layer)
                continue
            value = unwritten.pop(name)
            if buffer is None or value is None or not _have_same_format(buffer, value):
                layer._buffers[name_in_layer] = self._copy(value)
            else:
                buffer.copy_(value)
        if not unwritten:
            return

        # Buffers that the module does not have now.
        layers = dict(self._module.named_modules())
        for name, value in unwritten.items():
            layer_name, _, name_in_layer = name.rpartition(".")
            layer = layers[layer_name]
            if name_in_layer not in layer._buffers:
                layer.register_buffer(name_in_layer, self._copy(value), persistent=False)

    def _copy(self, value: Tensor | None) -> Tensor | None:
        """Copy a buffer's value to the module's device."""
        if value is None:
            return None
        return value.to(_device_of(self._module), copy=True)

    def _buffers(self) -> Iterator[tuple[str, nn.Module, str, Tensor | None]]:
        """Yield ``(name, layer, name in layer, buffer)`` of each integer or non-persistent buffer."""
        for prefix, layer in self._module.named_modules():
            for name_in_layer, buffer in layer._buffers.items():
                is_persistent = name_in_layer not in layer._non_persistent_buffers_set
                if is_persistent and (buffer is None or _can_be_averaged(buffer)):
                    continue  # a part of the vector
                name = f"{prefix}.{name_in_layer}" if prefix else name_in_layer
                yield name, layer, name_in_layer, buffer


def _can_be_averaged(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _have_same_format(tensor: Tensor, other_tensor: Tensor) -> bool:
    return tensor.shape == other_tensor.shape and tensor.dtype == other_tensor.dtype


def _are_equal(tensor: Tensor, other_tensor: Tensor) -> bool:
    """Return whether two dense tensors are equal, NaN included."""
    if tensor.shape != other_tensor.shape or tensor.dtype != other_tensor.dtype:
        return False
    if tensor.layout != torch.strided or other_tensor.layout != torch.strided:
        return False
    other_tensor = other_tensor.to(tensor.device)
    are_both_nan = tensor.isnan() & other_tensor.isnan()
    return bool(((tensor == other_tensor) | are_both_nan).all())


def _device_of(module: nn.Module) -> torch.device:
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")
