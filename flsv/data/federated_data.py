"""FederatedData: the samples of the server and the clients, with sizes, names and classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flsv.data.labels import are_two_words
from flsv.data.loaders import make_loader
from flsv.data.partition import partition_counts
from flsv.data.sample_hashes import content_hash, loader_hash
from flsv.data.sources.base import SourceData
from flsv.data.splits import SplitName
from flsv.data.streams import has_streams
from flsv.utilities.plain_values import digest

if TYPE_CHECKING:
    from flsv.data.tables.dictionary import Dictionary
    from flsv.data.tables.inference import ColumnCard, TableWarning


class FederatedData:
    """Samples of the server and of each client, with their names and classes.

    :class:`~flsv.data.FederatedDataModule` adds the user's arguments and Lightning's hooks, and sets the samples in
    ``setup``. At a site there is a single client.
    """

    #: All samples, and the indices of each client's. None before ``setup``.
    _divided: SourceData | None = None
    #: The members of a coalition while it is trained, the only clients that :attr:`class_counts` counts. None: all.
    counted_clients: Sequence[int] | None = None

    @property
    def _source(self) -> SourceData:
        if self._divided is None:
            raise RuntimeError(
                "The data are not loaded yet. Pass the data module to a Trainer, or call prepare_data() and "
                "setup('fit') first."
            )
        return self._divided

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.client_names)

    @property
    def members(self) -> Sequence[int]:
        """All clients, or the members of a coalition while it is trained."""
        return self.counted_clients or range(self.num_clients)

    @property
    def num_samples(self) -> Tensor:
        """Number of training samples of each client, int64 ``[num_clients]``."""
        return torch.tensor(
            [len(self.client_indices(client)) for client in range(self.num_clients)]
        )

    @property
    def class_counts(self) -> Tensor:
        """Number of each client's training samples per class, int64 ``[num_clients, num_classes]``.

        Without classes it is ``[num_clients, 1]``. The labels are those after ``corruptions``. While a coalition is
        trained, the other clients' rows are 0.
        """
        classes = self._source.classes
        counts = partition_counts(self._source.splits.train, classes.labels, len(classes.names))
        if self.counted_clients is not None:
            is_counted = torch.zeros(len(counts), 1, dtype=torch.long)
            is_counted[list(self.counted_clients)] = 1
            counts *= is_counted
        return counts

    @contextmanager
    def counting(self, members: Sequence[int] | None) -> Iterator[None]:
        """Count the samples of only the clients ``members`` in :attr:`class_counts`. None: of all clients."""
        previous_members = self.counted_clients
        self.counted_clients = members
        try:
            yield
        finally:
            self.counted_clients = previous_members

    @property
    def num_classes(self) -> int:
        """Number of classes, 1 for data without classes."""
        return len(self.class_names)

    @property
    def known_num_classes(self) -> int | None:
        """:attr:`num_classes`, or None if the data have no classes."""
        return self.num_classes if self.no_classes is None else None

    @property
    def known_class_counts(self) -> Tensor | None:
        """:attr:`class_counts`, or None if the data have no classes."""
        return self.class_counts if self.no_classes is None else None

    @property
    def no_classes(self) -> str | None:
        """Reason why the training samples have no classes, as text. None if they have classes."""
        return self._source.classes.missing_reason

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, or their numbers if the source has no names.

        For data without classes it is ``("samples",)``.
        """
        return self._source.classes.names

    @property
    def positive_class(self) -> str | None:
        """Name of the positive class (class 1) of two. None unless there are two classes."""
        has_two_classes = self.no_classes is None and len(self.class_names) == 2
        return self.class_names[1] if has_two_classes else None

    @property
    def needs_pos_label(self) -> bool:
        """Return whether the user has to name the positive one of two classes, since their names are words."""
        return self._source.pos_label is None and are_two_words(self.class_names)

    @property
    def client_names(self) -> tuple[str, ...]:
        """Names of the clients: keys of ``clients``, folders or groups, or else the clients' ids."""
        return self._source.splits.names

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, such as ``(1, 28, 28)``."""
        return self._source.input_shape

    @property
    def column_cards(self) -> tuple[ColumnCard, ...]:
        """Description of each column of a table. Empty for data that are not tables."""
        return self._source.columns

    @property
    def dictionary(self) -> Dictionary | None:
        """The data dictionary by which a table is read. None for other data."""
        return self._source.dictionary

    @property
    def has_inferred_dictionary(self) -> bool:
        """Return whether the data dictionary, or a part of it, was inferred from the samples."""
        return self._source.is_inferred

    @property
    def missing_from_dictionary(self) -> str:
        """What is missing in the user's data dictionary. Empty if it is complete."""
        return self._source.missing_from_dictionary

    @property
    def table_warnings(self) -> tuple[TableWarning, ...]:
        """Data warnings about the clients' tables."""
        return self._source.data_warnings

    @property
    def server_val_indices(self) -> Tensor:
        """Indices of the server's validation samples in the training data.

        Empty if the source has its own validation data.
        """
        return self._source.splits.server_val

    @property
    def val_loaders(self) -> Iterable[Any]:
        """The server's validation batches, or an empty list if there are none."""
        source = self._source
        if source.val is not None:
            return make_loader(source.val, **source.eval_options)
        if len(source.splits.server_val):
            return make_loader(source.train, source.splits.server_val, **source.eval_options)
        return [] if source.val_loaders is None else source.val_loaders

    def client_indices(self, client: int, split: SplitName = "train") -> Tensor:
        """Return the sorted indices of a client's samples in the training data, int64 ``[n]``."""
        return self._source.splits.clients[client][split]

    def client_labels(self, client: int, split: SplitName = "train") -> Tensor:
        """Return a client's labels after corruptions, int64 ``[n]``, in the order of :meth:`client_indices`."""
        return self._source.classes.labels[self.client_indices(client, split)]

    def indices_and_labels(self, client: int) -> list[Tensor]:
        """Return indices and labels of a client's samples in ``train``, ``val`` and ``test``, six tensors int64."""
        tensors: list[Tensor] = []  # of each split, its indices and their labels
        splits: tuple[SplitName, ...] = ("train", "val", "test")
        for split in splits:
            tensors += [self.client_indices(client, split), self.client_labels(client, split)]
        return tensors

    def corrupted_samples(self, client: int) -> Tensor:
        """Return whether corruptions changed each of a client's training samples, bool ``[n]``.

        This is the ground truth for tests and figures. The server never receives it.
        """
        return self._source.is_changed[self.client_indices(client)]

    def content_hashes(self) -> dict[str, str]:
        """Return ``{participant: hash}`` of the samples of the server and of each client.

        The server's are its validation samples, and a client's those of all its splits.
        """
        hashes = {"server": loader_hash(self.val_loaders)}
        sample_hashes = self._source.sample_hashes
        for client, client_split in enumerate(self._source.splits.clients):
            indices = torch.cat(list(client_split.values()))
            if sample_hashes is None:
                hashes[str(client)] = content_hash(self._source.train, indices)
            else:
                hashes[str(client)] = digest(sample_hashes[indices]).hex()
        return hashes

    def hashes_of_samples(self) -> list[np.ndarray] | None:
        """Return the hashes of each client's training samples, or None if they cannot be hashed."""
        sample_hashes = self._source.sample_hashes
        if sample_hashes is None:
            return None
        return [sample_hashes[indices] for indices in self._source.splits.train]

    @property
    def malicious(self) -> list[int]:
        """Ids of the clients with a corrupted sample, ascending."""
        return [
            client for client in range(self.num_clients) if self.corrupted_samples(client).any()
        ]

    @property
    def has_streams(self) -> bool:
        """Return whether a client has a stream."""
        return has_streams(self._source.train)

    @property
    def test_set(self) -> Any:
        """Test data, or None if there are none or a wrapped data module has its own test loader.

        Test data from a table have the attribute ``row_names``.
        """
        return self._source.test
