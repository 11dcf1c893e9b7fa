"""Data of a source, partitioned among clients, as the data module stores them after ``setup``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from flsv.data.contents import check_inputs
from flsv.data.corruption import Corruption
from flsv.data.groups import client_called, column, named_groups
from flsv.data.labels import Classes, check_positive, dataset_labels, find_classes
from flsv.data.loaders import Loader, TensorBatches, WeightedDraws, make_loader, preload, tensors_of
from flsv.data.partition import Partitioner, partition_counts
from flsv.data.sources.agreed import TableSummary
from flsv.data.sources.base import SourceData, concatenated
from flsv.data.sources.columns import ColumnCard
from flsv.data.splits import FederatedSplits, SampleFilter, Splits, split_federation
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.seeding import generator_for

if TYPE_CHECKING:
    from flsv.data.datamodule import FederatedDataModule


@dataclass(frozen=True)
class FederatedData:
    """Partitioned data: data sets, indices of each client's samples, and loader options."""

    train: Dataset
    val: Iterable[Any] | None
    test: Dataset | None
    splits: FederatedSplits
    classes: Classes
    train_options: dict[str, Any]
    eval_options: dict[str, Any]
    differs: Tensor
    columns: tuple[ColumnCard, ...] = ()
    by_rarity: bool = False
    draws: WeightedDraws | None = None
    summary: Callable[[Tensor], TableSummary] | None = None

    @cached_property
    def class_counts(self) -> Tensor:
        """Number of each client's training samples per class, int64 ``[num_clients, num_classes]``.

        The labels are those after corruptions.
        """
        held = [client["train"] for client in self.splits.clients]
        return partition_counts(held, self.classes.labels, len(self.classes.names))

    @cached_property
    def client_names(self) -> tuple[str, ...]:
        """Names of the clients, or their numbers as texts if the data have no names."""
        return self.splits.names or tuple(map(str, range(len(self.splits.clients))))

    @cached_property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, from reading one sample. Empty if a batch has no tensor."""
        first, collate_fn = self.splits.clients[0]["train"][:1], self.eval_options.get("collate_fn")
        batch: Any = next(iter(make_loader(self.train, first, batch_size=1, collate_fn=collate_fn)))
        batch = list(batch.values()) if isinstance(batch, Mapping) else batch
        parts = batch if isinstance(batch, list | tuple) else [batch]
        shapes = [tuple(part.shape[1:]) for part in parts if isinstance(part, Tensor)]
        return shapes[0] if shapes else ()

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors from which training batches are gathered, ``[N, ...]`` each.

        The tuple is empty if samples are read one by one.
        """
        return tensors_of(self.train, None, self.train_options.get("collate_fn"))[0] or ()

    def to_device(self, device: torch.device) -> FederatedData:
        """Return a copy whose training and validation tensors lie on ``device``."""
        _, rows = tensors_of(self.train, None)
        data = TensorDataset(*(tensor.to(device) for tensor in self.tensors()))
        val = self.val
        if isinstance(val, TensorBatches):
            here = val.tensors is self.tensors()
            val = copy(val)
            val.tensors = (
                data.tensors if here else tuple(tensor.to(device) for tensor in val.tensors)
            )
        return replace(self, train=data if rows is None else Subset(data, rows.tolist()), val=val)

    def eval_loader(
        self, dataset: Dataset, indices: Tensor | None = None
    ) -> TensorBatches | DataLoader:
        """Return a loader of evaluation batches in order, of the samples ``indices`` (None: all)."""
        return make_loader(dataset, indices, **self.eval_options)


