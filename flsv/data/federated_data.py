"""A source's data, dealt out to clients: what the data module knows after ``setup``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flsv.data.contents import check_inputs
from flsv.data.corrupted_data import CorruptedData, corrupt_clients, known_samples, leave_out_unknown, unknown_classes
from flsv.data.corruption import Corruption
from flsv.data.groups import client_called, named_groups
from flsv.data.held_generators import can_be_seeded, held_generators
from flsv.data.labels import Classes, find_classes
from flsv.data.loaders import Loader, TensorBatches, make_loader, preload
from flsv.data.partition.base import Partitioner, partition_counts
from flsv.data.sources.base import ColumnCard, SourceData
from flsv.data.splits import FederatedSplits, Splits, split_federation
from flsv.errors import ConfigurationError, listed
from flsv.participants import LocalData
from flsv.seeding import generator_for
from flsv.valuation import FedBary, participants_of, sample_values
from flsv.valuation.sets import Dealt


@dataclass(frozen=True)
class FederatedData:
    """Data sets, the samples of each client, and how batches are made.

    Args:
        train: the training data that all indices of ``splits`` refer to.
        val: the server's validation loader or loaders, None without validation.
        test: test data, or None.
        splits: the server's and the clients' samples.
        class_names: one name per class.
        class_counts: training samples as the clients label them, int64 ``[num_clients, num_classes]``.
        train_options: arguments of :func:`~flsv.data.make_loader` for training batches.
        eval_options: the same for evaluation batches.
        corrupted: what the clients train on instead of ``train``, if any of them is corrupted.
        labels: of the training data as the clients have them, int64 ``[N]``; all 0 without classes.
        val_data: what ``val`` reads, and which of its samples, where it is not the source's own loader.
        no_classes: why the samples have no classes; None where they have some.
        columns: what became of the columns, of a table.
    """

    train: Dataset
    val: Iterable[Any] | None
    test: Dataset | None
    splits: FederatedSplits
    class_names: tuple[str, ...]
    class_counts: Tensor
    train_options: dict[str, Any]
    eval_options: dict[str, Any]
    corrupted: CorruptedData | None = None
    labels: Tensor | None = None
    no_classes: str | None = None
    val_data: tuple[Dataset, Tensor | None] | None = None
    columns: tuple[ColumnCard, ...] = ()

    @cached_property
    def client_names(self) -> tuple[str, ...]:
        """One per client; its number where it has no other."""
        return self.splits.names or tuple(map(str, range(len(self.splits.clients))))

    @cached_property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, found by reading one sample."""
        one = make_loader(self.train, self.splits.clients[0]["train"][:1], **how_batches_are_made(self.eval_options))
        batch: Any = next(iter(one))
        fields = [batch]
        if isinstance(batch, Mapping | list | tuple):
            fields = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
        first = next((item for item in fields if isinstance(item, Tensor)), None)
        if first is None:
            raise ConfigurationError(
                f"The shape of an input cannot be told from a batch that is {type(batch).__name__} without a tensor."
            )
        return tuple(first.shape[1:])

    def train_loader(
        self, indices: Tensor, generator: torch.Generator | None, transform: Callable[[Tensor], Tensor] | None
    ) -> TensorBatches | DataLoader:
        """Batches of some of the training data, as the clients have them; shuffled by the generator, if any."""
        if self.corrupted is not None and self.corrupted.differs[indices].any():
            size, drop_last = self.train_options["batch_size"], self.train_options["drop_last"]
            return self.corrupted.loader(
                indices, batch_size=size, drop_last=drop_last, generator=generator, transform=transform
            )
        return make_loader(
            self.train,
            indices,
            shuffle=generator is not None,
            generator=generator,
            transform=transform,
            **self.train_options,
        )

    def held_loader(self, indices: Tensor) -> TensorBatches | DataLoader:
        """Batches of training samples in order, as the clients have them."""
        if self.corrupted is not None and self.corrupted.differs[indices].any():
            return self.corrupted.loader(indices, batch_size=self.eval_options["batch_size"], drop_last=False)
        return self.eval_loader(self.train, indices)

    def in_batches_of(self, size: int) -> FederatedData:
        """The same with other training batches."""
        options = {**self.train_options, "batch_size": size}
        check_full_batches(self.splits, options)
        return replace(self, train_options=options)

    def evaluated_in_batches_of(self, size: int) -> FederatedData:
        """The same with other evaluation batches.

        Raises:
            ConfigurationError: a wrapped data module's own loaders make the validation batches.
        """
        options = {**self.eval_options, "batch_size": size}
        if self.val is not None and self.val_data is None:
            raise ConfigurationError(
                f"eval_batch_size={size}: the validation batches are made by the wrapped data module's own loaders. "
                f"Set the batch size there."
            )
        val = self.val if self.val_data is None else make_loader(*self.val_data, **options)
        return replace(self, val=val, eval_options=options)

    def eval_loader(self, dataset: Dataset, indices: Tensor | None = None) -> TensorBatches | DataLoader:
        """Batches in order."""
        return make_loader(dataset, indices, **self.eval_options)


