"""Slot: one part of a Trainer's state that is kept per client, such as the optimizers' state. Slots: all parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from flsv.training.store import ClientStore


class Slot:
    """Base class of slots: parts of the Trainer's state, such as optimizer states, of which each client has its own.

    Before a client trains, :meth:`enter` writes the client's state into the Trainer. After the client's training,
    :meth:`leave` returns this state and restores the Trainer's own."""

    #: Name under which the store keeps a client's state of this slot.
    name: ClassVar[str]

    def enter(self, client: int, kept: Any) -> None:
        """Write a client's state into the Trainer before the client trains.

        Args:
            client: the client's number.
            kept: the state that :meth:`leave` returned after the client's last round; None if there is none.
        """

    def leave(self) -> Any:
        """Restore the Trainer's own state, and return the client's state in plain types and tensors, or None if there
        is no state to keep."""
        return None

    def begin_batch(self, position: int, batches: int) -> None:
        """Prepare for a batch of the client.

        Args:
            position: the batch's number, from 0, in the client's training of this round.
            batches: the client's number of batches in this round.
        """

    def restored(self, kept: Any) -> Any:
        """Return a client's state from a checkpoint, moved to the device where the slot keeps its tensors."""
        return kept


class Slots:
    """All slots of a Trainer.

    Args:
        slots: the slots in the order in which they are entered; they are left in the opposite order.
        store: the state that clients keep between rounds.

    Attributes:
        client: the client whose state the Trainer has now; None while the Trainer has its own state.
    """

    def __init__(self, slots: Sequence[Slot], store: ClientStore) -> None:
        self._slots, self._store = slots, store
        self.client: int | None = None
        for slot in slots:
            store.convert(slot.name, slot.restored)

    def enter(self, client: int) -> None:
        """Write a client's state into the Trainer: enter all slots."""
        self.client = client
        for slot in self._slots:
            slot.enter(client, self._store.kept(client, slot.name))

    def leave(self, stage: bool) -> None:
        """Restore the Trainer's own state: leave all slots. If no client has been entered, do nothing.

        Args:
            stage: whether to pass the client's state to the store (:meth:`flsv.training.store.ClientStore.stage`); if
                False, the state is dropped.
        """
        if self.client is None:
            return
        left = {slot.name: slot.leave() for slot in reversed(self._slots)}
        if stage:
            self._store.stage(self.client, left)
        self.client = None

    def begin_batch(self, position: int, batches: int) -> None:
        """Prepare all slots for a batch of the client.

        Args:
            position: the batch's number, from 0, in the client's training of this round.
            batches: the client's number of batches in this round.
        """
        for slot in self._slots:
            slot.begin_batch(position, batches)
