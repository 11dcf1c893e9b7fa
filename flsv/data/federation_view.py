"""What a federation reads of its data once they are dealt out: sizes, names, who holds what, and batches.

Data held as tensors can stay on the accelerator for the length of a fit: a batch is gathered there, and nothing is
copied but the order of a client's samples, once a local epoch. What is gathered is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from copy import copy
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader

from flsv._lightning.evaluation import free_memory
from flsv.arguments import ReadOnlyArguments
from flsv.data.contents import content_hashes, loader_hash, loader_rows
from flsv.data.corruption import Corruption
from flsv.data.federated_data import FederatedData, how_batches_are_made
from flsv.data.loaders import Loader, TensorBatches, make_loader
from flsv.data.partition.base import Partitioner
from flsv.data.sources.base import ColumnCard, Files, Given
from flsv.data.sources.source import source_name
from flsv.data.sources.table import find_place
from flsv.data.splits import Splits
from flsv.errors import ConfigurationError, listed
from flsv.seeding import generator_for

BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
#: Names of classes and clients that a description of a run lists.
_LISTED = 20


class FederationView(ReadOnlyArguments, L.LightningDataModule):
    """The read-only part of :class:`~flsv.data.FederatedDataModule`; see there."""

    source: Any
    partitioner: Partitioner
    splits: Splits
    files: Files
    loader: Loader
    corruptions: tuple[Corruption, ...]
    train_transform: Callable[[Tensor], Any] | None
    device_cache: DeviceCache | None
    _given: Given
    _module: L.LightningDataModule | None
    _dealt: FederatedData | None
    _dropped: int
    _eval_loaders: dict[Any, Any]
    _undecided: bool

    @property
    def num_clients(self) -> int:
        """Number of clients; before ``setup`` where the partitioner knows it."""
        if self._dealt is None and not self._undecided and self.partitioner.num_clients is not None:
            return self.partitioner.num_clients
        return len(self._data.splits.clients)

    @property
    def num_samples(self) -> Tensor:
        """Training samples of each client, int64 ``[num_clients]``."""
        return self.class_counts.sum(1)

    @property
    def class_counts(self) -> Tensor:
        """Training samples of each client and class, int64 ``[num_clients, num_classes]``; ``[num_clients, 1]`` of data
        without classes.

        By the labels that the clients have, which ``corruptions`` may have changed.
        """
        return self._data.class_counts

    @property
    def num_classes(self) -> int:
        """Number of classes.

        1 for data without classes, unless a wrapped data module has a ``num_classes`` of its own, which then is what
        its users mean.
        """
        theirs = getattr(self._module, "num_classes", None) if self._data.classes.missing else None
        return theirs if isinstance(theirs, int) else len(self._data.class_names)

    @property
    def known_class_counts(self) -> Tensor | None:
        """:attr:`class_counts` if there are classes and metrics may know the counts; else None."""
        return self.class_counts if self.no_classes is None else None

    @property
    def no_classes(self) -> str | None:
        """Why the training samples have no classes, in words; None where they have some."""
        return self._data.classes.missing

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; their numbers where the source has no names. ``("samples",)`` without classes."""
        return self._data.class_names

    @property
    def client_names(self) -> tuple[str, ...]:
        """Names of the clients: keys, folders or groups; their numbers where the data have no names for them."""
        return self._data.client_names

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, such as ``(1, 28, 28)``."""
        return self._data.input_shape

    @property
    def column_cards(self) -> tuple[ColumnCard, ...]:
        """What became of the columns of a table; empty for other data."""
        return self._data.columns

    @property
    def server_val_indices(self) -> Tensor:
        """The server's validation samples as indices into the training data; empty if the source has its own."""
        return self._data.splits.server_val

    def client_indices(self, client: int, split: Literal["train", "val", "test"] = "train") -> Tensor:
        """A client's samples as sorted indices into the source's training data, int64 ``[n]``."""
        clients = self._data.splits.clients
        if not 0 <= client < len(clients) or split not in ("train", "val", "test"):
            raise ConfigurationError(
                f"client {client}, split {split!r}: clients are 0 .. {len(clients) - 1}, splits train, val and test."
            )
        return clients[client][split]

    def client_labels(self, client: int, split: Literal["train", "val", "test"] = "train") -> Tensor:
        """A client's labels, as it has them, int64 ``[n]`` beside :meth:`client_indices`; all 0 without classes."""
        return self._data.classes.labels[self.client_indices(client, split)]

    def corrupted_samples(self, client: int) -> Tensor:
        """Which of a client's training samples differ from the source's, bool ``[n]`` beside :meth:`client_indices`.

        Ground truth for tests and figures. Nothing of it reaches the server.
        """
        return self._data.differs[self.client_indices(client)]

    def content_hashes(self) -> dict[str, str]:
        """A hash of the samples of the server's validation set (``"server"``) and of each client, by its number, of all
        its splits together; see :func:`flsv.data.contents.content_hashes`."""
        held = {str(i): torch.cat(list(parts.values())) for i, parts in enumerate(self._data.splits.clients)}
        return {"server": loader_hash(self.val_dataloader()), **content_hashes(self._data.train, held)}

    @property
    def malicious(self) -> list[int]:
        """The clients with a corrupted sample, ascending. Ground truth, as :meth:`corrupted_samples`."""
        return [client for client in range(self.num_clients) if self.corrupted_samples(client).any()]

    def client_loader(
        self,
        client: int,
        split: Literal["train", "val", "test"] = "train",
        generator: torch.Generator | None = None,
        shuffle: bool = True,
    ) -> TensorBatches | DataLoader:
        """A client's batches.

        Args:
            client: the client's number.
            split: ``train`` is shuffled (but for ``overfit_batches``) and transformed; ``val`` and ``test`` come in
                order.
            generator: drives the shuffle, and nothing else does; by default one of this module's seed and the client.
            shuffle: False gives the training samples as the client has them: in order, not transformed.
        """
        indices = self.client_indices(client, split)
        if split == "train" and not shuffle:
            return self._near(self._data.eval_loader(self._data.train, indices))
        if split == "train":
            generator = None if self._overfits else generator or generator_for(self.splits.seed, "client", client)
            loader = self._data.train_loader(indices, generator, self.train_transform)
            # What a transform draws, it may draw where its images are.
            return (
                loader if self.train_transform is not None and self.loader.on_device == "auto" else self._near(loader)
            )
        key = (client, split)
        return self._near(self._cached(key, lambda: self._data.eval_loader(self._data.train, indices)), key)

    def reside(self, trainer: L.Trainer) -> DeviceCache | None:
        """The data on a trainer's accelerator, as ``on_device`` says; None: they stay where they are.

        Raises:
            ConfigurationError: see :func:`flsv.data.federation_view.reside`.
        """
        asking = (trainer.lightning_module, self)
        if self._dealt is None or (
            self.loader.on_device == "auto" and any(is_overridden(hook, o) for hook in BATCH_HOOKS[:2] for o in asking)
        ):
            return None
        return reside(self._dealt, self.loader.on_device, trainer.strategy.root_device, self._source_name)

    def describe(self) -> dict[str, str | int | float]:
        """The data's settings and results, flat, to be logged as hyper-parameters."""
        options = self.splits
        facts: dict[str, str | int | float] = {
            "source": self._source_name,
            "partitioner": repr(self.partitioner),
            "splits.server_val": options.server_val,
            "splits.client_val": options.client_val,
            "splits.client_test": options.client_test,
            "splits.seed": options.seed,
        }
        if self.corruptions:
            facts["corruptions"] = ", ".join(map(repr, self.corruptions))
        if options.detector is not None:
            facts |= {"splits.drop_flagged": repr(options.detector), "dropped_samples": self._dropped}
        if isinstance(self._given.labels, str):
            facts |= {"labels": self._given.labels, "columns": repr(self._given.reading.columns)}
        if self._dealt is not None:
            facts |= {
                "batch_size": self._dealt.train_options["batch_size"],
                "num_clients": self.num_clients,
                "num_classes": self.num_classes,
                "train_samples": int(self.num_samples.sum()),
                "server_val_samples": len(self.server_val_indices),
            }
            for name, held in (("client_names", self.client_names), ("class_names", self.class_names)):
                if held != tuple(map(str, range(len(held)))):
                    facts[name] = listed(held, _LISTED)
        return facts

    @property
    def test_set(self) -> Any:
        """The test data, of which a table has ``row_names``; None where there are none, or a data module has them."""
        return self._data.test

    def validation(self) -> dict[str, Any] | None:
        """What the server validates with: ``of`` which file or data, and how many ``rows``; None where it has none.

        Where a loader does not know its length, ``rows`` is None.

        Example:
            >>> from flsv.data import FederatedDataModule
            >>> data = FederatedDataModule("digits")
            >>> data.setup("fit")
            >>> data.validation()
            {'of': '10 % of what the partners hold', 'rows': 144}
        """
        dealt = self._data
        if dealt.val is None:
            return None
        if dealt.val_data is None:
            return {"of": f"the validation loader of {self._source_name}", "rows": loader_rows(dealt.val)}
        samples, held = dealt.val_data
        if held is not None:
            return {"of": f"{100 * self.splits.server_val:g} % of what the partners hold", "rows": len(held)}
        given = self._given.val
        of = f"{self._source_name}, its validation part" if given is None else source_name(given)
        if given is None and isinstance(self.source, str) and (place := find_place(self.source, self.files.root)):
            # A folder with one file in it, or that file.
            files = [path for each in sorted(place.glob("val*")) for path in (sorted(each.glob("*")) or [each])]
            of = str(Path(self.source, files[0].relative_to(place))) if len(files) == 1 else of
        return {"of": of, "rows": len(samples)}  # type: ignore[arg-type]

    @property
    def seed(self) -> int:
        """Of all splits but the partition."""
        return self.splits.seed

    @property
    def _source_name(self) -> str:
        clients = self._given.clients
        return source_name(self.source) if clients is None else f"{len(clients)} clients' data"

    @property
    def _overfits(self) -> bool:
        """Whether the same first batches are wanted again and again, as Lightning does it: in order."""
        return self.trainer is not None and self.trainer.overfit_batches > 0  # type: ignore[attr-defined]

    @property
    def _data(self) -> FederatedData:
        if self._dealt is None:
            raise RuntimeError(
                "The data are not loaded yet: let a Trainer do it, or call prepare_data() and setup('fit')."
            )
        return self._dealt

    def _near(self, loader: Any, key: Any = None) -> Any:
        return loader if self.device_cache is None else self.device_cache.near(loader, key)

    def _cached(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._eval_loaders:
            self._eval_loaders[key] = make()
        return self._eval_loaders[key]


#: Of the free memory, how much ``"auto"`` takes at most: models, activations and the cohort's matrix need the rest.
SHARE = 0.25

OnDevice = bool | Literal["auto"]


class DeviceCache:
    """Copies of tensors on a device, and loaders that read them there.

    Args:
        tensors: that may be read.
        device: where to.

    Example:
        >>> from flsv.data.loaders import TensorBatches
        >>> data = torch.arange(4.0)
        >>> near = DeviceCache([data], torch.device("meta")).near(TensorBatches([data], None, batch_size=3))
        >>> [x.device.type for (x,) in near]
        ['meta', 'meta']
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        self.device = device
        # The tensors too: an id is one tensor's for as long as it lives.
        self._near = {id(tensor): (tensor, tensor.to(device)) for tensor in tensors}
        self._kept: dict[Hashable, tuple[Any, Any]] = {}

    def near(self, loader: Any, key: Hashable = None) -> Any:
        """``loader``, reading the copies; as it is, if it reads anything else.

        Args:
            loader: any.
            key: by which the result is remembered, for a loader that is asked for again and again.
        """
        kept, found = self._kept.get(key, (None, None))
        if key is not None and kept is loader:
            return found
        if not isinstance(loader, TensorBatches) or not all(id(tensor) in self._near for tensor in loader.tensors):
            return loader
        found = copy(loader)
        found.tensors = tuple(self._near[id(tensor)][1] for tensor in loader.tensors)
        if not loader.shuffle:
            found.indices = loader.indices.to(self.device)
        if key is not None:
            self._kept[key] = loader, found
        return found


def reside(data: FederatedData, on_device: OnDevice, device: torch.device, source: str) -> DeviceCache | None:
    """The training and validation data on ``device``, if they are to be there.

    Args:
        data: dealt out.
        on_device: True: they are; False: they are not; ``"auto"``: if they are tensors on the CPU and take at most
            :data:`SHARE` of the memory that the device says is free.
        device: of the fit.
        source: name of the data, for messages.

    Raises:
        ConfigurationError: ``on_device=True`` for data that are not held as tensors.
    """
    if device.type == "cpu" or on_device is False:
        return None
    tensors = {id(tensor): tensor for tensor in _tensors(data)}
    if on_device is True and not tensors:
        raise ConfigurationError(
            f"on_device=True: {source} is read sample by sample, and only data held as tensors can stay on {device}. "
            'Say preload: true to read it once into memory, or on_device: "auto".'
        )
    far = [tensor for tensor in tensors.values() if tensor.device.type == "cpu"]
    if not far:
        return None
    if on_device == "auto":
        free = free_memory(device)
        if free is None or sum(tensor.nbytes for tensor in far) > SHARE * free:
            return None
    return DeviceCache(far, device)


def _tensors(data: FederatedData) -> Iterable[Tensor]:
    """What batches are gathered from."""
    read = [(data.train, data.train_options), (data.train, data.eval_options)]
    if data.val_data is not None:
        read.append((data.val_data[0], data.eval_options))
    for dataset, options in read:
        loader = make_loader(dataset, **how_batches_are_made(options))
        if isinstance(loader, TensorBatches):
            yield from loader.tensors