def deal(
    source: SourceData,
    partitioner: Partitioner,
    options: Splits,
    loader: Loader | None = None,
    *,
    groups: Any = None,
    labels: Any = None,
    corruptions: Sequence[Corruption] = (),
    batch_size: int | None = None,
) -> FederatedData:
    """Find the classes, deal the samples out and settle how they are read.

    Args:
        source: the data.
        partitioner: who gets what.
        options: what is set aside.
        loader: how batches are read, where the source does not say it or other than it says.
        groups: see :func:`~flsv.data.groups.named_groups`; where the source has groups of its own, these count.
        labels: see :class:`~flsv.data.FederatedDataModule`.
        corruptions: what is wrong with some clients' training data.
        batch_size: samples per training batch; None for the source's, else 32.

    Raises:
        ConfigurationError: data that are empty, too few for what is asked, without classes where somebody needs them,
            or not corruptible; validation or test samples that are not finite.
    """
    loader = loader or Loader()
    if len(source.train) == 0:  # type: ignore[arg-type]
        raise ConfigurationError(f"The training data ({type(source.train).__name__}) are empty.")
    dealing: list[Any] = [partitioner, *corruptions]
    asking = [part for part in dealing if part.needs_classes] + ([options.detector] if options.detector else [])
    held_out = {"validation": source.val, "test": source.test}
    labels = None if source.labelled else labels
    classes = find_classes(source.train, source.class_names, held_out, labels, asking)
    splits = _split(source, classes, partitioner, options, groups)
    if source.fitted is not None:
        fitted = source.fitted(splits)
        source = replace(source, train=fitted.train, val=fitted.val, test=fitted.test, columns=fitted.columns)
    splits = leave_out_unknown(splits, classes.labels, corruptions)

    train_options = {"batch_size": 32, "drop_last": False} | source.train_options | loader.said()
    eval_options = source.eval_options | loader.said() | {"drop_last": False}
    _check_own_loaders(loader, corruptions, train_options, eval_options)
    train, val, test = source.train, source.val, source.test
    if loader.preload:
        train, val, test = _preloaded((train, val, test), train_options, eval_options)
    check_inputs(train, splits, {"validation": val, "test": test})
    unknown = unknown_classes(corruptions)
    val, test = (part if part is None else known_samples(part, unknown) for part in (val, test))
    _set_batch_sizes(train, train_options, eval_options, batch_size, loader.eval_batch_size)
    check_full_batches(splits, train_options)
    _try_own_loaders(train, splits, train_options, eval_options)
    _warn_of_unseeded(train, val, train_options, eval_options, source.val_loaders)

    own = (train, splits.server_val) if len(splits.server_val) else None
    val_data: tuple[Dataset, Tensor | None] | None = own if val is None else (val, None)
    val_loader: Any = source.val_loaders if val_data is None else make_loader(*val_data, **eval_options)
    if val is not None and len(val_loader) == 0:
        raise ConfigurationError("The source's validation set is empty. Give it samples, or leave it out altogether.")
    corrupted = None
    labels, num_classes = classes.labels, len(classes.names)
    if corruptions:
        collate_fn = train_options.get("collate_fn")
        known = None if classes.missing else labels
        corrupted = corrupt_clients(train, known, num_classes, splits, corruptions, collate_fn)
        labels = corrupted.labels
    parts = [client["train"] for client in splits.clients]
    counts = partition_counts(parts, labels, num_classes)
    return FederatedData(
        train,
        val_loader,
        test,
        splits,
        classes.names,
        counts,
        train_options,
        eval_options,
        corrupted,
        labels,
        classes.missing,
        val_data,
        source.columns,
    )


