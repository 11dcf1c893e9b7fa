"""ClientStore: the state of clients between their rounds.

A client's state has these parts, by name:

``tensors``
    The state of its algorithm, personalizer and uploads (``LocalData.state``) and, as ``"module.NAME"``, the module's
    parameters and buffers that it does not share (:mod:`flsv.training.local_training`).
``optimizer``, ``pace``, ``loss_scale``
    Of :mod:`flsv.training.optimizers`: the states (momentum, Adam's moments, a wrapper's attributes) with
    ``optimizer_state="persist"``, the position in the schedules with the options that training has changed, and the
    scale of the loss in half precision.

Nothing else is kept. Random numbers are derived from the seed, the round and the client, and accumulated gradients end
with the client's last batch. Counters and masks of the module, which are neither in a vector nor in this store, belong
to the federation: the next global model takes their values from the cohort's first client.

At the end of a client's training its changed state is *staged*. :meth:`ClientStore.commit` stores the staged state at
the end of the round. :meth:`ClientStore.discard` drops the staged state of one client, if the server excludes its
update, or of all clients, if the round is not finished. A checkpoint holds the committed state. On several ranks each
rank holds the state of its clients, and rank 0 gathers all of it when a round is complete. On a network each site keeps
the state of its client in its own folder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from flsv.core import State

#: The part of a client's state that consists of tensors by name.
TENSORS = "tensors"


class ClientStore:
    """Store of each client's state between its rounds."""

    def __init__(self) -> None:
        self._committed: dict[int, dict[str, Any]] = {}
        self._staged: dict[int, dict[str, Any]] = {}

    # ---- within a round

    def tensors(self, client: int) -> State:
        """Return a client's tensors by name. Changes to them are kept only if :meth:`commit` follows."""
        staged = self._staged.setdefault(client, {})
        if TENSORS not in staged:
            staged[TENSORS] = {}
            for name, tensor in self._committed_tensors(client).items():
                # A round that fails must not change the committed tensor, not even in place.
                staged[TENSORS][name] = tensor.clone()
        return staged[TENSORS]

    def peek(self, client: int) -> State:
        """Return a client's tensors without a copy. They must not be changed."""
        staged = self._staged.get(client, {})
        if TENSORS in staged:
            return staged[TENSORS]
        return self._committed_tensors(client)

    def committed(self, client: int) -> Mapping[str, Any]:
        """Return a client's state after its last complete round."""
        return self._committed.get(client, {})

    def stage(
        self,
        client: int,
        state: Mapping[str, Any],
    ) -> None:
        """Store a client's state until :meth:`commit` keeps it or :meth:`discard` drops it."""
        self._staged.setdefault(client, {}).update(state)

    def commit(self) -> None:
        """Keep the staged state of all clients."""
        for client, staged in self._staged.items():
            state = {**self._committed.pop(client, {}), **staged}
            has_tensors = bool(state.get(TENSORS))
            if not has_tensors:  # an empty dictionary is not kept
                state.pop(TENSORS, None)
            if state:
                self._committed[client] = state
        self._staged = {}

    def discard(self, client: int | None = None) -> None:
        """Drop the staged state of one client, or of all."""
        if client is None:
            self._staged = {}
        else:
            self._staged.pop(client, None)

    # ---- between rounds

    def clients(self) -> set[int]:
        """Return the ids of the clients that have a committed state."""
        return set(self._committed)

    def keep(
        self,
        clients: Collection[int],
    ) -> None:
        """Drop the committed state of clients other than ``clients``, since other processes hold it."""
        for client in self._committed.keys() - set(clients):
            del self._committed[client]

    def convert(
        self,
        name: str,
        convert: Callable[[Any], Any],
    ) -> None:
        """Convert one part of every client's committed state."""
        for state in self._committed.values():
            if name in state:
                state[name] = convert(state[name])

    def state_dict(self) -> dict[int, dict[str, Any]]:
        states: dict[int, dict[str, Any]] = {}
        for client, state in self._committed.items():
            states[client] = {}
            for name, part in state.items():
                states[client][name] = part
                if isinstance(part, dict):  # a later change must not change the returned one
                    states[client][name] = dict(part)
        return states

    def load_state_dict(
        self,
        states: Mapping[int, Mapping[str, Any]],
    ) -> None:
        self._committed = {client: dict(states[client]) for client in states}
        self._staged = {}

    def to(self, device: Any) -> None:
        for state in self._committed.values():
            moved_tensors = {}
            for name, tensor in state.get(TENSORS, {}).items():
                moved_tensors[name] = tensor.to(device)
            if moved_tensors:
                state[TENSORS] = moved_tensors

    def _committed_tensors(self, client: int) -> dict[str, torch.Tensor]:
        state = self.committed(client)
        return state.get(TENSORS, {})
