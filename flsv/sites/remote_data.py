"""RemoteData: the data module of a server whose training samples stay at the sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from flsv.data import FederatedDataModule
from flsv.data.division import Division
from flsv.data.federated_data import loader_rows
from flsv.data.groups import client_called
from flsv.data.labels import Classes
from flsv.data.sample_hashes import loader_hash
from flsv.data.sources.source_data import SourceData
from flsv.data.splits import FederatedSplits
from flsv.sites.transport import common_class_names, common_hash, hash_of_class_names


class RemoteData(FederatedDataModule):
    """Data module of the server, with placeholders for the sites' samples.

    The placeholders have the label 0 and take no memory. Iterating a client's loader raises an error.

    Args:
        names: the sites' names.
        sizes: for each site, its number of samples in each split, ``{split: number}``.
        contents: for each site, the fingerprint of its samples. See :class:`Directory`.
        num_classes: the number M of classes. None if the data have no classes, or if ``class_names`` is given.
        class_names: the classes' names.
        server_data: the server's own data module, whose validation and test loaders are used. None if it has none.
        dictionary_hash: hash of the data dictionary of the sites' tables. None if they have no tables.
        class_names_hash: hash of the names of the sites' classes. None if they have no names.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: Sequence[Mapping[str, int]],
        contents: Sequence[str],
        num_classes: int | None = None,
        class_names: Sequence[str] | None = None,
        server_data: L.LightningDataModule | None = None,
        dictionary_hash: str | None = None,
        class_names_hash: str | None = None,
    ) -> None:
        super().__init__()
        self.names = tuple(names)
        self._sizes = list(sizes)
        self._contents = list(contents)
        self._server_data = server_data
        self._dictionary_hash = dictionary_hash
        self._class_names_hash = class_names_hash
        largest_split = max(max(site_sizes.values()) for site_sizes in sizes)
        classes = _classes(largest_split, num_classes, class_names)
        self._division = _division_of_placeholders(self.names, sizes, classes)

    def prepare_data(self) -> None:
        if self._server_data is not None:
            self._server_data.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        server_data = self._server_data
        if server_data is None:
            return
        server_data.trainer = self.trainer
        server_data.setup(stage or "fit")
        dictionary = self._common_dictionary(server_data)
        if dictionary is not None:
            division = self.division
            classes = division.classes
            if dictionary.classes is not None:
                classes = Classes(classes.labels, tuple(dictionary.classes))
            source = replace(division.source, dictionary=dictionary, pos_label=dictionary.positive)
            self._division = replace(division, source=source, classes=classes)

    def _common_dictionary(self, server_data: L.LightningDataModule) -> Any:
        """Return the data dictionary of server and sites, None if they have none. Raise an error if theirs differ."""
        dictionary = None
        if isinstance(server_data, FederatedDataModule):
            server_names = hash_of_class_names(server_data)
            common_class_names({"the sites": self._class_names_hash, "the server": server_names})
            dictionary = server_data.dictionary
        server_hash = None if dictionary is None else dictionary.hash
        common_hash({"the sites": self._dictionary_hash, "the server": server_hash})
        return dictionary

    def teardown(self, stage: str) -> None:
        if self._server_data is not None:
            self._server_data.teardown(stage)

    def val_dataloader(self) -> Any:
        return [] if self._server_data is None else self._server_data.val_dataloader()

    def test_dataloader(self) -> Any:
        return [] if self._server_data is None else self._server_data.test_dataloader()

    def client_loader(
        self, client: int, split: Literal["train", "val", "test"] = "train", *_: Any, **__: Any
    ) -> Any:
        """Return a placeholder loader that has a number of samples, but raises an error when it is iterated."""
        num_samples = self._sizes[client][split]
        return _Elsewhere(
            lambda: num_samples, f"{client_called(client, self.names)} are at its site"
        )

    def shown_loader(
        self,
        clients: Any,
        num_batches: Callable[[], int],
    ) -> Any:
        """Return a placeholder loader of length ``num_batches()`` for all sites' training samples."""
        return _Elsewhere(num_batches, f"{', '.join(self.names)} are at their sites")

    def content_hashes(self) -> dict[str, str]:
        """Return the hash of the server's validation set, and the fingerprint of each site's samples."""
        hashes = {"server": loader_hash(self.val_dataloader())}
        for client, contents in enumerate(self._contents):
            hashes[str(client)] = contents
        return hashes

    def indices_and_labels(self, client: int) -> list[Tensor]:
        """Return empty indices and labels, which only the site has."""
        return [torch.arange(0)] * 6

    def to_device(self, trainer: L.Trainer) -> Division | None:
        """Return the placeholders without copying them to the device, where they would take memory."""
        return self._division

    @property
    def class_counts(self) -> Tensor:
        """Return each client's number of training samples ``[n, 1]``, as those of a single class."""
        return torch.tensor([[sizes["train"]] for sizes in self._sizes])

    @property
    def known_class_counts(self) -> None:
        return None

    @property
    def input_shape(self) -> Any:
        return getattr(self._server_data, "input_shape", None)

    def validation(self) -> dict[str, Any] | None:
        """Describe the server's own validation data, if any."""
        if isinstance(self._server_data, FederatedDataModule):
            return self._server_data.validation()
        loaders = self.val_dataloader()
        return {"of": "the server's own data", "rows": loader_rows(loaders)} if loaders else None

    def describe(self) -> dict[str, str | int | float]:
        settings: dict[str, str | int | float] = {
            "source": f"sites {', '.join(self.names)}",
            "num_clients": self.num_clients,
            "num_classes": self.num_classes,
            "train_samples": int(self.num_samples.sum()),
        }
        if self._dictionary_hash is not None:
            settings["dictionary"] = self._dictionary_hash
        return settings

    def __str__(self) -> str:
        return f"RemoteData({', '.join(self.names)})"


def _placeholders(count: int) -> Tensor:
    return torch.zeros(1, dtype=torch.long).expand(count)


def _classes(
    num_labels: int, num_classes: int | None, class_names: Sequence[str] | None
) -> Classes:
    labels = _placeholders(num_labels)
    if class_names:
        return Classes(labels, tuple(class_names))
    if num_classes:
        return Classes(labels, tuple(str(number) for number in range(num_classes)))
    return Classes(labels, ("samples",), "the server has no num_classes")


def _division_of_placeholders(
    names: tuple[str, ...], sizes: Sequence[Mapping[str, int]], classes: Classes
) -> Division:
    splits = []
    for site_sizes in sizes:
        splits.append({split: _placeholders(size) for split, size in site_sizes.items()})
    no_server_indices = torch.arange(0)
    is_unchanged = torch.zeros(1, dtype=torch.bool)
    return Division(
        source=SourceData(TensorDataset(classes.labels), pos_label=classes.names[-1]),
        classes=classes,
        splits=FederatedSplits(no_server_indices, tuple(splits), names),
        is_changed=is_unchanged.expand(len(classes.labels)),
    )


class _Elsewhere:
    """Loader of a known length whose samples are at a site. Reading raises PermissionError."""

    def __init__(
        self,
        length: Callable[[], int],
        owners: str,
    ) -> None:
        self._length = length
        self._owners = owners

    def __len__(self) -> int:
        return self._length()

    def __iter__(self) -> NoReturn:
        raise PermissionError(f"The server cannot read samples: the samples of {self._owners}.")
