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
from flsv.data.corrupted_data import corrupt_clients, known_samples, leave_out_unknown, unknown_classes
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
        train: the training data that all indices of ``splits`` refer to, as the clients have them.
        val: the server's validation loader or loaders, None without validation.
        test: test data, or None.
        splits: the server's and the clients' samples.
        classes: of the training samples, as the clients label them.
        class_counts: training samples as the clients label them, int64 ``[num_clients, num_classes]``.
        train_options: arguments of :func:`~flsv.data.make_loader` for training batches.
        eval_options: the same for evaluation batches.
        differs: which samples the corruptions changed, bool ``[N]``.
        val_data: what ``val`` reads, and which of its samples, where it is not the source's own loader.
        columns: what became of the columns, of a table.
    """

    train: Dataset
    val: Iterable[Any] | None
    test: Dataset | None
    splits: FederatedSplits
    classes: Classes
    class_counts: Tensor
    train_options: dict[str, Any]
    eval_options: dict[str, Any]
    differs: Tensor
    val_data: tuple[Dataset, Tensor | None] | None = None
    columns: tuple[ColumnCard, ...] = ()

    @property
    def class_names(self) -> tuple[str, ...]:
        """One per class."""
        return self.classes.names

    @cached_property
    def client_names(self) -> tuple[str, ...]:
        """One per client; its number where it has no other."""
        return self.splits.names or tuple(map(str, range(len(self.splits.clients))))

    @cached_property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, found by reading one sample."""
        one = make_loader(self.train, self.splits.clients[0]["train"][:1], **how_batches_are_made(self.eval_options))
        batch: Any = next(iter(one))
        if isinstance(batch, Mapping):
            batch = list(batch.values())
        parts = batch if isinstance(batch, list | tuple) else [batch]
        first = next((part for part in parts if isinstance(part, Tensor)), None)
        if first is None:
            raise ConfigurationError(
                f"The shape of an input cannot be told from a batch that is {type(batch).__name__} without a tensor."
            )
        return tuple(first.shape[1:])

    def train_loader(
        self, indices: Tensor, generator: torch.Generator | None, transform: Callable[[Tensor], Tensor] | None
    ) -> TensorBatches | DataLoader:
        """Batches of some of the training data; shuffled by the generator, if any."""
        return make_loader(
            self.train,
            indices,
            shuffle=generator is not None,
            generator=generator,
            transform=transform,
            **self.train_options,
        )

    def in_batches_of(self, size: int) -> FederatedData:
        """The same with other training batches."""
        options = {**self.train_options, "batch_size": size}
        check_full_batches(self.splits, options)
        return replace(self, train_options=options)

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
    labels = None if source.labeled else labels
    classes = find_classes(source.train, source.class_names, held_out, labels, asking)
    splits = _split(source, classes, partitioner, options, groups)
    if source.fitted is not None:
        fitted = source.fitted(splits)
        source = replace(source, train=fitted.train, val=fitted.val, test=fitted.test, columns=fitted.columns)
    splits = leave_out_unknown(splits, classes.labels, corruptions)
    source, train_options, eval_options = _as_read(source, loader, batch_size)
    check_inputs(source.train, splits, {"validation": source.val, "test": source.test})
    check_full_batches(splits, train_options)
    _warn_of_unseeded(source, train_options, eval_options)
    train, val, test = source.train, source.val, source.test
    if unknown := unknown_classes(corruptions):
        val, test = (None if part is None else known_samples(part, unknown) for part in (val, test))
    differs = torch.zeros(len(classes.labels), dtype=torch.bool)
    if corruptions:
        train, noisy, differs = corrupt_clients(train, classes, splits, corruptions, train_options.get("collate_fn"))
        classes = replace(classes, labels=noisy)
    val_data: tuple[Dataset, Tensor | None] | None = None
    if val is not None:
        val_data = val, None
    elif len(splits.server_val):
        val_data = train, splits.server_val
    val_loader: Any = source.val_loaders if val_data is None else make_loader(*val_data, **eval_options)
    if val is not None and len(val_loader) == 0:
        raise ConfigurationError("The source's validation set is empty. Give it samples, or leave it out altogether.")
    return FederatedData(
        train,
        val_loader,
        test,
        splits,
        classes,
        partition_counts([client["train"] for client in splits.clients], classes.labels, len(classes.names)),
        train_options,
        eval_options,
        differs,
        val_data,
        source.columns,
    )


def _as_read(
    source: SourceData, loader: Loader, batch_size: int | None
) -> tuple[SourceData, dict[str, Any], dict[str, Any]]:
    """The source, in memory where that is asked for, and how training and evaluation batches are made of it."""
    train_options = {"batch_size": 32, "drop_last": False} | source.train_options | loader.said()
    eval_options = source.eval_options | loader.said() | {"drop_last": False}
    if loader.preload:
        workers = train_options.get("num_workers", 0)
        train = preload(source.train, train_options.pop("collate_fn", None), workers)
        collate_fn = eval_options.pop("collate_fn", None)
        held = [None if part is None else preload(part, collate_fn, workers) for part in (source.val, source.test)]
        source = replace(source, train=train, val=held[0], test=held[1])
    train_options["batch_size"] = batch_size or train_options["batch_size"]
    in_tensors = isinstance(make_loader(source.train, **how_batches_are_made(train_options)), TensorBatches)
    usual = max(train_options["batch_size"], 256 if in_tensors else 1)
    eval_options["batch_size"] = loader.eval_batch_size or eval_options.get("batch_size", usual)
    return source, train_options, eval_options


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


def how_batches_are_made(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of :func:`~flsv.data.make_loader` that define a batch."""
    return {name: options[name] for name in ("batch_size", "collate_fn") if name in options}


def _warn_of_unseeded(source: SourceData, train_options: dict[str, Any], eval_options: dict[str, Any]) -> None:
    """Say which random generators nobody can put anywhere."""
    unseeded = held_generators(source.val_loaders)
    for dataset, options in ((source.train, train_options), (source.val, eval_options)):
        held = held_generators(dataset, options.get("collate_fn"))
        unseeded |= {place: generator for place, generator in held.items() if not can_be_seeded(generator)}
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
    least = min(len(held["train"]) for held in splits.clients)
    for client, held in enumerate(splits.clients):
        if options["drop_last"] and len(held["train"]) < size:
            raise ConfigurationError(
                f"{client_called(client, splits.names, 'Client')} has {len(held['train'])} training samples, not one "
                f"full batch of {size}: with drop_last=True it would never train. Lower batch_size to {least}, or "
                "set drop_last to false."
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
