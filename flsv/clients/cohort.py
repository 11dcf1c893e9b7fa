"""Yields the batches of one round: those of the cohort's clients, one client after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from flsv.data import FederatedDataModule
from flsv.data.groups import client_called
from flsv.data.loaders import TensorBatches
from flsv.seeding import generator_for, isolated_rngs, seed_global_rngs


@dataclass(frozen=True)
class ClientBatches:
    """One client's part of a round: ``batches`` batches in all its local epochs, ``epoch`` in each."""

    client: int
    batches: int
    epoch: int


class CohortLoader(Iterable[Any]):
    """The train dataloader of one round.

    What a client sees depends on the seed, the round and the client only, not on who else is in the cohort: every local
    epoch is shuffled by a generator of its own.

    Args:
        data: where the clients' loaders come from.
        cohort: client ids, in the order of their visits.
        seed: the run's seed.
        round_index: the round.
        local_epochs: passes over each client's data.
        limit: Lightning's ``limit_train_batches``, per client and local epoch: a number of batches (int) or a share
            (float).
    """

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
            self._epochs += [(client, loader, batches) for loader in loaders]
            self.visits.append(ClientBatches(client, batches * local_epochs, batches))

    @property
    def tensors(self) -> tuple[Tensor, ...] | None:
        """What all batches are rows of; None where they are made otherwise, or transformed."""
        loaders = [loader for _, loader, _ in self._epochs]
        first = loaders[0]
        if not isinstance(first, TensorBatches):
            return None
        alike = all(
            isinstance(loader, TensorBatches) and loader.tensors is first.tensors and loader.transform is None
            for loader in loaders
        )
        return first.tensors if alike else None

    def rows(self, place: int) -> list[Tensor]:
        """Which rows of :attr:`tensors` the batches of the client at this place of the cohort are, in their order."""
        given: list[Tensor] = []
        for client, loader, batches in self._epochs[place * self._local_epochs : (place + 1) * self._local_epochs]:
            rows = loader.rows()[:batches]
            self._check_given(client, len(rows), batches)
            given += rows
        return given

    def __len__(self) -> int:
        return sum(visit.batches for visit in self.visits)

    def __iter__(self) -> Iterator[Any]:
        for place, (client, loader, batches) in enumerate(self._epochs):
            # Lightning asks for the first batch while the client before still trains: what augmentation draws for it
            # must come from neither that client's random state, nor change it.
            with isolated_rngs(self._seed, "first batch", self.round_index, client, place % self._local_epochs):
                iterator = iter(loader)
                first = list(islice(iterator, 1))
            if place % self._local_epochs == 0:
                # Lightning passes it through the transfer hooks, which may augment it, before the client begins.
                seed_global_rngs(self._seed, "transfer", self.round_index, client)
            given = 0
            for batch in chain(first, islice(iterator, batches - 1)):
                given += 1
                yield batch
            # Else the next client's batches would be taken for this one's.
            self._check_given(client, given, batches)

    def _check_given(self, client: int, given: int, batches: int) -> None:
        if given < batches:
            raise RuntimeError(
                f"{client_called(client, self._data.client_names)} gave {given} of {batches} batches in round "
                f"{self.round_index}: its data set raised StopIteration, or is shorter than its length."
            )


def shuffle_stream(seed: int, round_index: int, client: int, epoch: int) -> torch.Generator:
    """What draws the order of a client's samples in one local epoch, ``torch.randperm`` of their number."""
    return generator_for(seed, "shuffle", round_index, client, epoch)


def limited(length: int, limit: float) -> int:
    """Batches of a local epoch of ``length`` under Lightning's ``limit_train_batches``."""
    return min(length, limit) if isinstance(limit, int) else max(1, int(length * limit))
