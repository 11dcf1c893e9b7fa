"""ClientStore: the state of clients between their rounds.

A client's state has these parts, by name:

``tensors``
    The state of its algorithm, personalizer and uploads (``LocalData.state``) and, as ``"module.NAME"``, the entries of
    the module that it does not share (:mod:`flsv.training.local_training`).
``optimizer``, ``pace``, ``loss_scale``
    Of :mod:`flsv.training.optimizers`: the states (momentum, Adam's moments, a wrapper's attributes) with
    ``optimizer_state="persist"``, the position in the schedules with the options that training has changed, and the
    scale of the loss in half precision.

Nothing else is kept. Random numbers follow from the seed, the round and the client, and accumulated gradients end with
the client's last batch. Counters and masks of the module, which are neither in a vector nor in this store, belong to
the federation: the next global model takes the values that they have at the cohort's first client.

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
        self._kept: dict[int, dict[str, Any]] = {}
        self._staged: dict[int, dict[str, Any]] = {}

    # ---- within a round

    def tensors(self, client: int) -> State:
        """Return a client's tensors by name. Changes to them are kept only if :meth:`commit` follows."""
        staged = self._staged.setdefault(client, {})
        if TENSORS not in staged:
            # Clones: a round that fails must not change the stored tensors, not even in place.
            staged[TENSORS] = {name: value.clone() for name, value in self._tensors(client).items()}
        return staged[TENSORS]

    def peek(self, client: int) -> State:
        """Return a client's tensors without a copy. They must not be changed."""
        return self._staged.get(client, {}).get(TENSORS, self._tensors(client))

    def kept(self, client: int) -> Mapping[str, Any]:
        """Return a client's state after its last complete round."""
        return self._kept.get(client, {})

    def stage(self, client: int, left: Mapping[str, Any]) -> None:
        """Store a client's state until :meth:`commit` keeps it or :meth:`discard` drops it."""
        self._staged.setdefault(client, {}).update(left)

    def commit(self) -> None:
        """Keep the staged state of all clients."""
        for client, staged in self._staged.items():
            kept = {**self._kept.pop(client, {}), **staged}
            if kept := {name: value for name, value in kept.items() if value or name != TENSORS}:
                self._kept[client] = kept
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
        return set(self._kept)

    def keep(self, clients: Collection[int]) -> None:
        """Drop the committed state of clients other than ``clients``, since other processes hold it."""
        self._kept = {client: kept for client, kept in self._kept.items() if client in clients}

    def convert(self, name: str, convert: Callable[[Any], Any]) -> None:
        """Convert one part of every client's committed state."""
        for kept in self._kept.values():
            if name in kept:
                kept[name] = convert(kept[name])

    def state_dict(self) -> dict[int, dict[str, Any]]:
        return {
            client: {
                name: dict(value) if isinstance(value, dict) else value
                for name, value in kept.items()
            }
            for client, kept in self._kept.items()
        }

    def load_state_dict(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        self._kept, self._staged = {client: dict(kept) for client, kept in state.items()}, {}

    def to(self, device: Any) -> None:
        self.convert(
            TENSORS, lambda tensors: {name: value.to(device) for name, value in tensors.items()}
        )

    def _tensors(self, client: int) -> dict[str, torch.Tensor]:
        return self._kept.get(client, {}).get(TENSORS, {})