def partition_data(
    source: SourceData,
    partitioner: Partitioner,
    options: Splits,
    loader: Loader,
    *,
    groups: Any = None,
    labels: Any = None,
    pos_label: Any = None,
    corruptions: Sequence[Corruption] = (),
    batch_size: int | None = None,
) -> FederatedData:
    """Partition a source's samples among server and clients, and find classes and loader options."""
    dealing: list[Any] = [partitioner, *corruptions]
    asking = [part for part in dealing if part.needs_classes] + (
        [options.detector] if options.detector else []
    )
    held_out = {"validation": source.val, "test": source.test}
    classes = find_classes(
        source.train, source.class_names, held_out, None if source.labeled else labels, asking
    )
    if pos_label is not None:
        check_positive(classes.names, pos_label)
    splits = _split(source, classes, partitioner, options, groups)
    if source.fitted is not None:
        fitted = source.fitted([client["train"] for client in splits.clients])
        source = replace(
            source, train=fitted.train, val=fitted.val, test=fitted.test, columns=fitted.columns
        )
    unknown = torch.tensor(
        [label for each in corruptions for label in each.unknown_classes], dtype=torch.long
    )
    splits = _without_unknown(splits, classes.labels, unknown, corruptions)
    source, train_options, eval_options = _as_read(source, loader, batch_size)
    check_inputs(source.train, splits, {"validation": source.val, "test": source.test})
    check_full_batches(splits, train_options, source.draws)
    source = replace(source, val=_known(source.val, unknown), test=_known(source.test, unknown))
    train, noisy, differs = _corrupted(
        source.train, classes, splits, corruptions, train_options.get("collate_fn")
    )
    val: Any = source.val_loaders
    if source.val is not None or len(splits.server_val):
        own = (train, splits.server_val) if source.val is None else (source.val,)
        val = make_loader(*own, **eval_options)
    classes, also = replace(classes, labels=noisy), (source.columns, source.by_rarity, source.draws)
    return FederatedData(
        train, val, source.test, splits, classes, train_options, eval_options, differs, *also
    )


def _as_read(
    source: SourceData, loader: Loader, batch_size: int | None
) -> tuple[SourceData, dict[str, Any], dict[str, Any]]:
    """Return the source, read into memory if ``loader.preload``, and options of the training and evaluation loaders."""
    train_options = {"batch_size": 32, "drop_last": False} | source.train_options | loader.changes()
    eval_options = source.eval_options | loader.changes() | {"drop_last": False}
    if loader.preload:
        workers = train_options.get("num_workers", 0)
        train = preload(source.train, train_options.pop("collate_fn", None), workers)
        collate_fn = eval_options.pop("collate_fn", None)
        held = [
            None if part is None else preload(part, collate_fn, workers)
            for part in (source.val, source.test)
        ]
        source = replace(source, train=train, val=held[0], test=held[1])
    train_options["batch_size"] = batch_size or train_options["batch_size"]
    tensors, _ = tensors_of(source.train, None, train_options.get("collate_fn"))
    usual = max(train_options["batch_size"], 1 if tensors is None else 256)
    eval_options["batch_size"] = loader.eval_batch_size or eval_options.get("batch_size", usual)
    return source, train_options, eval_options


def _split(
    source: SourceData, classes: Classes, partitioner: Partitioner, options: Splits, groups: Any
) -> FederatedSplits:
    """Return the indices of the server's and each client's samples, after checking the arguments."""
    if source.clients and not partitioner.keeps_groups:
        names_of_clients = listed(source.group_names, show=repr)
        raise ConfigurationError(
            f"The data are given by client ({names_of_clients}), so no partitioner is needed: leave {partitioner!r} "
            "out (null)."
        )
    group_numbers = source.groups
    group_names = source.group_names
    if group_numbers is None:
        group_numbers, group_names = named_groups(source.train, groups)

    has_val = source.val is not None or source.val_loaders is not None
    if has_val:
        options = replace(options, server_val=0.0)
    pool = source.indices
    if pool is None:
        pool = torch.arange(len(classes.labels))

    def read_column(name: str) -> Any:
        if name in source.split_columns:
            return source.split_columns[name]
        return column(source.train, name, "splits")

    splits = split_federation(
        classes.labels,
        len(classes.names),
        group_numbers,
        pool,
        partitioner,
        options,
        group_names,
        source.clients,
        column=read_column,
    )
    if (source.fitted is not None or source.pooled) and len(splits.clients) == 1:
        raise ConfigurationError(
            "A table of one site alone cannot be encoded, because means and categories are those of all sites: give "
            "encoded numbers, arrays (X, y)."
        )
    if source.by_rarity and len(splits.clients) == 1:
        raise ConfigurationError(
            f"The positive class is the rarer one of {listed(source.class_names, show=repr)}, and one site alone "
            "cannot know which one is rarer in the federation. Set pos_label, to the same class at every site."
        )
    return splits


def data_without_encoder(
    source: SourceData,
    partitioner: Partitioner,
    options: Splits,
) -> FederatedData:
    """Split the rows of one site's table, which have no features before the sites agree on an encoder."""
    classes = find_classes(source.train, source.class_names, {})
    splits = _split(source, classes, partitioner, options, groups=None)
    no_changes = torch.zeros(len(classes.labels), dtype=torch.bool)
    return FederatedData(
        source.train,
        val=None,
        test=None,
        splits=splits,
        classes=classes,
        train_options={},
        eval_options={},
        differs=no_changes,
        summary=source.summary,
    )


