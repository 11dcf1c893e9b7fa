"""CohortLoader: the batches of a round's cohort, one client after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from flsv.data import FederatedDataModule
from flsv.data.groups import client_called
from flsv.training.step_counts import limited
from flsv.utilities.seeding import isolated_rngs, seed_global_rngs, shuffle_stream

#: Function that trains on the batches that the cohort's loader yields at present. Its argument is True if these are the
#: round's last batches.
Run = Callable[[bool], None]


@dataclass(frozen=True)
class ClientBatches:
    """One client's batches of a round."""

    client: int
    batches: int
    epochs: range


class CohortLoader(Iterable[Any]):
    """Train dataloader of one round, which yields the batches of one client after the other."""

    def __init__(
        self,
        data: FederatedDataModule,
        cohort: Sequence[int],
        *,
        seed: int,
        round_index: int,
        local_epochs: int = 1,
        limit: float = 1.0,
    ) -> None:
        self.round_index, self._seed, self._local_epochs = round_index, seed, local_epochs
        self._data = data
        self._epochs: list[tuple[int, Any, int]] = []
        self.visits = []
        for client in cohort:
            streams = [shuffle_stream(seed, round_index, client, epoch) for epoch in range(local_epochs)]
            loaders = [data.client_loader(client, "train", generator=stream) for stream in streams]
            batches = limited(len(loaders[0]), limit)
            places = range(len(self._epochs), len(self._epochs) + local_epochs)
            self._epochs += [(client, loader, batches) for loader in loaders]
            self.visits.append(ClientBatches(client, batches * local_epochs, places))
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
            client, loader, batches = self._epochs[place]
            # Augmentation of a first batch draws from a stream of its own: in one batched model the random state is
            # then another client's.
            with isolated_rngs(self._seed, "first batch", self.round_index, client, place % self._local_epochs):
                iterator = iter(loader)
                first = list(islice(iterator, 1))
            if place % self._local_epochs == 0:
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