def _split(
    source: SourceData, classes: Classes, partitioner: Partitioner, options: Splits, groups: Any
) -> FederatedSplits:
    """Who holds which sample."""
    if source.clients and not partitioner.keeps_groups:
        raise ConfigurationError(
            f"The data are given by client ({listed(source.group_names, show=repr)}), and {partitioner!r} would deal "
            "them anew. Leave the partitioner out (null), or take a GroupPartitioner."
        )
    named: tuple[Tensor | None, Sequence[str]] = source.groups, source.group_names
    if source.groups is None:
        named = named_groups(source.train, groups) or (None, ())
    has_val = source.val is not None or source.val_loaders is not None
    splits = split_federation(
        classes.labels,
        len(classes.names),
        named[0],
        torch.arange(len(classes.labels)) if source.indices is None else source.indices,
        partitioner,
        replace(options, server_val=0.0) if has_val else options,
        named[1],
        source.clients,
    )
    if (source.fitted is not None or source.pooled) and len(splits.clients) == 1:
        raise ConfigurationError(
            "A table of one site alone cannot be encoded: means, deviations and categories are agreed upon with "
            "all sites. Give numbers that are encoded already: arrays (X, y), or a data set."
        )
    return splits


def _check_own_loaders(
    loader: Loader, corruptions: Sequence[Corruption], train_options: dict[str, Any], eval_options: dict[str, Any]
) -> None:
    """Raise ConfigurationError where samples would be changed past a loader of somebody's own class."""
    if (loader.preload or corruptions) and ("make" in train_options or "make" in eval_options):
        raise ConfigurationError(
            f"{'preload=True reads' if loader.preload else 'corruptions change'} the data set's samples, past the "
            "class of the data module's loader, which makes its batches in its own way. Leave it out, or move what "
            "that class does into collate_fn or the data set."
        )


def _preloaded(
    parts: tuple[Dataset, Dataset | None, Dataset | None], train_options: dict[str, Any], eval_options: dict[str, Any]
) -> tuple[Dataset, Dataset | None, Dataset | None]:
    """Training, validation and test data as tensors; what collates their samples has done its work then."""
    workers, train_collate_fn = train_options.get("num_workers", 0), train_options.pop("collate_fn", None)
    collate_fn = eval_options.pop("collate_fn", None)
    val, test = (part if part is None else preload(part, collate_fn, workers) for part in parts[1:])
    return preload(parts[0], train_collate_fn, workers), val, test


def _set_batch_sizes(
    train: Dataset,
    train_options: dict[str, Any],
    eval_options: dict[str, Any],
    batch_size: int | None,
    eval_batch_size: int | None,
) -> None:
    if batch_size is not None:
        train_options["batch_size"] = batch_size
    in_tensors = isinstance(make_loader(train, **how_batches_are_made(train_options)), TensorBatches)
    usual = max(train_options["batch_size"], 256 if in_tensors else 1)
    eval_options["batch_size"] = eval_batch_size or eval_options.get("batch_size", usual)


