"""Slot: one thing of which a Trainer has one and every client its own; Slots: all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from flsv.training.store import ClientStore


class Slot:
    """Base class. A turn enters it, the client trains, and the turn leaves it: the Trainer is then as it was found."""

    #: Under which the store keeps what a client leaves.
    name: ClassVar[str]

    def enter(self, client: int, kept: Any) -> None:
        """Put into the Trainer what the client left after its last round; None: it comes for the first time."""

    def leave(self) -> Any:
        """Give the Trainer its own back, and return what is the client's, in plain types and tensors; None: nothing."""
        return None

    def begin_batch(self, position: int, batches: int) -> None:
        """Prepare for the client's batch at this place, counted from 0, of so many in its turn."""

    def rewind(self, checkpoint: dict[str, Any]) -> None:
        """Take what is a client's out of a checkpoint that Lightning saves in the middle of a turn."""

    def restored(self, kept: Any) -> Any:
        """Return what a checkpoint holds as it is to be kept: on its device."""
        return kept


class Slots:
    """All slots of a Trainer.

    Args:
        slots: in the order in which they are entered; they are left in the opposite order.
        store: what clients keep.

    Attributes:
        client: whose they are at present; None: the Trainer's own.
    """

    def __init__(self, slots: Sequence[Slot], store: ClientStore) -> None:
        self._slots, self._store = slots, store
        self._per_batch = [slot for slot in slots if type(slot).begin_batch is not Slot.begin_batch]
        self.client: int | None = None
        for slot in slots:
            store.convert(slot.name, slot.restored)

    def enter(self, client: int) -> None:
        """Make them this client's."""
        self.client = client
        for slot in self._slots:
            slot.enter(client, self._store.kept(client, slot.name))

    def leave(self, stage: bool) -> None:
        """Give the Trainer its own back, and stage what the client leaves, if that is to count."""
        if self.client is None:
            return
        left = {slot.name: slot.leave() for slot in reversed(self._slots)}
        if stage:
            self._store.stage(self.client, left)
        self.client = None

    def begin_batch(self, position: int, batches: int) -> None:
        """Prepare for the client's batch at this place, counted from 0, of so many in its turn."""
        for slot in self._per_batch:
            slot.begin_batch(position, batches)

    def rewind(self, checkpoint: dict[str, Any]) -> None:
        """Take what is a client's out of a checkpoint that Lightning saves in the middle of a turn."""
        for slot in self._slots:
            slot.rewind(checkpoint)
