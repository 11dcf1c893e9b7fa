"""TrainerState: swaps the states of clients and of the federation in the one Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import compress
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from flsv.core.parameter_space import ParameterSpace
from flsv.isolation.reachable import find_generators
from flsv.training.client_batches import LocalSteps
from flsv.training.client_values import ClientValues
from flsv.training.module_snapshot import (
    DATA_PATH,
    ModuleSnapshot,
    SnapshotState,
    loaded_state,
    saved_state,
    write_state,
)
from flsv.training.module_state import ModuleState, kept_state
from flsv.training.optimizers import Optimizers
from flsv.training.shared_objects import SHARED_TYPES
from flsv.training.store import ClientStore
from flsv.training.swapped_optimizer import Policy
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.plain_values import are_equal, copied
from flsv.utilities.seeding import generator_state, restore_generator

_MISSING = object()


class TrainerState:
    """State of a Trainer that is swapped between clients: model, unshared parameters, optimizers, loss scale."""

    def __init__(
        self,
        trainer: L.Trainer,
        space: ParameterSpace,
        policy: Policy,
        store: ClientStore,
        steps: LocalSteps,
    ) -> None:
        self.module = trainer.lightning_module
        self._loop: Any = trainer.fit_loop  # a FederatedFitLoop
        self.space = space
        self._store = store
        self._steps = steps
        self.optimizers = Optimizers(trainer, policy, steps)
        # States from a checkpoint are moved to the optimizers' device.
        store.convert("optimizer", self.optimizers.move_states)
        self._constants = space.constants(self.module)
        #: Random generators to which the module and its optimizers refer.
        self.generators = find_generators(self.module, trainer.optimizers, closed=SHARED_TYPES)
        # (generator, state before the first client's training)
        self._generator_states: list[tuple[Any, Any]] = []
        # The state with which clients begin in the round. None: no client has begun.
        self._initial_snapshot: ModuleSnapshot | None = None
        #: The clients' changes of the module's values that are not in the vector.
        self.values = ClientValues()
        snapshot = ModuleSnapshot(self.module)
        self._initial_data_values = _values_of_data(snapshot)
        # Layers, hooks and flags after the last round. A validation changes the modes of layers.
        self._structure = snapshot.structure

    # ---- a round

    def remember(self) -> None:
        """Store a copy of the module, before any hook of a round."""
        self._state_before_round = ModuleState.read(self.module, self.space)
        # The global model keeps its own values of the parameters that clients do not share.
        self._private = self._state_before_round.private

    def begin_round(self) -> Tensor:
        """Return a copy of the global model ``[P]``, which hooks may have changed."""
        self.space.check(self.module)
        vector = self.space.read(self.module)
        if torch.equal(vector, self._state_before_round.vector):
            vector = self._state_before_round.vector  # one copy in memory
        self._constants_at_start = _norms_and_sums(self._constants.values())
        # `begin_clients` takes the snapshot: transfer hooks may still change counters.
        self._initial_snapshot = None
        return vector

    def begin_clients(self) -> None:
        """Take the snapshot with which each client starts, before the first client trains."""
        if self._initial_snapshot is None:
            self._initial_snapshot = ModuleSnapshot(self.module)
            self._non_finite_tensors = self._copied_tensors(self.space.non_finite_names)
            for generator in self.generators:
                self._generator_states.append((generator, generator_state(generator)))

    def end_clients(self) -> None:
        """Restore the snapshot, and the generators, after the last client's training."""
        self._restore_generators()
        if self._initial_snapshot is not None:
            self._initial_snapshot.restore()

    def end_round(self, vector: Tensor) -> None:
        """Write the next global model ``vector [P]`` into the module."""
        # Layers, parameters and buffers are restored before the vector is written into them.
        if self._initial_snapshot is None:  # no client has trained
            self._structure = self._state_before_round.snapshot.structure
        else:
            merged_snapshot = self.values.write(self.module, self._initial_snapshot)
            self._structure = merged_snapshot.structure
        self.space.write(self.module, vector)
        self.space.write_private(self.module, self._private)
        self._forget_clients()

    def discard(self) -> None:
        """Restore the state from before the round."""
        self.leave(keep=False)
        self._restore_generators()
        self._state_before_round.write(self.module, self.space)
        if self.module.trainer.validating:  # a validation ends the round early
            self.module.eval()
        self._forget_clients()

    def _forget_clients(self) -> None:
        self._initial_snapshot = None
        self.values.forget()

    def _restore_generators(self) -> None:
        for generator, state in self._generator_states:
            restore_generator(generator, state)
        self._generator_states = []

    # ---- a client

    def enter(
        self, model: Tensor | None = None, private: Mapping[str, Tensor] | None = None
    ) -> None:
        """Load the present client's optimizer state into the Trainer, and ``model [P]`` with its ``private`` parameters
        into the module. Without ``model`` the module keeps its weights."""
        if model is not None:
            assert self._initial_snapshot is not None
            # The client's private parameters replace the global model's, if it has any yet.
            private_parameters = dict(self._private)
            if private is not None:
                private_parameters.update(private)
            client_state = ModuleState(model, self._initial_snapshot, private_parameters)
            client_state.write(self.module, self.space)

        client = self._steps.client
        assert client is not None
        self.optimizers.enter(client, self._store.committed(client))

    def read(self, out: Tensor | None = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the model ``[P]`` to send (in ``out``), the trained model, and the parameters that stay at the
        client."""
        self.optimizers.write_model()
        self._check_non_finite()
        vector = self.space.read(self.module, out=out)
        private_tensors = self.space.read_private(self.module)
        self._check_constants()
        trained_model = vector
        # An optimizer may overwrite the module's trained weights by those to send.
        is_overwritten = self.optimizers.write_upload()
        if is_overwritten:
            trained_model = vector.clone()
            self.space.read(self.module, out=vector)
        # Later code reads the module, and must not see the client's private parameters.
        self.space.write_private(self.module, self._private)
        return vector, trained_model, private_tensors

    def is_broken(self, private: Mapping[str, Tensor]) -> bool:
        """Return whether training has made a parameter that stays at the client infinite or NaN."""
        for name, tensor in private.items():
            if not tensor.isfinite().all() and self._private[name].isfinite().all():
                return True
        return False

    def keep_values(self, client: int, num_samples: int) -> None:
        """Store the client's changes of the module's values outside the vector."""
        assert self._initial_snapshot is not None
        self.values.add(
            client, num_samples, initial=self._initial_snapshot, trained=ModuleSnapshot(self.module)
        )

    def leave(self, keep: bool) -> None:
        """Restore the federation's optimizers, schedules and loss scale. With ``keep``, stage the client's state."""
        client = self._steps.client
        if client is None:
            return
        client_state = self.optimizers.leave()
        if keep:
            self._store.stage(client, client_state)
        self._steps.client = None

    # ---- checkpoints

    def buffers(self) -> SnapshotState:
        """Return the global model's state that is not in the vector."""
        if self._loop.is_in_round:  # the module holds a client's values
            snapshot = self._state_before_round.snapshot
        else:
            snapshot = ModuleSnapshot(self.module)
        state = snapshot.state()
        # A resumed run's data module may be made with other options, so values that training has not changed are not
        # saved.
        for path, value in _values_of_data(snapshot).items():
            initial_value = self._initial_data_values.get(path, _MISSING)
            if are_equal(value, initial_value):
                del state["attributes"][path]
        return saved_state({**state, "structure": self._structure_after_round(snapshot)})

    def _structure_after_round(self, snapshot: ModuleSnapshot) -> dict[str, list[Any]]:
        """Return the structure of ``snapshot`` with the layers' modes from the end of the last round."""
        structure = {}
        for path, (flag, description) in snapshot.structure.items():
            structure[path] = [flag, description]
            is_layer = isinstance(snapshot.owners[path], nn.Module)
            if is_layer and path in self._structure:  # a validation may be changing its mode
                mode_after_round, _ = self._structure[path]
                structure[path] = [mode_after_round, description]
        return structure

    def restore(self, buffers: SnapshotState) -> None:
        """Write a checkpoint's state into the module."""
        missing = write_state(self.module, loaded_state(buffers, self.module.device))
        self._structure = ModuleSnapshot(self.module).structure
        if missing:
            rank_zero_warn(
                f"flsv: training has changed {type(self.module).__name__} in a way that a checkpoint cannot store: "
                f"{listed(missing)}. The resumed run trains without these changes. Make them in __init__ or "
                "configure_model."
            )

    def global_state_dict(self) -> dict[str, Any]:
        """Return the ``state_dict`` of the global model from before the round."""
        # The module has the state of the client in training. It gets the global model's until this is copied.
        with ExitStack() as version_guards:
            # A backward pass fails if the versions of tensors that its forward pass has stored differ. In the end these
            # tensors have the same values as before, so they keep their versions. Inference tensors have none.
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                if not tensor.is_inference():
                    version_guards.enter_context(_unsafe_preserve_version_counter(tensor))

            with kept_state(self.module, self.space):
                self._state_before_round.write(self.module, self.space)
                state_dict = self.module.state_dict()
                return {name: value.clone() for name, value in state_dict.items()}

    def _copied_tensors(self, names: Iterable[str]) -> list[tuple[str, Tensor, Tensor]]:
        tensors: dict[str, Tensor] = dict(self.module.named_parameters())
        tensors.update(self.module.named_buffers())
        return [(name, tensors[name], copied(tensors[name])) for name in names]

    def _check_non_finite(self) -> None:
        """Check that a client has not changed tensors that held infinite values or NaN when the run began."""
        changed_names = [
            name
            for name, tensor, initial_tensor in self._non_finite_tensors
            if not are_equal(tensor.detach(), initial_tensor)
        ]
        if changed_names:
            raise ConfigurationError(
                f"{changed_names} held infinite values or NaN when the run began, and a client's training changes "
                "them, but such values cannot be averaged. Register the buffers with persistent=False, so that every "
                "client has its own for a round, or initialize them with finite values."
            )

    def _check_constants(self) -> None:
        if not self._constants:
            return
        constants = _norms_and_sums(self._constants.values())
        is_changed = (constants != self._constants_at_start).any(0).tolist()  # per tensor
        changed_names = list(compress(self._constants, is_changed))
        if changed_names:
            raise ConfigurationError(
                f"{listed(map(repr, changed_names))} required no gradient when the fit began, so flsv treats them as "
                "equal at all clients, but training changes them (for example a moving average of another network, or "
                'layers that are unfrozen). Set FederatedLoop(share=["trainable", "name.*"]) to share them, or '
                'share=["trainable", "!name.*"] to keep them at their client.'
            )


def _values_of_data(snapshot: ModuleSnapshot) -> dict[str, Any]:
    """Return the plain values of the user's data module by path."""
    prefix = f"{DATA_PATH}."
    return {path: value for path, value in snapshot.values.items() if path.startswith(prefix)}


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