def how_batches_are_made(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of :func:`~flsv.data.make_loader` that define a batch."""
    return {name: options[name] for name in ("batch_size", "collate_fn", "make") if name in options}


def _try_own_loaders(
    train: Dataset, splits: FederatedSplits, train_options: dict[str, Any], eval_options: dict[str, Any]
) -> None:
    """Raise ConfigurationError where a loader of somebody's own class cannot read what a client has."""
    held_out = [splits.server_val, *(client[split] for client in splits.clients for split in ("val", "test"))]
    for options, parts in ((train_options, [splits.clients[0]["train"]]), (eval_options, held_out)):
        part = next((part for part in parts if len(part)), None)
        if "make" in options and part is not None:
            options["make"].attempt(make_loader(train, part, **options))


def _warn_of_unseeded(
    train: Dataset, val: Any, train_options: dict[str, Any], eval_options: dict[str, Any], val_loaders: Any
) -> None:
    """Say which random generators nobody can put anywhere."""
    unseeded: dict[str, Any] = {}
    for dataset, options in ((train, train_options), (val, eval_options)):
        held = held_generators(dataset, options.get("collate_fn"))
        unseeded |= {place: g for place, g in held.items() if "make" in options or not can_be_seeded(g)}
    unseeded |= held_generators(val_loaders)
    if unseeded:
        rank_zero_warn(
            f"{', '.join(unseeded)}: random generators that cannot be seeded for every client and round, because they "
            "have no seed, or because a loader of your own reads them. A resumed run will not be equal to the bit, and "
            "what a client draws depends on who was read before. Draw from torch's, NumPy's or Python's global "
            "generators, or hold a numpy.random.Generator in the data set and read it by torch's DataLoader."
        )


def check_full_batches(splits: FederatedSplits, options: dict[str, Any]) -> None:
    """Raise ConfigurationError where ``drop_last`` would leave a client without a training batch."""
    size = options["batch_size"]
    for client, held in enumerate(splits.clients):
        if options["drop_last"] and len(held["train"]) < size:
            raise ConfigurationError(
                f"{client_called(client, splits.names, 'Client')} has {len(held['train'])} training samples, not one "
                f"full batch of {size}: with drop_last=True it would never train. Lower batch_size, or set drop_last "
                "to false."
            )


def without_flagged(module: Dealt, dealt: FederatedData, detector: FedBary) -> FederatedData:
    """The data without the training samples that the clients flag; validation and test samples all stay.

    Args:
        module: holds ``dealt``.
        dealt: the data.
        detector: values the samples; its features must need no model.

    Raises:
        ConfigurationError: a client would be left without training samples.
    """
    clients, server = participants_of(module)
    detector.value(clients, server, generator_for(module.seed, "flagged samples"))
    splits, counts = [], []
    for client, parts in zip(clients, dealt.splits.clients):
        if not len(parts["train"]):
            splits.append(parts)
            counts.append(dealt.class_counts[client.id])
            continue
        keep, kept_counts = client.ask(_kept)
        if not keep.any():
            raise ConfigurationError(
                f"drop_flagged: all {len(keep)} training samples of {client_called(client.id, dealt.splits.names)} are "
                "flagged. Leave the client out, or set Splits(drop_flagged=False)."
            )
        splits.append({**parts, "train": parts["train"][keep]})
        counts.append(kept_counts)
    kept = replace(dealt.splits, clients=tuple(splits))
    check_full_batches(kept, dealt.train_options)
    return replace(dealt, splits=kept, class_counts=torch.stack(counts))


def _kept(local: LocalData) -> tuple[Tensor, Tensor]:
    """Which of its samples a client keeps, bool ``[m]``, and how many of each class these are."""
    keep = ~sample_values(local).flagged
    return keep, torch.bincount(local.samples()[1].cpu()[keep], minlength=local.num_classes)
