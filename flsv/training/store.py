"""ClientStore: all that clients keep between their rounds, and when it counts.

What is saved of a client between its rounds is what lies here, under these names:

``tensors``
    What its algorithm, personalizer and uploads keep (``LocalData.state``) and, as ``"module.NAME"``, the entries of
    the module that it does not share (:mod:`flsv.training.turn`).
``optimizer``
    Momentum, Adam's moments, with ``optimizer_state="persist"`` (:mod:`flsv.training.optimizer_state`).
``pace``
    Its place in its schedules, and what else of its options has changed (:mod:`flsv.training.pace`).
``loss_scale``
    Of half precision (:mod:`flsv.training.loss_scale`).

Nothing else is kept. Random numbers follow from the seed, the round and the client; a window of accumulated gradients
ends with the client's last batch; what neither a vector nor this store holds of the module (counters, masks) belongs to
the federation, which goes on with what the cohort's first client leaves.

**When**: a turn *stages* what its client leaves. :meth:`ClientStore.commit` at the end of the round makes it the
client's; :meth:`ClientStore.discard` forgets it, of one client whose update is left out, or of an unfinished round. A
checkpoint holds what has been committed. On several ranks each client's rank has it, and rank 0 gathers it when a round
is complete; a site keeps its own, in its folder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from flsv.core import State

#: The name of what clients keep as tensors by name; all other names are those of slots.
TENSORS = "tensors"


class ClientStore:
    """The state of each client between its rounds.

    Example:
        >>> store = ClientStore()
        >>> store.tensors(3)["visits"] = torch.tensor(1)
        >>> store.discard()
        >>> store.tensors(3)
        {}
        >>> store.tensors(3)["visits"] = torch.tensor(1)
        >>> store.stage(3, {"pace": {"lr": 0.1}})
        >>> store.commit()
        >>> store.state_dict()
        {3: {'tensors': {'visits': tensor(1)}, 'pace': {'lr': 0.1}}}
    """

    def __init__(self) -> None:
        self._kept: dict[int, dict[str, Any]] = {}
        self._staged: dict[int, dict[str, Any]] = {}

    # ---- within a round

    def tensors(self, client: int) -> State:
        """Return the client's own tensors by name, to read and to change."""
        staged = self._staged.setdefault(client, {})
        if TENSORS not in staged:
            # Clones, so that a tensor that is changed in place within a round that fails is not changed.
            staged[TENSORS] = {name: value.clone() for name, value in self._tensors(client).items()}
        return staged[TENSORS]

    def peek(self, client: int) -> State:
        """Return the client's own tensors by name, to read only, without a copy."""
        return self._staged.get(client, {}).get(TENSORS, self._tensors(client))

    def kept(self, client: int, name: str) -> Any:
        """Return what the client kept under a slot's name when its last round was complete; None: nothing."""
        return self._kept.get(client, {}).get(name)

    def stage(self, client: int, left: Mapping[str, Any]) -> None:
        """Take what a client leaves after its turn, by slot; None leaves what it kept before."""
        self._staged.setdefault(client, {}).update({name: value for name, value in left.items() if value is not None})

    def commit(self) -> None:
        """Keep what has been staged: the round is complete."""
        for client, staged in self._staged.items():
            kept = {**self._kept.pop(client, {}), **staged}
            if kept := {name: value for name, value in kept.items() if value or name != TENSORS}:
                self._kept[client] = kept
        self._staged = {}

    def discard(self, client: int | None = None) -> None:
        """Forget what has been staged: of one client, as if it had not taken part, or of all."""
        if client is None:
            self._staged = {}
        else:
            self._staged.pop(client, None)

    # ---- between rounds

    def clients(self) -> set[int]:
        """Return the clients that keep something."""
        return set(self._kept)

    def keep(self, clients: Collection[int]) -> None:
        """Keep the state of these clients only; that of all others is kept elsewhere."""
        self._kept = {client: kept for client, kept in self._kept.items() if client in clients}

    def convert(self, name: str, convert: Callable[[Any], Any]) -> None:
        """Convert what all clients keep under a name, as when a checkpoint's tensors move to a device."""
        for kept in self._kept.values():
            if name in kept:
                kept[name] = convert(kept[name])

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """Return what has been committed, by client and name."""
        return {client: {name: _shallow(value) for name, value in kept.items()} for client, kept in self._kept.items()}

    def load_state_dict(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self._kept, self._staged = {client: dict(kept) for client, kept in state.items()}, {}

    def to(self, device: Any) -> None:
        """Move all clients' tensors to a device."""
        self.convert(TENSORS, lambda tensors: {name: value.to(device) for name, value in tensors.items()})

    def _tensors(self, client: int) -> dict[str, torch.Tensor]:
        return self._kept.get(client, {}).get(TENSORS, {})


def _shallow(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value
