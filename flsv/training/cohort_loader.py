"""CohortLoader: the batches of a round's cohort, one client after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from flsv.data import FederatedDataModule
from flsv.data.groups import client_called
from flsv.utilities.seeding import isolated_rngs, seed_global_rngs, shuffle_stream

#: Function that trains on the batches that the cohort's loader yields at present. Its argument is True if these are the
#: round's last batches.
Run = Callable[[bool], None]


@dataclass(frozen=True)
class ClientBatches:
    """One client's batches of a round."""

    client: int
    lengths: list[int]
    epochs: range

    @property
    def batches(self) -> int:
        return sum(self.lengths)


class CohortLoader(Iterable[Any]):
    """Train dataloader of one round, which yields the batches of one client after the other.

    ``lengths(client, batches, round_index)`` is the number of batches of each local epoch of a client whose loader has
    ``batches``; by default there is one local epoch."""

    def __init__(
        self,
        data: FederatedDataModule,
        cohort: Sequence[int],
        *,
        seed: int,
        round_index: int,
        lengths: Callable[[int, int, int], list[int]] = lambda client, batches, round_index: [batches],
    ) -> None:
        self.round_index, self._seed = round_index, seed
        self._data = data
        self._epochs: list[tuple[int, Any, int, int]] = []
        self.visits = []
        for client in cohort:
            first = len(self._epochs)
            given = lengths(client, len(data.client_loader(client, "train")), round_index)
            for epoch, batches in enumerate(given):
                stream = shuffle_stream(seed, round_index, client, epoch)
                self._epochs.append((client, data.client_loader(client, "train", generator=stream), batches, epoch))
            self.visits.append(ClientBatches(client, given, range(first, len(self._epochs))))
        self._present = range(len(self._epochs))

    def train(self, visit: ClientBatches, run: Run) -> None:
        """Call ``run`` once for each local epoch of a client, which then is all that this loader yields."""
        everything = self._present
        try:
            for place in visit.epochs:
                self._present = range(place, place + 1)
                run(place == everything[-1])
        finally:
            self._present = everything

    def __len__(self) -> int:
        return sum(self._epochs[place][2] for place in self._present)

    def __iter__(self) -> Iterator[Any]:
        for place in self._present:
            client, loader, batches, epoch = self._epochs[place]
            # Augmentation of a first batch draws from a stream of its own: in one batched model the random state is
            # then another client's.
            with isolated_rngs(self._seed, "first batch", self.round_index, client, epoch):
                iterator = iter(loader)
                first = list(islice(iterator, 1))
            if epoch == 0:
                # Transfer hooks, which may augment the batch, run before the client begins.
                seed_global_rngs(self._seed, "transfer", self.round_index, client)
            given = 0
            for batch in chain(first, islice(iterator, batches - 1)):
                given += 1
                yield batch
            if given < batches:  # the next client's first batches would be counted as this client's
                raise RuntimeError(
                    f"{client_called(client, self._data.client_names)} gave {given} of {batches} batches in round "
                    f"{self.round_index + 1}: its data set raised StopIteration, or is shorter than its length."
                )
