"""Slot: a part of a Trainer that every client has of its own, such as the optimizers' state; Slots: all such parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from flsv.training.store import ClientStore


class Slot:
    """Base class of a part of the Trainer that is entered before a client trains, and left and restored after it."""

    #: Name under which the store keeps what a client leaves.
    name: ClassVar[str]

    def enter(self, client: int, kept: Any) -> None:
        """Put into the Trainer what the client left after its last round; None: it comes for the first time."""

    def leave(self) -> Any:
        """Give the Trainer its own back, and return what is the client's, in plain types and tensors; None: nothing."""
        return None

    def begin_batch(self, position: int, batches: int) -> None:
        """Prepare for the client's batch number ``position``, from 0, of ``batches`` in its turn."""

    def rewind(self, checkpoint: dict[str, Any]) -> None:
        """Remove a client's state from a checkpoint that Lightning saves in the middle of a turn."""

    def restored(self, kept: Any) -> Any:
        """Move a client's state from a checkpoint to the device where it is kept, and return it."""
        return kept


class Slots:
    """All slots of a Trainer.

    Args:
        slots: the slots in the order in which they are entered; they are left in the opposite order.
        store: the state that clients keep.

    Attributes:
        client: the client whose state the slots hold; None: the Trainer's own.
    """

    def __init__(self, slots: Sequence[Slot], store: ClientStore) -> None:
        self._slots, self._store = slots, store
        self._per_batch = [slot for slot in slots if type(slot).begin_batch is not Slot.begin_batch]
        self.client: int | None = None
        for slot in slots:
            store.convert(slot.name, slot.restored)

    def enter(self, client: int) -> None:
        """Enter all slots for a client."""
        self.client = client
        for slot in self._slots:
            slot.enter(client, self._store.kept(client, slot.name))

    def leave(self, stage: bool) -> None:
        """Leave all slots, and stage what the client leaves in the store if ``stage`` is true."""
        if self.client is None:
            return
        left = {slot.name: slot.leave() for slot in reversed(self._slots)}
        if stage:
            self._store.stage(self.client, left)
        self.client = None

    def begin_batch(self, position: int, batches: int) -> None:
        """Prepare for the client's batch number ``position``, from 0, of ``batches`` in its turn."""
        for slot in self._per_batch:
            slot.begin_batch(position, batches)

    def rewind(self, checkpoint: dict[str, Any]) -> None:
        """Remove a client's state from a checkpoint that Lightning saves in the middle of a turn."""
        for slot in self._slots:
            slot.rewind(checkpoint)
