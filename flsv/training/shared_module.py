"""SharedModule: the Trainer's module, which holds each client's model in turn and the global model between rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from flsv.core.parameter_space import ParameterSpace
from flsv.training.non_vector_state import NonVectorState, State
from flsv.utilities.errors import ConfigurationError


class SharedModule:
    """Trainer's module, in which one client after the other trains its model."""

    global_vector: Tensor

    def __init__(self, module: nn.Module, space: ParameterSpace) -> None:
        self.module, self.space = module, space
        self._unsaved = NonVectorState(module, space.non_finite_names)
        self._constants = space.constants(module)
        self._within = False
        self.next_buffers: State | None = None

    # ---- a round

    def remember(self) -> None:
        """Store a copy of the module, before any hook of a round."""
        self._saved = self._read()
        self._private = self._saved[2]  # the global model keeps the entries that clients do not share
        self._within = True

    def begin_round(self) -> None:
        """Store a copy of the clients' start model, which hooks may have changed."""
        self.space.check(self.module)
        self._unsaved.warn_of_collections()
        vector, self._before = self.space.read(self.module), self._unsaved.read()
        between_rounds = self._saved[0]
        self.global_vector = between_rounds if torch.equal(vector, between_rounds) else vector
        self._marks = _marks(self._constants.values())
        # `begin_turns` reads the counters that clients start with: transfer hooks may still change them.
        self._buffers: State | None = None
        self.next_buffers = None

    def begin_turns(self) -> None:
        """Copy the counters and masks before the first client trains."""
        if self._buffers is None:
            self._buffers = self._unsaved.read()

    def end_turns(self) -> None:
        """Restore the counters and masks after the last client's training."""
        if self._buffers is not None:
            self._unsaved.write(self._buffers)

    def end_round(self, vector: Tensor) -> None:
        """Write the next global model ``vector [P]`` into the module."""
        self._write(vector, self.next_buffers or self._before, self._private)
        self.global_vector, self._within = vector, False

    def discard(self) -> None:
        """Restore the model from before the round."""
        self._write(*self._saved)

    # ---- a turn

    def enter(self, start: Tensor, private: Mapping[str, Tensor]) -> None:
        """Write a client's model into the module."""
        self.begin_turns()
        assert self._buffers is not None
        self._write(start, self._buffers, {**self._private, **private})

    def read(self, out: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Read the model that a client has trained."""
        self._unsaved.check()
        vector, private = self.space.read(self.module, out=out), self.space.read_private(self.module)
        self._check_constant()
        return vector, private

    def reset_private(self) -> None:
        """Reset the entries that clients do not share, so that nobody else sees them."""
        self.space.write_private(self.module, self._private)

    def is_broken(self, private: Mapping[str, Tensor]) -> bool:
        """Return whether an entry that the client does not share is infinite or NaN."""
        return any(not t.isfinite().all() and bool(self._private[n].isfinite().all()) for n, t in private.items())

    def keep_buffers(self) -> None:
        """Keep the first client's counters and masks for the next global model."""
        if self.next_buffers is None:
            self.next_buffers = self._unsaved.read()

    # ---- checkpoints

    def buffers(self) -> State:
        """Return the global model's counters and masks."""
        return self._saved[1] if self._within else self._unsaved.read()

    def restore(self, buffers: State) -> None:
        """Write the counters and masks of a checkpoint into the module."""
        self._unsaved.resume(buffers)

    def global_state_dict(self) -> dict[str, Any]:
        """Return the ``state_dict`` of the model from before the round."""
        now = self._read()
        with ExitStack() as unseen:
            # A backward pass to come may not take this for a change of what its forward pass has used.
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                if not tensor.is_inference():
                    unseen.enter_context(_unsafe_preserve_version_counter(tensor))
            self._write(*self._saved)
            state = {name: value.clone() for name, value in self.module.state_dict().items()}
            self._write(*now)
        return state

    def _check_constant(self) -> None:
        """Check that frozen parameters have not changed."""
        differ = (_marks(self._constants.values()) != self._marks).any(0).tolist() if self._constants else []
        changed = [name for name, other in zip(self._constants, differ) if other]
        if changed:
            more = ", ..." if len(changed) > 3 else ""
            raise ConfigurationError(
                f"{', '.join(map(repr, changed[:3]))}{more} required no gradient when the fit began, so that they were "
                "taken to be the same at all clients, and training changes them, as where one network follows another "
                'or layers are unfrozen. Say what they are: FederatedLoop(share=["trainable", "name.*"]) shares them, '
                'share=["trainable", "!name.*"] keeps them at their client.'
            )

    def _read(self) -> tuple[Tensor, State, dict[str, Tensor]]:
        return self.space.read(self.module), self._unsaved.read(), self.space.read_private(self.module)

    @torch.no_grad()
    def _write(self, vector: Tensor, buffers: State, private: dict[str, Tensor]) -> None:
        self.space.write(self.module, vector)
        self._unsaved.write(buffers)
        self.space.write_private(self.module, private)


@torch.no_grad()
def _marks(tensors: Iterable[Tensor]) -> Tensor:
    """Return the tensors' norms and sums ``[2, n]``, which show later whether one has changed."""
    floating = [
        tensor if tensor.is_floating_point() else tensor.new_zeros(1, dtype=torch.float32) for tensor in tensors
    ]
    if not floating:
        return torch.empty(2, 0)
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(floating)])
    return torch.stack([norms, torch.stack([tensor.sum().double() for tensor in floating])]).nan_to_num()
