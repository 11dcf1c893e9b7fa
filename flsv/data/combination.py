"""Combination: several training loaders of a data module, which are read together as Lightning combines them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from flsv._lightning.private import mode_of
from flsv.data.groups import client_called, named_groups
from flsv.data.partition import shuffled
from flsv.data.splits import FederatedSplits, Splits
from flsv.data.streams import LoaderPart
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for

#: In place of a client's id: the sample's owner is not decided yet, or no client has the sample.
_UNDECIDED = -1
_NOBODY = -2
MakeLoader = Callable[[torch.Generator | None], Any]


@dataclass(frozen=True)
class Combination:
    """Training loaders of a data module, of which the first has the federation's samples.

    ``template`` is Lightning's ``CombinedLoader`` without loaders, ``groups`` the name of the samples' groups.
    """

    template: CombinedLoader
    primary: LoaderPart
    further: tuple[LoaderPart, ...]
    # The samples of the data module's validation loader, which no client trains on.
    val: LoaderPart | None = None
    seed: int | None = None
    groups: str | None = None
    keeps_groups: bool = False

    def __str__(self) -> str:
        batch_sizes = []
        for part in self.further:
            ending = ", full ones only" if part.options["drop_last"] else ""
            batch_sizes.append(f"further batches of {part.options['batch_size']}{ending}")
        return ", ".join([f"{1 + len(self.further)}, {mode_of(self.template)}", *batch_sizes])

    def with_options(
        self, options: Splits, *, groups: str | None, keeps_groups: bool, has_corruptions: bool
    ) -> Combination:
        """Return these loaders with what their samples are dealt by.

        Raises:
            ConfigurationError: an option would be true of the first loader only.
        """
        if has_corruptions:
            raise ConfigurationError(
                "corruptions would change the samples of the first of several training loaders only. Leave them out."
            )
        is_split_by_column = bool(options.columns)
        has_further_samples = not all(map(self._is_of_primary, self.further))
        if is_split_by_column and has_further_samples:
            raise ConfigurationError(
                "A column chooses what is held out or stays together, and flsv reads it of the first of several "
                "training loaders only. Hold out a number or a share of samples, or give one loader."
            )
        return replace(self, seed=options.seed, groups=groups, keeps_groups=keeps_groups)

    def _is_of_primary(self, part: LoaderPart) -> bool:
        """Return whether a loader's data set shares its rows with the first one's."""
        base, _ = part.base_rows()
        primary_base, _ = self.primary.base_rows()
        return base is primary_base or len(base) == len(primary_base)

    def batches(
        self, makers: Sequence[MakeLoader], generator: torch.Generator | None
    ) -> CombinedBatches:
        """Return the batches of loaders, each made by a function of its generator."""
        return CombinedBatches(self.template, makers, generator)

    def deal(self, splits: FederatedSplits) -> list[list[Tensor]]:
        """Return each further loader's samples of each client, int64 ``[n]``."""
        rows_by_loader = []
        for position, part in enumerate(self.further, start=2):  # in messages the first loader is 1
            owners = self._owners(part, splits, position)
            rows_by_client = []
            for client in range(len(splits.clients)):
                rows = (owners == client).nonzero().flatten()
                if len(rows) == 0 or len(part.loader(rows, None)) == 0:
                    raise ConfigurationError(
                        f"{client_called(client, splits.names, 'Client')} has {len(rows)} samples of training loader "
                        f"{position}, not one batch of {part.options['batch_size']}. Give more, or smaller batches."
                    )
                rows_by_client.append(rows)
            rows_by_loader.append(rows_by_client)
        return rows_by_loader

    def _owners(self, part: LoaderPart, splits: FederatedSplits, position: int) -> Tensor:
        """Return the client that has each sample of a loader, int64 ``[N]``."""
        owners = self._owners_in_first_loader(part, splits)
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
            number_of_client = {name: client for client, name in enumerate(splits.names)}
            owner_of_group = [number_of_client.get(name, _NOBODY) for name in group_names]
            owner_by_group = torch.tensor(owner_of_group)[group_numbers]  # of each row
            is_contradicted = (owners >= 0) & (owners != owner_by_group)
            if is_contradicted.any():
                raise ConfigurationError(
                    f"training loader {position} has as many samples as the first one, which are taken for the same "
                    "ones, and other groups. Give loaders of different samples different lengths, or the same groups."
                )
            num_left_out = int((is_undecided & (owner_by_group == _NOBODY)).sum())
            if num_left_out:
                rank_zero_warn(
                    f"{num_left_out} samples of training loader {position} are in no client's group: nobody has them."
                )
            owners[is_undecided] = owner_by_group[is_undecided]
            return owners

        # All others are dealt out at random, in equal numbers.
        rows = is_undecided.nonzero().flatten()
        order = shuffled(rows, generator_for(self.seed, "training loader", position))
        rows_by_client = order.tensor_split(len(splits.clients))
        for client, rows_of_client in enumerate(rows_by_client):
            owners[rows_of_client] = client
        return owners

    def _owners_in_first_loader(self, part: LoaderPart, splits: FederatedSplits) -> Tensor:
        """Return the owners of samples that the first loader has, too."""
        # The base of a part is the data set under its Subsets. Two bases of one size are taken to be the same. Owners
        # are set in three steps, and later steps overwrite earlier ones.
        base, rows_of_part = part.base_rows()
        base_owners = torch.full((len(base),), _UNDECIDED)

        # 1. Nobody trains on the server's validation samples.
        if self.val is not None:
            val_base, val_rows = self.val.base_rows()
            if val_base is base:
                base_owners[val_rows] = _NOBODY

        if self._is_of_primary(part):
            # 2. Samples that were divided among clients belong to nobody, unless step 3 names an owner.
            _, primary_rows = self.primary.base_rows()
            divided_rows = primary_rows
            if self.primary.indices is not None:
                divided_rows = primary_rows[self.primary.indices]
            base_owners[divided_rows] = _NOBODY

            # 3. A client has the samples that it trains on in the first loader.
            for client, samples in enumerate(splits.train):
                base_owners[primary_rows[samples]] = client
        return base_owners[rows_of_part]


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
        for position, make_loader in enumerate(makers):
            self._loaders.append(_Passes(make_loader, generator, position))

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

    def __init__(
        self, make_loader: MakeLoader, generator: torch.Generator | None, position: int
    ) -> None:
        self._make_loader = make_loader
        self._generator = generator
        self._loader_position = position
        self._num_passes = 0

    def __len__(self) -> int:
        return len(self._make_loader(self._generator))

    def __iter__(self) -> Iterator[Any]:
        generator = self._generator
        is_first_pass_of_first_loader = self._loader_position == 0 and self._num_passes == 0
        if generator is not None and not is_first_pass_of_first_loader:
            seed = generator.initial_seed()
            generator = generator_for(seed, "pass", self._loader_position, self._num_passes)
        self._num_passes += 1
        return iter(self._make_loader(generator))


