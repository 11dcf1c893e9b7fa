"""Read-only view of partitioned data: sizes, names, every client's samples, and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader

from flsv.data.contents import content_hashes, loader_hash, loader_rows
from flsv.data.federated_data import FederatedData
from flsv.data.loaders import Loader, TensorBatches, drawn_order, make_loader
from flsv.data.partition import Partitioner
from flsv.data.sample_hashes import hash_samples
from flsv.data.shown import loader_as, restrict_to_rows
from flsv.data.sources.base import Reading, SourceData
from flsv.data.sources.source import source_name
from flsv.data.splits import HELD_OUT, HeldOut, SplitName, Splits
from flsv.data.streams import StreamSamples, has_streams, part_of
from flsv.utilities.arguments import ReadOnlyArguments
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.plain_values import digest
from flsv.utilities.seeding import generator_for, seed_or_default

if TYPE_CHECKING:
    from flsv.data.corruption import Corruption
    from flsv.data.tables.dictionary import ColumnCard, Dictionary
    from flsv.data.tables.drafts import TableDoubt

BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
#: Largest number of classes' or clients' names that a description of a run lists.
_MAX_LISTED_NAMES = 20


class FederationView(ReadOnlyArguments, L.LightningDataModule):
    """Base class of :class:`~flsv.data.FederatedDataModule` with the members that only read the partitioned data."""

    partitioner: Partitioner
    splits: Splits
    loader: Loader
    corruptions: tuple[Corruption, ...]
    _reading: Reading
    _held_out: dict[str, Any]
    _source_name: str
    _module: L.LightningDataModule | None
    _partitioned: FederatedData | None
    _num_dropped: int
    _is_partitioner_undecided: bool
    #: The clients whose samples :attr:`class_counts` counts, the members of a coalition. None: all.
    counted_clients: Sequence[int] | None = None
    _has_grown = False

    @property
    def num_clients(self) -> int:
        """Number of clients. Before ``setup`` it is known only if the partitioner has it as an argument."""
        may_ask_partitioner = self._partitioned is None and not self._is_partitioner_undecided
        if may_ask_partitioner and self.partitioner.num_clients is not None:
            return self.partitioner.num_clients
        return len(self._data.splits.clients)

    @property
    def num_samples(self) -> Tensor:
        """Number of training samples of each client, int64 ``[num_clients]``."""
        with self.counting(None):
            return self.class_counts.sum(1)

    @property
    def class_counts(self) -> Tensor:
        """Number of each client's training samples per class, int64 ``[num_clients, num_classes]``.

        Without classes it is ``[num_clients, 1]``. The labels are those after ``corruptions``. While a coalition is
        trained, the other clients' rows are 0.
        """
        counts = self._data.class_counts
        if self.counted_clients is None:
            return counts

        counts_of_members = torch.zeros_like(counts)
        members = list(self.counted_clients)
        counts_of_members[members] = counts[members]
        return counts_of_members

    @contextmanager
    def counting(self, members: Sequence[int] | None) -> Iterator[None]:
        """Count the samples of only the clients ``members`` in :attr:`class_counts`. None: of all clients."""
        previous_members = self.counted_clients
        self.counted_clients = members
        try:
            yield
        finally:
            self.counted_clients = previous_members

    def restrict_to(self, members: Sequence[int]) -> None:
        """Leave out all other clients in :attr:`class_counts`, and in the training samples of a wrapped module."""
        self.counted_clients = members
        if self._module is None:
            return
        assert self._source.train_loader is not None
        is_kept = torch.ones(len(self._source.classes.labels), dtype=torch.bool)
        for client in set(range(self.num_clients)) - set(members):
            for indices in self._data.splits.clients[client].values():
                is_kept[indices] = False
        if not is_kept.all():
            rows = is_kept.nonzero()[:, 0]
            restrict_to_rows(self._module, self._source.train_loader.dataset, rows)

    def shown_loader(
        self, clients: Sequence[int] | None, num_batches: Callable[[], int]
    ) -> DataLoader[Any]:
        """Return a loader of length ``num_batches()`` of some clients' training samples in the form of the user's own.

        None: of all clients, or of the members while a coalition is trained.
        """
        if clients is None:
            clients = self.counted_clients
        if clients is None:
            clients = range(self.num_clients)
        rows = torch.cat([self.client_indices(client) for client in clients]).sort().values
        return loader_as(self._source, rows, num_batches)

    @property
    def num_classes(self) -> int:
        """Number of classes.

        Before ``setup`` it is the attribute ``num_classes`` of a wrapped data module, and for data without classes this
        or 1.
        """
        if self._partitioned is None or self.no_classes:
            num_classes = getattr(self._module, "num_classes", None)
            if isinstance(num_classes, int):
                return num_classes
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
        return (
            self.class_names[1] if self.no_classes is None and len(self.class_names) == 2 else None
        )

    @property
    def chose_rarer_class(self) -> bool:
        """Return whether the positive class is the rarer of two classes because the user named none."""
        return self._source.chose_rarer_class

    @property
    def client_names(self) -> tuple[str, ...]:
        """Names of the clients: their keys, folders or groups, or else their numbers."""
        return self._data.splits.names

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, such as ``(1, 28, 28)``."""
        return self._data.input_shape

    @property
    def column_cards(self) -> tuple[ColumnCard, ...]:
        """Record of each column of a table, with its kind. Empty for data that are not tables."""
        return self._source.columns

    @property
    def dictionary(self) -> Dictionary | None:
        """The data dictionary by which a table is read. None for other data."""
        return self._source.dictionary

    @property
    def table_doubts(self) -> tuple[TableDoubt, ...]:
        """Doubts about the clients' tables."""
        return self._source.doubts

    @property
    def server_val_indices(self) -> Tensor:
        """Indices of the server's validation samples in the training data.

        Empty if the source has its own validation data.
        """
        return self._data.splits.server_val

    def client_indices(self, client: int, split: SplitName = "train") -> Tensor:
        """Return the sorted indices of a client's samples in the training data, int64 ``[n]``."""
        return self._data.splits.clients[client][split]

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

        This is ground truth for tests and figures, which the server never receives.
        """
        return self._data.is_changed[self.client_indices(client)]

    def content_hashes(self) -> dict[str, str]:
        """Return ``{participant: hash}`` of the samples of the server and of each client.

        The server's are its validation samples, and a client's those of all its splits.
        """
        samples_by_client = {}
        for client, client_split in enumerate(self._data.splits.clients):
            samples_by_client[str(client)] = torch.cat(list(client_split.values()))
        return {
            "server": loader_hash(self.val_dataloader()),
            **content_hashes(self._source.train, samples_by_client),
        }

    def hashes_of_samples(self) -> list[np.ndarray] | None:
        """Return the hashes of each client's training samples, or None if they cannot be hashed."""
        indices_by_client = [self.client_indices(client) for client in range(self.num_clients)]
        hashes = hash_samples(self._source.train, torch.cat(indices_by_client))
        if hashes is None:
            return None
        boundaries = np.cumsum([len(indices) for indices in indices_by_client])
        return np.split(hashes, boundaries[:-1])

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
            split: the client's set to read. ``train`` is shuffled (unless the trainer has ``overfit_batches``), ``val``
                and ``test`` are read in order.
            generator: generator that alone determines the order of the shuffled samples. By default it is seeded by
                this module's seed and the client.
            shuffle: whether training samples are shuffled. If False they are read in order, too.
        """
        if split != "train" or not shuffle:
            indices = self.client_indices(client, split)
            return make_loader(self._source.train, indices, **self._source.eval_options)
        if generator is None:
            generator = generator_for(self.splits.seed, "client", client)
        return self._train_loader([client], generator)

    def warn_of_growth(self) -> None:
        """Warn once if the training data have grown since they were divided among the clients."""
        num_divided = len(self._source.classes.labels)
        num_samples = _current_length(self._source.train)
        if num_samples > num_divided and not self._has_grown:
            self._has_grown = True
            rank_zero_warn(
                f"flsv: {self._source_name} has grown from {num_divided} to {num_samples} samples since they were "
                "divided among the clients. The new samples belong to nobody, and are not trained on."
            )

    def _train_loader(
        self, clients: Sequence[int], generator: torch.Generator | None
    ) -> TensorBatches | DataLoader[Any]:
        """Return a loader of training batches, ordered with ``overfit_batches``."""
        if self._overfits:
            generator = None
        source = self._source
        rows = torch.cat([self.client_indices(client) for client in clients])
        # All samples of a stream belong to one client, so if the first row is of a stream, all rows are.
        part = part_of(source.train, row=int(rows[0]))
        if isinstance(part, StreamSamples):
            return part.loader(generator, source.train_options)

        draws = None
        if source.draws is not None and generator is not None:
            draws = source.draws.restricted_to(rows)
        return make_loader(
            source.train, rows, generator=generator, draws=draws, **source.train_options
        )

    @property
    def has_streams(self) -> bool:
        """Return whether a client has a stream."""
        return has_streams(self._source.train)

    def client_order(self, client: int, generator: torch.Generator) -> Tensor:
        """Return the positions of a client's training samples, int64 ``[n]``, in the order in which its loader reads
        them.
        """
        if self.has_streams:
            raise ConfigurationError("A client's stream cannot be valued sample by sample.")
        indices = self.client_indices(client)
        if self._overfits:
            return torch.arange(len(indices))
        draws = self._source.draws  # by weights, if the loader has them
        if draws is not None:
            draws = draws.restricted_to(indices)
        return drawn_order(len(indices), generator, draws)

    @property
    def _overfits(self) -> bool:
        # For mypy: Lightning sets overfit_batches outside of the constructor.
        return self.trainer is not None and self.trainer.overfit_batches > 0  # type: ignore[attr-defined]

    def to_device(self, trainer: L.Trainer) -> FederatedData | None:
        """Return the partitioned data, or None before ``setup``.

        They are moved to the trainer's accelerator if ``Loader.on_device`` is set and they fit there.
        """
        data = self._partitioned
        device = trainer.strategy.root_device
        if data is None or device.type == "cpu" or not self.loader.on_device:
            return data
        shown = self if self._module is None else self._module
        for hook in BATCH_HOOKS[:2]:  # before the transfer, and in its place
            if is_overridden(hook, trainer.lightning_module) or is_overridden(hook, shown):
                return data

        device_module = torch.get_device_module(device)
        if not data.tensors() or not hasattr(device_module, "mem_get_info"):
            return data
        free_bytes, _ = device_module.mem_get_info(device)
        num_bytes = sum(tensor.nbytes for tensor in data.tensors())
        if num_bytes > free_bytes / 4:  # leave memory for models and activations
            return data
        return data.to_device(device)

    def describe(self) -> dict[str, str | int | float]:
        """Return the data's settings and the sizes found by ``setup``, for loggers."""
        options, reading = self.splits, self._reading
        settings: dict[str, str | int | float] = {
            "source": self._source_name,
            "partitioner": repr(self.partitioner),
        }
        for name in HELD_OUT:
            choice = getattr(options, name)
            settings[f"splits.{name}"] = str(choice) if isinstance(choice, HeldOut) else choice
        if options.together is not None:
            settings["splits.together"] = options.together
        settings["splits.seed"] = self.seed
        if self.corruptions:
            settings["corruptions"] = ", ".join(map(repr, self.corruptions))
        if options.detector is not None:
            settings |= {
                "splits.drop_flagged": repr(options.detector),
                "dropped_samples": self._num_dropped,
            }
        if reading.label is not None:
            settings["labels"] = reading.label
        if self._partitioned is None:
            return settings
        source = self._source
        if source.dictionary is not None:
            settings["dictionary"] = source.dictionary.hash
        draws = source.draws
        if draws is not None:
            digest_of_weights = digest([draws.weights, draws.replacement]).hex()
            settings["sampler"] = f"{draws.count} draws by weights {digest_of_weights[:12]}"
        for kind in ("client_names", "class_names"):
            names = getattr(self, kind)
            if names != tuple(map(str, range(len(names)))):
                settings[kind] = listed(names, _MAX_LISTED_NAMES)
        return settings | {
            "batch_size": source.train_options["batch_size"],
            "num_clients": self.num_clients,
            "num_classes": self.num_classes,
            "train_samples": int(self.num_samples.sum()),
            "server_val_samples": len(self.server_val_indices),
        }

    @property
    def test_set(self) -> Any:
        """Test data, or None if there are none or a wrapped data module has its own test loader.

        Test data from a table have the attribute ``row_names``.
        """
        return self._source.test

    def validation(self) -> dict[str, Any] | None:
        """Return the origin (key ``of``) and the number of samples (key ``rows``) of the server's validation data.

        Return None if the server has no validation data; ``rows`` is None if a loader does not know its length.

        Example:
            >>> from flsv.data import FederatedDataModule
            >>> data = FederatedDataModule("digits")
            >>> data.setup("fit")
            >>> data.validation()
            {'of': "10 % of the partners' data", 'rows': 144}
        """
        loaders = self._data.val_loaders
        if loaders is None:
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

    @property
    def seed(self) -> int:
        """Seed of all splits except the partition, whose seed is the partitioner's."""
        return seed_or_default(self.splits.seed)

    @property
    def _data(self) -> FederatedData:
        if self._partitioned is None:
            raise RuntimeError(
                "The data are not loaded yet: let a Trainer do it, or call prepare_data() and setup('fit')."
            )
        return self._partitioned

    @property
    def _source(self) -> SourceData:
        return self._data.source


def _current_length(dataset: Any) -> int:
    """Return a data set's present length, also of a ``ConcatDataset``, which counts once."""
    if isinstance(dataset, ConcatDataset):
        return sum(map(_current_length, dataset.datasets))
    return len(dataset)
