"""FederatedData: the samples of the server and the clients, with sizes, names, classes and loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from flsv._lightning.evaluation import list_loaders
from flsv.data.division import Division
from flsv.data.labels import are_two_words
from flsv.data.loaders import TensorBatches, drawn_order, make_loader, samples_of
from flsv.data.sample_hashes import content_hash, loader_hash
from flsv.data.shown import loader_as
from flsv.data.sources.open_source import source_name
from flsv.data.splits import HeldOut, SplitName, Splits
from flsv.data.streams import StreamSamples, has_streams, parts_with_rows
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.plain_values import digest
from flsv.utilities.seeding import generator_for

if TYPE_CHECKING:
    from flsv.data.sources.table_facts import DataDictionary


class FederatedData:
    """Samples of the server and of each client, with their names and classes.

    :class:`~flsv.data.FederatedDataModule` adds the user's arguments and Lightning's hooks, and sets the samples in
    ``setup``. At a site there is a single client.
    """

    # Set by the data module.
    splits: Splits
    trainer: L.Trainer | None
    _source_name: str
    _held_out: dict[str, Any]
    #: None before ``setup``.
    _division: Division | None = None
    #: The members of a coalition while it is trained, the only clients that :attr:`class_counts` counts. None: all.
    counted_clients: Sequence[int] | None = None

    @property
    def division(self) -> Division:
        """The samples, their classes, and which of them the server and each client have."""
        if self._division is None:
            raise RuntimeError(
                "The data are not loaded yet. Pass the data module to a Trainer, or call prepare_data() and "
                "setup('fit') first."
            )
        return self._division

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.client_names)

    @property
    def members(self) -> Sequence[int]:
        """Return all clients, or the members of a coalition while it is trained."""
        return self.counted_clients or range(self.num_clients)

    @property
    def num_samples(self) -> Tensor:
        """Number of training samples of each client, int64 ``[num_clients]``, by which aggregators weight clients.

        Samples that a ``collate_fn`` leaves out count, too. A warning after a client's first round names them.
        """
        return self.division.num_samples.clone()

    @property
    def class_counts(self) -> Tensor:
        """Number of each client's training samples per class, int64 ``[num_clients, num_classes]``.

        Without classes it is ``[num_clients, 1]``. The labels are those after ``corruptions``. While a coalition is
        trained, the other clients' rows are 0.
        """
        counts = self.division.class_counts
        if self.counted_clients is None:
            return counts.clone()
        is_counted = torch.zeros(len(counts), 1, dtype=torch.long)
        is_counted[list(self.counted_clients)] = 1
        return counts * is_counted

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
        return self.division.classes.missing_reason

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, or their numbers if the source has no names.

        For data without classes it is ``("samples",)``.
        """
        return self.division.classes.names

    @property
    def positive_class(self) -> str | None:
        """Name of the positive class (class 1) of two. None unless there are two classes."""
        has_two_classes = self.no_classes is None and len(self.class_names) == 2
        return self.class_names[1] if has_two_classes else None

    @property
    def needs_pos_label(self) -> bool:
        """Return whether the user has to name the positive one of two classes, since their names are words."""
        return self.division.source.pos_label is None and are_two_words(self.class_names)

    @property
    def client_names(self) -> tuple[str, ...]:
        """Names of the clients: keys of ``clients``, folders or groups, or else the clients' ids."""
        return self.division.splits.names

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, such as ``(1, 28, 28)``."""
        return self.division.source.input_shape

    @property
    def dictionary(self) -> DataDictionary | None:
        """The data dictionary by which a table is read. None for other data."""
        return self.division.source.dictionary

    @property
    def server_val_indices(self) -> Tensor:
        """Indices of the server's validation samples in the training data.

        Empty if the source has its own validation data.
        """
        return self.division.splits.server_val

    @property
    def val_loaders(self) -> Iterable[Any]:
        """The server's validation batches, or an empty list if there are none."""
        source = self.division.source
        if source.val is not None:
            return make_loader(source.val, **source.eval_options)
        if len(self.server_val_indices):
            return make_loader(source.train, self.server_val_indices, **source.eval_options)
        return [] if source.val_loaders is None else source.val_loaders

    def client_indices(self, client: int, split: SplitName = "train") -> Tensor:
        """Return the sorted indices of a client's samples in the training data, int64 ``[n]``."""
        return self.division.splits.clients[client][split]

    def client_labels(self, client: int, split: SplitName = "train") -> Tensor:
        """Return a client's labels after corruptions, int64 ``[n]``, in the order of :meth:`client_indices`."""
        return self.division.classes.labels[self.client_indices(client, split)]

    def indices_and_labels(self, client: int) -> list[Tensor]:
        """Return indices and labels of a client's samples in ``train``, ``val`` and ``test``, six tensors int64."""
        tensors = []  # of each split, its indices and their labels
        splits: tuple[SplitName, ...] = ("train", "val", "test")
        for split in splits:
            tensors += [self.client_indices(client, split), self.client_labels(client, split)]
        return tensors

    def corrupted_samples(self, client: int) -> Tensor:
        """Return whether corruptions changed each of a client's training samples, bool ``[n]``.

        This is the ground truth for tests and figures. The server never receives it.
        """
        return self.division.is_changed[self.client_indices(client)]

    def content_hashes(self) -> dict[str, str]:
        """Return ``{participant: hash}`` of the samples of the server and of each client.

        The server's are its validation samples, and a client's those of all its splits.
        """
        hashes = {"server": loader_hash(self.val_loaders)}
        sample_hashes = self.division.sample_hashes
        for client, client_split in enumerate(self.division.splits.clients):
            indices = torch.cat(list(client_split.values()))
            if sample_hashes is None:
                hashes[str(client)] = content_hash(self.division.source.train, indices)
            else:
                hashes[str(client)] = digest(sample_hashes[indices.numpy()]).hex()
        return hashes

    @property
    def malicious(self) -> list[int]:
        """Ids of the clients with a corrupted sample, ascending."""
        return [
            client for client in range(self.num_clients) if self.corrupted_samples(client).any()
        ]

    def client_loader(
        self,
        client: int,
        split: SplitName = "train",
        generator: torch.Generator | None = None,
        shuffle: bool = True,
    ) -> TensorBatches | DataLoader[Any]:
        """Return a loader of the batches of one client's set.

        Args:
            client: the client's number.
            split: the set to read. ``train`` is shuffled unless the trainer has ``overfit_batches``. ``val`` and
                ``test`` are read in order.
            generator: generator of the order of shuffled samples. By default it is seeded by this module's seed and the
                client.
            shuffle: whether training samples are shuffled.
        """
        if split != "train" or not shuffle:
            source = self.division.source
            indices = self.client_indices(client, split)
            return make_loader(source.train, indices, **source.eval_options)
        if generator is None:
            generator = generator_for(self.splits.seed, "client", client)
        return self._train_loader([client], generator)

    def _train_loader(
        self, clients: Sequence[int], generator: torch.Generator | None
    ) -> TensorBatches | DataLoader[Any]:
        """Return a loader of training batches, not shuffled if the trainer has ``overfit_batches``."""
        if self._overfits:
            generator = None
        source = self.division.source
        rows = torch.cat([self.client_indices(client) for client in clients])
        # All samples of a stream belong to one client, so if the first row is of a stream, all rows are.
        first_part, _ = next(parts_with_rows(source.train, rows[:1]))
        if isinstance(first_part, StreamSamples):
            return first_part.loader(generator, source.train_options)

        draws = None
        if source.draws is not None and generator is not None:
            draws = source.draws.restricted_to(rows)
        return make_loader(
            source.train, rows, generator=generator, draws=draws, **source.train_options
        )

    def shown_loader(
        self, clients: Sequence[int] | None, num_batches: Callable[[], int]
    ) -> DataLoader[Any]:
        """Return a loader of some clients' training samples, of the class of the user's loader.

        Its length is ``num_batches()``. If ``clients`` is None, it has the samples of all :attr:`members`.
        """
        if clients is None:
            clients = self.members
        rows = torch.cat([self.client_indices(client) for client in clients]).sort().values
        return loader_as(self.division.source, rows, num_batches)

    def client_order(self, client: int, generator: torch.Generator) -> Tensor:
        """Return the positions of a client's training samples in the order of its loader, int64 ``[n]``."""
        if self.has_streams:
            raise ConfigurationError(
                "The samples of a stream have no numbers, so that they cannot be valued one by one. Give map-style "
                "data sets."
            )
        indices = self.client_indices(client)
        if self._overfits:
            return torch.arange(len(indices))
        draws = self.division.source.draws
        if draws is not None:
            draws = draws.restricted_to(indices)
        return drawn_order(len(indices), generator, draws)

    @property
    def _overfits(self) -> bool:
        # For mypy: Lightning sets overfit_batches outside of the constructor.
        return self.trainer is not None and self.trainer.overfit_batches > 0  # type: ignore[attr-defined]

    @property
    def has_streams(self) -> bool:
        """Return whether a client has a stream."""
        return has_streams(self.division.source.train)

    def validation(self) -> dict[str, Any] | None:
        """Return the origin (key ``of``) and the number of samples (key ``rows``) of the server's validation data.

        Return None if the server has no validation data. ``rows`` is None if a loader has no length.

        Example:
            >>> from flsv.data import FederatedDataModule
            >>> data = FederatedDataModule("digits")
            >>> data.setup("fit")
            >>> data.validation()
            {'of': "10 % of the partners' data", 'rows': 144}
        """
        loaders = self.val_loaders
        if loaders == []:
            return None
        return {"of": self._origin_of_validation(), "rows": loader_rows(loaders)}

    def _origin_of_validation(self) -> str:
        if len(self.server_val_indices) == 0:
            users_val = self._held_out["val"]
            if users_val is None:
                return f"the validation part of {Path(self._source_name).name}"
            return Path(source_name(users_val)).name
        choice = self.splits.server_val
        if isinstance(choice, HeldOut):
            return f"the partners' data with {choice}"
        if isinstance(choice, float):
            return f"{100 * choice:g} % of the partners' data"
        return f"{choice} samples of the partners' data"


def loader_rows(loaders: Any) -> int | None:
    """Count the samples that one or several loaders read. Return None if a data set has no length."""
    num_rows = 0
    for loader in list_loaders(loaders):
        _, rows = samples_of(loader)
        if rows is None:
            return None
        num_rows += len(rows)
    return num_rows