def combination_of(
    loaders: CombinedLoader, parts: Sequence[LoaderPart], val: Any = None
) -> Combination:
    """Return what combined loaders read, with their structure and mode. ``val`` is the validation data set."""
    template = copy.copy(loaders)
    template.flattened = [None] * len(parts)
    primary, *further = parts
    primary_base, _ = primary.base_rows()
    for position, part in enumerate(further, start=2):
        if part.draws is not None:
            raise ConfigurationError(
                f"training loader {position} draws samples by weights, which only the first one may. Shuffle it."
            )
        base, _ = part.base_rows()
        share_samples = _contains(base, primary_base) or _contains(primary_base, base)
        if share_samples:
            raise ConfigurationError(
                f"training loader {position} and the first one share samples within a ConcatDataset, so that it is "
                "unknown whose they are, and which are held out. Give the other samples as a loader of their own."
            )
    val_part = None
    if val is not None:
        val_part = LoaderPart(val, {})
    return Combination(template, primary, tuple(further), val=val_part)


def _contains(dataset: Any, inner_dataset: Any) -> bool:
    """Return whether a ConcatDataset joins another data set, or a part of it."""
    if isinstance(dataset, ConcatDataset):
        return any(
            part is inner_dataset or _contains(part, inner_dataset) for part in dataset.datasets
        )
    if isinstance(dataset, Subset):
        return dataset.dataset is inner_dataset or _contains(dataset.dataset, inner_dataset)
    return False
