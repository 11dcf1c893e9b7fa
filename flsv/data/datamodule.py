"""Data module of a federation: any source of samples, partitioned among clients."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from flsv._lightning.data_source import data_of, show_data_module
from flsv._lightning.patches import callbacks_of, is_loop
from flsv.data.division import Division, divide, without_flagged
from flsv.data.federated_data import FederatedData
from flsv.data.first_batches import check_first_batches, warn_of_random_evaluation
from flsv.data.loaders import Loader, make_loader
from flsv.data.partition import GroupPartitioner, IIDPartitioner, OneClient, Partitioner
from flsv.data.shown import attributes_of_samples, parts_of_samples, restrict_to_rows
from flsv.data.sources.open_source import clients_by_name, loader_options, open_source, source_name
from flsv.data.sources.source_data import (
    TORCHVISION_SETS,
    Files,
    Reading,
    Source,
    SourceData,
    known_as,
)
from flsv.data.sources.table_facts import name_as_text, target_of
from flsv.data.splits import HELD_OUT, HeldOut, SampleFilter, Splits
from flsv.data.streams import current_length
from flsv.isolation.pickles import copy_of_data_module
from flsv.utilities.arguments import ReadOnlyArguments
from flsv.utilities.declared import Count, check_argument, name_places
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.seeding import generator_for, kept_global_seed, seed_or_default
from flsv.utilities.wings import from_wing

if TYPE_CHECKING:
    from flsv.data.corruption import Corruption
    from flsv.data.sources.table_facts import DataDictionary, DictionaryOptions

#: Largest number of classes' or clients' names that a description of a run lists.
_MAX_LISTED_NAMES = 20
_BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device")
_DEFAULT_SPLITS = Splits()
_DEFAULT_FILES = Files()
_DEFAULT_LOADER = Loader()


class FederatedDataModule(ReadOnlyArguments, FederatedData, L.LightningDataModule):
    """Data module that partitions a data set among a federation's clients.

    Every sample is in exactly one set: the server's validation set, or one client's training, validation or test set.
    The sets depend only on the seeds and the data. Attributes are read-only, except ``batch_size``.

    Args:
        source: the data to partition, one of

            - a name or a path, as for :func:`~flsv.data.load_image_data`: ``digits``, ``mnist``, ``fashion_mnist``,
              ``cifar10``, ``cifar100``, a MedMNIST-style ``.npz`` file, a folder of images, a CSV file; or a folder
              with one subfolder (``<client>/<class>/*.png``, or one CSV file in it) or one CSV file per client, which
              is named after it; ``val`` and ``test`` go to the server;
            - a ``LightningDataModule``: its training loader has the data set and the loaders' options (batch size,
              ``collate_fn``, workers), its validation loader is the server's, its test loader is used for tests;
            - a map-style data set, also a list of samples, or ``(train, test)``;
            - arrays ``(X, y)`` or ``((X, y), (X_test, y_test))``, see :func:`~flsv.data.sources.source_data.array_set`;
            - with ``labels``, a DataFrame (pandas, polars, Arrow) or a Hugging Face data set.

        partitioner: assigns samples to clients. By default ``GroupPartitioner()`` if the data are given by client or
            ``groups`` are given, else ``IIDPartitioner(num_clients=5)``.
        batch_size: samples per training batch. None: the batch size of the wrapped data module, else 32.
        clients: the clients' data by name, in place of ``source``: data sets, ``(X, y)`` arrays, DataFrames, Hugging
            Face data sets, ``DataLoader``, or paths of CSV files or of folders of images. The clients of a list have
            the names "0", "1", ... Classes with names get the same numbers at all clients.
        val: the server's validation data, in a form of a client's data. Then no training sample is set aside for it.
            A ``DataLoader`` makes its batches itself, as it also does as ``test``.
        test: test data that no client has, in one of the forms of a client's data.
        labels: class of each training sample, 0 .. M-1; or the name of the column to predict, if the data have columns,
            else the name of an attribute of the training data or the name or position of a field of its samples; False
            for data without classes. By default the attribute ``targets`` of the training data, or else the second part
            of each sample ``(x, y)``, if it is an integer. Without labels all samples have one class.
        pos_label: the positive one of two classes, to which scores such as average precision and F1 refer. Two classes
            with words for names need it for such a score. Of two numbers the larger one is positive, and of truth
            values ``True``.
        groups: natural group of each training sample, or the name of an attribute of the training data, of a field of
            its samples (``"meta.site"``: the field ``site`` of the field ``meta``) or of a column that has the groups.
            By default the attribute ``groups``, if any.
        dictionary: what the columns of tables mean: a data dictionary, its options, or the path of its file, see
            :class:`~flsv.tables.Dictionary`. What is missing is inferred from the training rows of all clients.
        splits: shares of the samples for validation and test sets of the server and the clients, see
            :class:`~flsv.data.Splits`.
        corruptions: changes to some clients' training data, in this order, such as
            ``[ClosedSetLabelNoise(fraction=0.3)]``. Data that are not tensors need ``Loader(preload=True)``.
        files: location of named data sets and files, see :class:`~flsv.data.Files`.
        loader: options of the loaders, see :class:`~flsv.data.Loader`.

    Raises:
        ConfigurationError: at construction: an argument is out of range. From ``setup``: data are missing, have no
            classes although a component needs them, or are too few for the settings.

    Example:
        >>> from flsv.data import DirichletPartitioner
        >>> data = FederatedDataModule("digits", DirichletPartitioner(num_clients=3, alpha=0.5), batch_size=16)
        >>> data.setup("fit")
        >>> data.num_classes, data.input_shape, data.class_counts.shape
        (10, (1, 8, 8), torch.Size([3, 10]))
        >>> int(data.num_samples.sum()) + len(data.server_val_indices)
        1437
        >>> images, labels = next(iter(data.client_loader(0)))
        >>> images.shape
        torch.Size([16, 1, 8, 8])

        >>> import torch
        >>> own = FederatedDataModule(
        ...     clients={"Boston": (torch.rand(40, 3), ["ill"] * 40), "Lyon": (torch.rand(60, 3), ["well"] * 60)}
        ... )
        >>> own.setup("fit")
        >>> own.client_names, own.class_names, own.num_samples.tolist()
        (('Boston', 'Lyon'), ('ill', 'well'), [35, 55])
    """

    _remedy_template = "Create a new one: FederatedDataModule(..., {0})."

    def __init__(
        self,
        source: Source = "digits",
        partitioner: Partitioner | None = None,
        *,
        batch_size: int | None = None,
        clients: Mapping[str, Any] | Sequence[Any] | None = None,
        val: Any = None,
        test: Any = None,
        # bool first: else the command line would take "false" for a name.
        labels: bool | list[int] | str | None = None,
        pos_label: str | bool | int | None = None,
        groups: str | list[int] | list[str] | None = None,
        dictionary: DictionaryOptions = None,
        splits: Splits = _DEFAULT_SPLITS,
        corruptions: list[Corruption] | None = None,
        files: Files = _DEFAULT_FILES,
        loader: Loader = _DEFAULT_LOADER,
    ) -> None:
        super().__init__()
        check = partial(check_argument, type(self).__name__)
        check("splits", splits, Splits)
        check("files", files, Files)
        check("loader", loader, Loader)
        batch_size = check("batch_size", batch_size, Count | None)
        pos_label = check("pos_label", pos_label, str | bool | int | None)
        if isinstance(source, Path | str):
            source = str(source)
        self._module = source if isinstance(source, L.LightningDataModule) else None
        labels = name_as_text(labels)
        groups = name_as_text(groups)
        read_dictionary: DataDictionary | None = None
        if dictionary is not None:
            read_dictionary = self._read_dictionary(dictionary)
            labels = target_of(labels, read_dictionary)
        self._held_out = {"val": val, "test": test}
        self._clients: dict[str, Any] | None = None
        self._source_name = source_name(source)
        if clients is not None:
            self._set_clients(clients, has_groups=groups is not None)

        is_by_client = clients is not None or groups is not None
        # Whether a folder has data by client is known only when it is read.
        is_path = isinstance(source, str) and not known_as(source)
        self._is_partitioner_undecided = is_path and partitioner is None and not is_by_client
        if partitioner is None and is_by_client:
            partitioner = GroupPartitioner()
        elif partitioner is None:
            partitioner = IIDPartitioner(5, splits.seed)
        check("partitioner", partitioner, Partitioner)
        self.partitioner = partitioner

        # Only names of columns concern the readers of tables, not lists with a value for each sample.
        self._reading = Reading(
            files=files,
            label=labels if isinstance(labels, str) else None,
            group=groups if isinstance(groups, str) else None,
            pos_label=pos_label,
            is_alone=isinstance(self.partitioner, OneClient),
            dictionary=read_dictionary,
            split_columns=splits.columns,
        )

        self.corruptions = tuple(corruptions or ())
        self._check_corruptions()
        self.splits = splits
        self.files = files
        self.loader = loader
        self.source = source
        self._batch_size = batch_size
        self.groups = groups
        self.labels = labels
        self.pos_label = pos_label

        # Facts that setup and the loop change.
        self._stages: set[str] = set()
        self._needs_setup = True
        self._is_shown = False
        self._num_dropped = 0
        self._has_grown = False
        if self._module is not None:
            self.prepare_data_per_node = self._module.prepare_data_per_node
        self._read_only = _ARGUMENTS - {"batch_size"}

    def _set_clients(self, clients: Any, has_groups: bool) -> None:
        self._clients = clients_by_name(clients)
        if self._source_name != "digits" or has_groups:
            raise ConfigurationError(
                "clients: the data are given by client, without source and groups. Remove these arguments."
            )
        self._source_name = f"{len(self._clients)} clients' data"

    def _read_dictionary(self, dictionary: DictionaryOptions) -> DataDictionary:
        if self._module is not None:
            raise ConfigurationError(
                "dictionary: a LightningDataModule reads its data itself, without a data dictionary. Remove "
                "dictionary, or give the table as source."
            )
        read_dictionary: DataDictionary = from_wing("readers", "tables").as_dictionary(dictionary)
        return read_dictionary

    def _check_corruptions(self) -> None:
        for corruption in self.corruptions:
            from flsv.data.corruption import Corruption

            check_argument(type(self).__name__, "corruptions", corruption, Corruption)
            have_loaders = any(isinstance(data, DataLoader) for data in self._held_out.values())
            if corruption.unknown_classes and (self._module is not None or have_loaders):
                raise ConfigurationError(
                    f"{corruption!r} removes classes from all data sets, which is not possible in the loaders of a "
                    "LightningDataModule, or of val and test. Give the data sets."
                )

    def __copy__(self) -> FederatedDataModule:
        """Copy this data module for another fit. A wrapped data module is copied, but not its samples."""
        copied: FederatedDataModule = object.__new__(type(self))
        vars(copied).update(vars(self), trainer=None)
        if self._module is not None:
            samples = []
            if self._division is not None and self.division.source.train_loader is not None:
                samples = parts_of_samples(self.division.source.train_loader.dataset)
            users_copy = copy_of_data_module(self._module, samples)
            vars(copied).update(source=users_copy, _module=users_copy, _is_shown=False)
        return copied

    def __repr__(self) -> str:
        text = f"{type(self).__name__}({self._source_name}, {self.partitioner!r})"
        if self._division is None:
            return text
        return f"{text}: {self.num_samples.tolist()} training samples"

    __str__ = __repr__  # Lightning's __str__ would open all loaders, and expects DataLoaders

    # Lightning's life cycle

    @property
    def users_module(self) -> L.LightningDataModule | None:
        """The wrapped data module, which a Trainer has as ``trainer.datamodule``. None if there is none."""
        return self._module

    def prepare_data(self) -> None:
        """Download missing data sets if ``Files.download`` is set, or prepare a wrapped data module."""
        if self._module is not None:
            self._module.trainer = self.trainer
            with kept_global_seed():
                self._module.prepare_data()
            return
        is_of_torchvision = known_as(self.source) in TORCHVISION_SETS
        if self.files.download and self._clients is None and is_of_torchvision:
            from flsv.data.sources.names_and_paths import load_image_data

            load_image_data(self.source, self.files.root, download=True)

    def setup(self, stage: str | None = None) -> None:
        """Load and partition the data at the first call. Further calls, for any ``stage``, change nothing."""
        self._load(stage)
        trainer = self.trainer
        if trainer is None or not trainer.training:
            return
        # The server's own data module is not the Trainer's: that is the RemoteData of the sites, which contains it.
        if data_of(trainer) is not self:
            return
        loops: list[Any] = list(filter(is_loop, callbacks_of(trainer)))
        for loop in loops:
            loop.prepare(trainer)
        if not loops:
            rank_zero_warn(
                "The Trainer has no FederatedLoop, so one model is trained on all clients' samples together, and "
                "no contribution is measured. For a federation: Trainer(callbacks=[FederatedLoop()])."
            )

    def _load(self, stage: str | None) -> None:
        if self._module is not None:
            self._set_up_module(self._module, stage)
        if not self._needs_setup:
            return

        source = open_source(self.source, self._reading, self._held_out, self._clients)
        if self._is_partitioner_undecided and source.is_by_client:
            vars(self)["partitioner"] = GroupPartitioner()  # the attribute is read-only
        self._is_partitioner_undecided = False
        self._division = self._divide(source)
        self._needs_setup = False
        data_warnings = self._division.source.data_warnings
        if data_warnings:
            rank_zero_warn(
                f"The tables may contain errors, which flsv data prints: {listed(data_warnings, 3)}"
            )
        if self.splits.drop_flagged is not None:
            self._drop_flagged(self.splits.drop_flagged)

    def _divide(self, source: SourceData) -> Division:
        # The labels of a table are in its samples.
        labels = None if source.has_target_column else self.labels
        division = divide(
            source,
            self.partitioner,
            self.splits,
            self.loader,
            groups=self.groups,
            labels=labels,
            pos_label=self.pos_label,
            corruptions=self.corruptions,
            batch_size=self._batch_size,
        )
        check_first_batches(division, compare_labels=labels is None)
        warn_of_random_evaluation(division)
        return division

    def _drop_flagged(self, sample_filter: SampleFilter) -> None:
        num_samples = int(self.num_samples.sum())
        generator = generator_for(self.seed, "flagged samples")
        unflagged_by_client = sample_filter.unflagged(self, generator)
        self._division = without_flagged(self.division, unflagged_by_client)
        self._num_dropped = num_samples - int(self.num_samples.sum())

    def _set_up_module(self, module: L.LightningDataModule, stage: str | None) -> None:
        """Set up a wrapped data module, once for each stage, and let the Trainer show it from now on."""
        if getattr(self.trainer, "reload_dataloaders_every_n_epochs", 0) and stage == "fit":
            raise ConfigurationError(
                f"Trainer(reload_dataloaders_every_n_epochs=...): flsv reads the loaders of {self._source_name} once, "
                "to divide the samples among the clients. Set it to 0, and change the samples in the data set instead."
            )
        trainer: Any = self.trainer
        # During a run, the module is the Trainer's data module.
        is_new_run = trainer is not None and trainer.datamodule is self
        if is_new_run:
            self._forget_torn_down_data(module)
            self._is_shown = True
            show_data_module(trainer, self, module)

        self._set_up_stages(module, stage)
        if is_new_run and not self._needs_setup:
            self._read_batch_size(module)

    def _forget_torn_down_data(self, module: L.LightningDataModule) -> None:
        """Set up all stages again if a wrapped data module has torn its data down after an earlier run."""
        if self._is_shown and is_overridden("teardown", module):
            self._stages.clear()
            self._needs_setup = True

    def _set_up_stages(self, module: L.LightningDataModule, stage: str | None) -> None:
        # Training data are needed in every stage, since the samples are divided among the clients.
        needed_stages = ["fit"]
        if stage:
            stage_name = str(getattr(stage, "value", stage))  # Lightning's enumeration, or a word
            needed_stages.append(stage_name)
        for needed_stage in needed_stages:
            if needed_stage not in self._stages:
                with kept_global_seed():
                    module.setup(needed_stage)
                self._stages.add(needed_stage)

    def _read_batch_size(self, module: L.LightningDataModule) -> None:
        """Take the batch size of a wrapped data module's loader, which a tuner may have changed."""
        size = loader_options(module.train_dataloader())["batch_size"]
        if self._batch_size is None and size != self.batch_size:
            self.batch_size = size
            self._batch_size = None

    def set_up_site(self, first_client: int) -> None:
        """Set up the data at a site, whose first client has the id ``first_client`` in the federation.

        They are set up again if the id differs from that of an earlier run.
        """
        self._needs_setup |= self.partitioner.first_client != first_client
        self.partitioner.first_client = first_client
        self.setup("fit")

    def train_dataloader(self) -> Any:
        """Return a shuffled loader of the samples of all clients, or of a coalition's members while it is trained."""
        if self._module is not None and self.trainer is not None:
            self._read_batch_size(self._module)
        if self.has_streams and self.num_clients > 1:
            raise ConfigurationError(
                "One model cannot be trained on the streams of several clients together. Add a FederatedLoop to the "
                "Trainer's callbacks."
            )
        epoch = 0 if self.trainer is None else self.trainer.current_epoch
        generator = generator_for(self.splits.seed, "pooled", epoch)
        return self._train_loader(self.members, generator)

    def val_dataloader(self) -> Any:
        """Return the server's validation loader, or an empty list if there is none."""
        return self.val_loaders

    def test_dataloader(self) -> Any:
        """Return a loader of the test set, which contains no client's samples."""
        if self._module is not None and is_overridden("test_dataloader", self._module):
            return self._module.test_dataloader()
        if self.division.source.test_loader is not None:
            return self.division.source.test_loader
        test = self.division.source.test
        if test is None:
            raise ConfigurationError(
                f"{self._source_name} has no test data. Set test=, or source=(train, test)."
            )
        return make_loader(test, **self.division.source.eval_options)

    def predict_dataloader(self) -> Any:
        """Return the wrapped data module's prediction loader, or else the test loader."""
        if self._module is not None and is_overridden("predict_dataloader", self._module):
            return self._module.predict_dataloader()
        return self.test_dataloader()

    # Before and during a fit

    @property
    def num_clients(self) -> int:
        """Number of clients. Before ``setup`` it is known only if the partitioner has it as an argument."""
        if self._division is None and not self._is_partitioner_undecided:
            num_clients = self.partitioner.num_clients
            if num_clients is not None:
                return num_clients
        return super().num_clients

    @property
    def num_classes(self) -> int:
        """Number of classes. Before ``setup``, and for data without classes, it is the attribute ``num_classes`` of a
        wrapped data module, if any.
        """
        if self._division is None or self.no_classes:
            num_classes = getattr(self._module, "num_classes", None)
            if isinstance(num_classes, int):
                return num_classes
        return super().num_classes

    def restrict_to(self, members: Sequence[int]) -> None:
        """Exclude all clients but ``members`` from :attr:`class_counts` and from a wrapped module's training
        samples.
        """
        self.counted_clients = members
        module = self._module
        if module is None:
            return
        division = self.division
        users_loader = division.source.train_loader
        assert users_loader is not None
        # The module may have made its loader already, so its method is replaced.
        vars(module)["train_dataloader"] = partial(self.shown_loader, members, self._count_batches)

        is_kept = torch.ones(len(division.classes.labels), dtype=torch.bool)
        other_clients = set(range(self.num_clients)) - set(members)
        for client in other_clients:
            for samples in division.splits.clients[client].values():
                is_kept[samples] = False
        if not is_kept.all():
            kept_rows = is_kept.nonzero()[:, 0]
            restrict_to_rows(module, users_loader.dataset, kept_rows)

    def attributes_of_members(self) -> list[tuple[Any, str]]:
        """Return the attributes that :meth:`restrict_to` changes, each as its object and its name."""
        attributes: list[tuple[Any, str]] = [(self, "counted_clients")]
        module = self._module
        if module is not None:
            users_loader = self.division.source.train_loader
            assert users_loader is not None
            attributes.append((module, "train_dataloader"))
            for name in attributes_of_samples(module, users_loader.dataset):
                attributes.append((module, name))
        return attributes

    def _count_batches(self) -> int:
        return len(self._train_loader(self.members, None))

    def to_device(self, trainer: L.Trainer) -> Division | None:
        """Return the samples, on the trainer's accelerator if ``Loader.on_device`` is set and there is memory for them.

        Return None before ``setup``.
        """
        division = self._division
        device = trainer.strategy.root_device
        if division is None or device.type == "cpu" or not self.loader.on_device:
            return division
        if self.changes_transfer(trainer):
            return division

        source = division.source
        device_module = torch.get_device_module(device)
        knows_free_memory = hasattr(device_module, "mem_get_info")
        if not source.tensors or not knows_free_memory:
            return division
        free_bytes, _ = device_module.mem_get_info(device)
        num_bytes = sum(tensor.nbytes for tensor in source.tensors)
        if num_bytes > free_bytes / 4:  # leave memory for models and activations
            return division
        return replace(division, source=source.to_device(device))

    def changes_transfer(self, trainer: L.Trainer) -> bool:
        """Return whether a hook of the user's changes batches before or while they are moved to a device."""
        users_data_module = self if self._module is None else self._module
        for hook in _BATCH_HOOKS:
            if is_overridden(hook, trainer.lightning_module):
                return True
            if is_overridden(hook, users_data_module):
                return True
        return False

    def warn_of_growth(self) -> None:
        """Warn once if the training data have grown since they were divided among the clients."""
        num_divided = len(self.division.classes.labels)
        num_samples = current_length(self.division.source.train)
        if num_samples > num_divided and not self._has_grown:
            self._has_grown = True
            rank_zero_warn(
                f"flsv: {self._source_name} has grown from {num_divided} to {num_samples} samples since these were "
                "divided among the clients. The new samples belong to no client and are not used."
            )

    def describe(self) -> dict[str, str | int | float]:
        """Return the data's settings and the sizes found by ``setup``, for loggers."""
        settings = self._describe_arguments()
        if self._division is None:
            return settings
        source = self.division.source
        if source.val is not None or source.val_loaders is not None:
            del settings["splits.server_val"]  # the server has data of its own
        if source.dictionary is not None:
            settings["dictionary"] = source.dictionary.hash
        if source.draws is not None:
            settings["sampler"] = source.draws.describe()
        for attribute in ("client_names", "class_names"):
            names = getattr(self, attribute)
            numbers = tuple(map(str, range(len(names))))
            if names != numbers:
                settings[attribute] = listed(names, _MAX_LISTED_NAMES)
        return settings | {
            "batch_size": source.train_options["batch_size"],
            "num_clients": self.num_clients,
            "num_classes": self.num_classes,
            "train_samples": int(self.num_samples.sum()),
            "server_val_samples": len(self.server_val_indices),
        }

    def _describe_arguments(self) -> dict[str, str | int | float]:
        splits = self.splits
        settings: dict[str, str | int | float] = {
            "source": self._source_name,
            "partitioner": repr(self.partitioner),
        }
        for name in HELD_OUT:
            choice = getattr(splits, name)
            settings[f"splits.{name}"] = str(choice) if isinstance(choice, HeldOut) else choice
        if splits.together is not None:
            settings["splits.together"] = splits.together
        settings["splits.seed"] = self.seed
        if self.corruptions:
            settings["corruptions"] = ", ".join(map(repr, self.corruptions))
        if splits.drop_flagged is not None:
            settings["splits.drop_flagged"] = repr(splits.drop_flagged)
            settings["dropped_samples"] = self._num_dropped
        if self._reading.label is not None:
            settings["labels"] = self._reading.label
        return settings

    @property
    def seed(self) -> int:
        """Seed of all splits except the partition, whose seed is the partitioner's."""
        return seed_or_default(self.splits.seed)

    # Attributes that tuners and loggers use

    @property
    def batch_size(self) -> int | None:
        """Samples per training batch: the argument, else the number found by ``setup`` or in a wrapped data module."""
        size_found_by_setup = None
        if self._division is not None:
            size_found_by_setup = self.division.source.train_options["batch_size"]
        return self._batch_size or size_found_by_setup or getattr(self._module, "batch_size", None)

    @batch_size.setter
    def batch_size(self, size: int | None) -> None:
        if self._division is not None and size is not None:
            train_options = {**self.division.source.train_options, "batch_size": size}
            source = replace(self.division.source, train_options=train_options)
            self._division = replace(self.division, source=source)
        self._batch_size = size


name_places(FederatedDataModule, splits=Splits, files=Files, loader=Loader)
_ARGUMENTS = frozenset(inspect.signature(FederatedDataModule).parameters)