def with_client(
    data: FederatedData, source: SourceData, name: str, loader: Loader, labels: Any
) -> FederatedData:
    """Add a last client, with the last samples of ``source`` for training.

    The other clients' samples do not change. Means and categories of a table stay those of the other clients.

    Args:
        data: the other clients' partitioned data.
        source: the source, in which the new client's samples follow all others.
        name: name of the new client.
        loader: options of the loaders.
        labels: the user's argument ``labels``, see :func:`partition_data`.

    Raises:
        ConfigurationError: there is a client of this name, or the others' classes or samples would change.
    """
    count, known = len(data.classes.labels), data.classes.names
    if source.fitted is not None:
        source = source.fitted([client["train"] for client in data.splits.clients])
    found = find_classes(source.train, source.class_names, {}, None if source.labeled else labels)
    if name in data.client_names:
        raise ConfigurationError(
            f"there is a client {name!r} already: give the one that joins another name."
        )
    if (source.class_names and source.class_names != known) or int(found.labels.max()) >= len(
        known
    ):
        raise ConfigurationError(
            f"{name!r} cannot join, since the classes would be {listed(found.names, show=repr)} in place of "
            f"{listed(known, show=repr)}. Give it no other classes, and the federation its pos_label."
        )
    whole: Any = source.train
    new: Dataset = Subset(whole, range(count, len(whole)))
    if loader.preload:
        new = preload(new, data.train_options.get("collate_fn"), loader.num_workers or 0)
    same = (~data.differs).nonzero().flatten()
    (before, first), (after, then) = (
        tensors_of(Subset(each, same.tolist()), None) for each in (data.train, whole)
    )
    if before and after and not all(torch.equal(x[first], y[then]) for x, y in zip(before, after)):
        raise ConfigurationError(
            f"{name!r} cannot join: with it the others' columns would be read otherwise."
        )
    rows = torch.arange(count, len(whole))
    splits = replace(
        data.splits,
        clients=(*data.splits.clients, {"train": rows, "val": rows[:0], "test": rows[:0]}),
        names=(*data.client_names, name),
    )
    check_full_batches(splits, data.train_options)
    return replace(
        data,
        train=concatenated({"the others": data.train, name: new}),
        splits=splits,
        classes=replace(
            data.classes, labels=torch.cat([data.classes.labels, found.labels[count:]])
        ),
        differs=torch.cat([data.differs, torch.zeros(len(rows), dtype=torch.bool)]),
    )


def check_full_batches(
    splits: FederatedSplits, options: dict[str, Any], draws: WeightedDraws | None = None
) -> None:
    """Raise ConfigurationError if ``drop_last`` or weights of 0 would leave a client without a training batch."""
    size = options["batch_size"]
    samples = [len(held["train"]) for held in splits.clients]
    if draws is not None:
        own = [draws.among(held["train"]) for held in splits.clients]
        samples = [each.count for each in own]
        for client, each in enumerate(own):
            # Without replacement, torch.multinomial would draw samples of weight 0 as well.
            if int((each.weights > 0).sum()) < (1 if each.replacement else each.count):
                called = client_called(client, splits.names, "Client")
                raise ConfigurationError(
                    f"{called} has too few samples with a weight above 0 for the WeightedRandomSampler of the training "
                    f"loader, which draws {each.count} of them. Give more samples a weight, or replacement=True."
                )
    if options["drop_last"] and min(samples) < size:
        called = client_called(samples.index(min(samples)), splits.names, "Client")
        raise ConfigurationError(
            f"{called} has {min(samples)} samples, not one full batch of {size}. Lower batch_size to {min(samples)}, "
            "or set drop_last to false."
        )


