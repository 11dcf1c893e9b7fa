"""Combination: several training loaders of a data module, which are read together as Lightning combines them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from flsv._lightning.private import mode_of
from flsv.data.groups import client_called, named_groups
from flsv.data.partition import shuffled
from flsv.data.splits import FederatedSplits
from flsv.data.streams import LoaderPart
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for

_UNDECIDED, _NOBODY = -1, -2
MakeLoader = Callable[[torch.Generator | None], Any]


@dataclass(frozen=True)
class Combination:
    """Training loaders of a data module, of which the first has the federation's samples.

    ``template`` is Lightning's ``CombinedLoader`` without loaders, ``groups`` the name of the samples' groups.
    """

    template: CombinedLoader
    primary: LoaderPart
    further: tuple[LoaderPart, ...]
    seed: int | None = None
    groups: str | None = None
    keeps_groups: bool = False

    def __str__(self) -> str:
        return f"{1 + len(self.further)}, {mode_of(self.template)}"

    def batches(
        self, makers: Sequence[MakeLoader], generator: torch.Generator | None
    ) -> CombinedBatches:
        """Return the batches of loaders, each made by a function of its generator."""
        return CombinedBatches(self.template, makers, generator)

    def deal(self, splits: FederatedSplits, client_names: Sequence[str]) -> list[list[Tensor]]:
        """Return each further loader's samples of each client, int64 ``[n]``."""
        dealt = []
        for position, part in enumerate(self.further, start=2):
            owners = self._owners(part, splits, client_names, position)
            rows_by_client = []
            for client in range(len(splits.clients)):
                rows = (owners == client).nonzero().flatten()
                if len(rows) == 0 or len(part.loader(rows, None)) == 0:
                    raise ConfigurationError(
                        f"{client_called(client, client_names, 'Client')} has {len(rows)} samples of training loader "
                        f"{position}, not one batch of {part.options['batch_size']}. Give more, or smaller batches."
                    )
                rows_by_client.append(rows)
            dealt.append(rows_by_client)
        return dealt

    def _owners(
        self,
        part: LoaderPart,
        splits: FederatedSplits,
        client_names: Sequence[str],
        position: int,
    ) -> Tensor:
        """Return the client that has each sample of a loader, int64 ``[N]``."""
        owners = self._owners_of_known(part, splits)
        if part.indices is not None:
            is_left_out = torch.ones(len(owners), dtype=torch.bool)
            is_left_out[part.indices] = False
            owners[is_left_out] = _NOBODY
        is_undecided = owners == _UNDECIDED

        if self.keeps_groups:
            group_numbers, group_names = named_groups(part.dataset, self.groups)
            if group_numbers is None:
                raise ConfigurationError(
                    f"training loader {position}: each client is a group, and {type(part.dataset).__name__} does not "
                    "say to which group a sample belongs. Give it an attribute `groups`, one entry per sample."
                )
            number_of_client = dict(zip(client_names, range(len(client_names))))
            owner_of_group = [number_of_client.get(name, _NOBODY) for name in group_names]
            owner_by_group = torch.tensor(owner_of_group)[group_numbers]  # of each row
            owners[is_undecided] = owner_by_group[is_undecided]
            return owners

        # All others are dealt out at random, in equal numbers.
        rows = is_undecided.nonzero().flatten()
        order = shuffled(rows, generator_for(self.seed, "training loader", position))
        rows_by_client = order.tensor_split(len(splits.clients))
        for client, rows_of_client in enumerate(rows_by_client):
            owners[rows_of_client] = client
        return owners

    def _owners_of_known(self, part: LoaderPart, splits: FederatedSplits) -> Tensor:
        """Return the owners of samples that the first loader has, too."""
        # A base is the data set under a part's Subsets. Two of one size are taken to be the same.
        base_size, rows = part.base_rows()
        primary_size, primary_rows = self.primary.base_rows()
        owners = torch.full((base_size,), _UNDECIDED)  # of the base's samples
        if base_size == primary_size:
            if self.primary.indices is None:
                divided_rows = primary_rows
            else:
                divided_rows = primary_rows[self.primary.indices]
            owners[divided_rows] = _NOBODY  # held out, unless a client trains on them
            for client, client_split in enumerate(splits.clients):
                rows_of_client = primary_rows[client_split["train"]]
                owners[rows_of_client] = client
        return owners[rows]


class CombinedBatches:
    """Batches of several loaders, as Lightning's ``CombinedLoader`` combines them.

    Generators of all passes but the first loader's first are derived from the seed of ``generator``.
    """

    def __init__(
        self,
        template: CombinedLoader,
        makers: Sequence[MakeLoader],
        generator: torch.Generator | None,
    ) -> None:
        self._template = template
        self._loaders = []
        for position, make in enumerate(makers):
            self._loaders.append(_Passes(make, generator, position))

    def __len__(self) -> int:
        lengths = map(len, self._loaders)
        if mode_of(self._template) == "min_size":
            return min(lengths)
        return max(lengths)

    def __iter__(self) -> Iterator[Any]:
        combined = copy.copy(self._template)
        combined.flattened = list(self._loaders)
        try:
            for batch, _, _ in combined:
                yield batch
        finally:
            combined.reset()  # which ends the loaders' workers


class _Passes:
    """A loader, each pass of which is shuffled anew."""

    def __init__(self, make: MakeLoader, generator: torch.Generator | None, position: int) -> None:
        self._make = make
        self._generator = generator
        self._position = position
        self._num_passes = 0

    def __len__(self) -> int:
        return len(self._make(self._generator))

    def __iter__(self) -> Iterator[Any]:
        generator = self._generator
        is_very_first = self._position == 0 and self._num_passes == 0
        if generator is not None and not is_very_first:
            seed = generator.initial_seed()
            generator = generator_for(seed, "pass", self._position, self._num_passes)
        self._num_passes += 1
        return iter(self._make(generator))


def combination_of(loaders: CombinedLoader, parts: Sequence[LoaderPart]) -> Combination:
    """Return what combined loaders read, with their structure and mode."""
    template = copy.copy(loaders)
    template.flattened = [None] * len(parts)
    primary, *further = parts
    return Combination(template, primary, tuple(further))
