"""Slot: one part of a Trainer's state that is kept per client, such as the optimizers' state. Slots: all parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from flsv.training.store import ClientStore


class Slot:
    """Base class of slots: parts of the Trainer's state of which each client has its own."""

    #: Name under which the store keeps a client's state of this slot.
    name: ClassVar[str]

    def enter(self, client: int, kept: Any) -> None:
        """Write a client's state into the Trainer."""

    def leave(self) -> Any:
        """Restore the Trainer's own state, and return the client's, or None."""
        return None

    def begin_batch(self, position: int, batches: int) -> None:
        """Prepare for a batch of the client."""

    def restored(self, kept: Any) -> Any:
        """Return a client's state from a checkpoint, on the device where the slot keeps it."""
        return kept


class Slots:
    """The slots of a Trainer."""

    def __init__(self, slots: Sequence[Slot], store: ClientStore) -> None:
        self._slots, self._store = slots, store
        self.client: int | None = None
        for slot in slots:
            store.convert(slot.name, slot.restored)

    def enter(self, client: int) -> None:
        self.client = client
        for slot in self._slots:
            slot.enter(client, self._store.kept(client, slot.name))

    def leave(self, stage: bool) -> None:
        """Restore the Trainer's own state, and let the store stage the client's."""
        if self.client is None:
            return
        left = {slot.name: slot.leave() for slot in reversed(self._slots)}
        if stage:
            self._store.stage(self.client, left)
        self.client = None

    def begin_batch(self, position: int, batches: int) -> None:
        for slot in self._slots:
            slot.begin_batch(position, batches)