def _corrupted(
    dataset: Dataset,
    classes: Classes,
    splits: FederatedSplits,
    corruptions: Sequence[Corruption],
    collate_fn: Any,
) -> tuple[Dataset, Tensor, Tensor]:
    """Apply the corruptions.

    Return the data set, each sample's class int64 ``[N]``, and a mask of the changed samples.
    """
    labels, differs = classes.labels, torch.zeros(len(classes.labels), dtype=torch.bool)
    if not corruptions:
        return dataset, labels, differs
    first, *fields = _columns(dataset, classes, collate_fn)
    inputs, labels = first, labels.clone()
    concerned = [corruption.chosen(len(splits.clients)) for corruption in corruptions]
    for client in sorted(set().union(*concerned)):
        samples = splits.clients[client]["train"]
        before, true = first[samples.to(first.device)].cpu(), classes.labels[samples]
        x, y = before.clone(), true.clone()
        for place, each in enumerate(corruptions):
            if client in concerned[place]:
                # The position gives two corruptions with the same seed different random numbers.
                x, y = each(
                    x, y, len(classes.names), generator_for(each.seed, "corruption", place, client)
                )
        same = (x == before) | (x.isnan() & before.isnan())
        other = ~same.reshape(len(x), -1).all(1)
        labels[samples], differs[samples] = y, other | (y != true)
        if other.any():
            inputs = first.clone() if inputs is first else inputs
            inputs[samples[other].to(inputs.device)] = x[other].to(inputs.device)
    if not classes.missing:
        fields[-1] = labels.view(fields[-1].shape).to(fields[-1])
    return TensorDataset(inputs, *fields), labels, differs


def _columns(dataset: Dataset, classes: Classes, collate_fn: Any) -> list[Tensor]:
    """Return a data set's samples as tensors ``[N, ...]``: inputs first, labels last if there are any."""
    tensors, rows = tensors_of(dataset, None, collate_fn)
    if tensors is None:
        raise ConfigurationError(
            f"corruptions need tensors, and {type(dataset).__name__} has none: set preload: true."
        )
    first, *fields = (
        tensors if rows is None else [tensor[rows.to(tensor.device)] for tensor in tensors]
    )
    last = fields[-1].flatten().cpu() if fields else classes.labels[:0]
    if not classes.missing and not torch.equal(last.long(), classes.labels):
        raise ConfigurationError(
            "corruptions need samples (x, ..., label): their last element is not their label."
        )
    return [first, *fields]


def _without_unknown(
    splits: FederatedSplits, labels: Tensor, unknown: Tensor, corruptions: Sequence[Corruption]
) -> FederatedSplits:
    """Remove the samples of unknown classes from the splits, except from corrupted clients' training sets."""
    if not len(unknown):
        return splits
    concerned = {
        i for each in corruptions if each.unknown_classes for i in each.chosen(len(splits.clients))
    }
    known = ~torch.isin(labels, unknown)
    clients = []
    for client, sets in enumerate(splits.clients):
        kept = {name: samples[known[samples]] for name, samples in sets.items()}
        clients.append({**kept, "train": sets["train"]} if client in concerned else kept)
    left = replace(
        splits, server_val=splits.server_val[known[splits.server_val]], clients=tuple(clients)
    )
    empty = [
        client_called(client, splits.names)
        for client, sets in enumerate(clients)
        if not len(sets["train"])
    ]
    if empty or len(splits.server_val) > len(left.server_val) == 0:
        whose = listed(empty) or "the server"
        raise ConfigurationError(
            f"Without unknown_classes {unknown.tolist()} {whose} has no samples: choose other classes."
        )
    return left


def _known(dataset: Dataset | None, unknown: Tensor) -> Dataset | None:
    """Return a validation or test set without the samples of the classes ``unknown``, int64 ``[n]``."""
    if dataset is None or not len(unknown):
        return dataset
    return Subset(
        dataset, (~torch.isin(dataset_labels(dataset), unknown)).nonzero().flatten().tolist()
    )


def without_flagged(
    module: FederatedDataModule, dealt: FederatedData, detector: SampleFilter
) -> FederatedData:
    """Return ``dealt``, the data of ``module``, without the training samples that ``detector`` flags as harmful."""
    generator = generator_for(module.seed, "flagged samples")
    splits = []
    for client, is_unflagged in enumerate(detector.unflagged(module, generator)):
        parts = dealt.splits.clients[client]
        remaining_samples = parts["train"][is_unflagged]
        if len(remaining_samples) == 0:
            raise ConfigurationError(
                f"drop_flagged: all training samples of {client_called(client, dealt.splits.names)} are flagged. "
                "Leave it out."
            )
        splits.append({**parts, "train": remaining_samples})

    remaining = replace(dealt.splits, clients=tuple(splits))
    check_full_batches(remaining, dealt.train_options, dealt.draws)
    return replace(dealt, splits=remaining)
