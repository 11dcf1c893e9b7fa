"""Division of a source's samples among the server and the clients: classes, splits, loaders' options, corruptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from flsv.data.groups import client_called, column, named_groups
from flsv.data.labels import Classes, check_positive, dataset_labels, find_classes
from flsv.data.loaders import Loader, WeightedDraws, has_default_collate, preload, tensors_of
from flsv.data.partition import OneClient, Partitioner, partition_counts
from flsv.data.sample_hashes import hash_samples_and_inputs
from flsv.data.sources.source_data import SourceData
from flsv.data.splits import HELD_OUT, FederatedSplits, Splits, split_federation
from flsv.data.streams import has_streams
from flsv.utilities.errors import ConfigurationError, in_words, listed
from flsv.utilities.seeding import generator_for

if TYPE_CHECKING:
    from flsv.data.corruption import Corruption


#: Smallest default size of batches of tensors in an evaluation. They cost no time to make.
MIN_EVAL_BATCH_SIZE = 256


@dataclass(frozen=True)
class Division:
    """Samples that are divided among the server and the clients.

    Args:
        source: the samples, and the options of their loaders.
        classes: labels and names of the classes, after corruptions.
        splits: indices of the server's and each client's samples.
        is_changed: whether corruptions changed each training sample, bool ``[N]``.
    """

    source: SourceData
    classes: Classes
    splits: FederatedSplits
    is_changed: Tensor

    @cached_property
    def num_samples(self) -> Tensor:
        """Number of each client's training samples, int64 ``[n]``."""
        return torch.tensor([len(indices) for indices in self.splits.train])

    @cached_property
    def class_counts(self) -> Tensor:
        """Number of each client's training samples per class, int64 ``[n, M]``."""
        return partition_counts(self.splits.train, self.classes.labels, len(self.classes.names))

    @property
    def sample_hashes(self) -> np.ndarray | None:
        """Hash of each training sample, uint64 ``[N]``. None if samples are read one by one."""
        hashes, _ = self._hashes
        return hashes

    @property
    def input_hashes(self) -> np.ndarray | None:
        """Hash of each training sample without its target, uint64 ``[N]``. None unless samples are pairs of tensors."""
        _, input_hashes = self._hashes
        return input_hashes

    @cached_property
    def _hashes(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        indices = torch.arange(len(self.classes.labels))
        return hash_samples_and_inputs(self.source.train, indices)


def divide(
    source: SourceData,
    partitioner: Partitioner,
    split_options: Splits,
    loader: Loader,
    *,
    groups: Any = None,
    labels: Any = None,
    pos_label: Any = None,
    corruptions: Sequence[Corruption] = (),
    batch_size: int | None = None,
) -> Division:
    """Find the classes of a source, divide its samples among the server and the clients, and apply corruptions."""
    parts: list[Any] = [partitioner, *corruptions]
    parts_that_need_classes = [part for part in parts if part.needs_classes]
    if split_options.drop_flagged:
        parts_that_need_classes.append(split_options.drop_flagged)
    classes = _classes_of(source, labels, parts_that_need_classes)
    if pos_label is not None:
        check_positive(classes.names, pos_label)
        source = replace(source, pos_label=pos_label)

    splits = _split(source, classes, partitioner, split_options, groups)
    if source.make_features is not None:
        samples_by_client = dict(zip(splits.names, splits.train))
        source = source.make_features(samples_by_client)
    # Some corruptions show images of classes that are not part of the task. All others lose these samples.
    unknown_classes = _unknown_classes(corruptions)
    splits = _without_unknown(splits, classes.labels, unknown_classes, corruptions)

    source = _with_options(source, loader, batch_size)
    _check_inputs(source, splits)
    check_full_batches(splits, source)
    source = replace(
        source,
        val=_of_known_classes(source.val, unknown_classes),
        test=_of_known_classes(source.test, unknown_classes),
        split_columns={},  # not needed any more
    )
    is_changed = torch.zeros(len(classes.labels), dtype=torch.bool)
    division = Division(source, classes, splits, is_changed)
    if not corruptions:
        return division
    return _apply_corruptions(division, corruptions)


def _classes_of(source: SourceData, labels: Any, parts_that_need_classes: list[Any]) -> Classes:
    is_stream = has_streams(source.train)
    if is_stream:
        if labels is not None and labels is not False:
            raise ConfigurationError(
                "The labels of a stream are read with its samples during training. Remove the argument labels."
            )
        labels = False
    classes = find_classes(
        source.train,
        source.class_names,
        {"validation": _validation_set(source), "test": source.test},
        labels,
        parts_that_need_classes,
    )
    if is_stream:
        return replace(classes, missing_reason="a stream is not read before training")
    return classes


def _validation_set(source: SourceData) -> Any:
    """Return the validation data, also those of a loader that the user has given. None if they are not known."""
    is_wrapped_module = source.train_loader is not None
    if is_wrapped_module or source.val is not None:
        return source.val
    return getattr(source.val_loaders, "dataset", None)


def _unknown_classes(corruptions: Sequence[Corruption]) -> Tensor:
    unknown_classes: list[int] = []
    for corruption in corruptions:
        unknown_classes += corruption.unknown_classes
    return torch.tensor(unknown_classes, dtype=torch.long)


def _with_options(source: SourceData, loader: Loader, batch_size: int | None) -> SourceData:
    """Return the source with its loaders' options, and with its samples in memory if ``loader.preload``."""
    # batch_size replaces the options of loader, these replace the source's, and these the defaults.
    changes = loader.changes()
    train_options = {"batch_size": 32, "drop_last": False, **source.train_options, **changes}
    if batch_size:
        train_options["batch_size"] = batch_size
    eval_options = {**source.eval_options, **changes, "drop_last": False}

    if loader.preload:
        _check_default_collate([train_options, eval_options])
        source = _in_memory(source, num_workers=train_options.get("num_workers", 0))
    source = replace(source, train_options=train_options)

    eval_batch_size = train_options["batch_size"]
    if source.tensors:
        eval_batch_size = max(eval_batch_size, MIN_EVAL_BATCH_SIZE)
    eval_options.setdefault("batch_size", eval_batch_size)
    if loader.eval_batch_size:
        eval_options["batch_size"] = loader.eval_batch_size
    return replace(source, eval_options=eval_options)


def _check_default_collate(options_of_loaders: Sequence[Mapping[str, Any]]) -> None:
    if not all(map(has_default_collate, options_of_loaders)):
        raise ConfigurationError(
            "Loader(preload=True) reads samples without the loader's collate_fn, which may sort, mix or drop the "
            "samples of a batch. Set preload=False, or do this in the data set instead of in collate_fn."
        )


def _in_memory(source: SourceData, num_workers: int) -> SourceData:
    return replace(
        source,
        train=preload(source.train, num_workers),
        val=None if source.val is None else preload(source.val, num_workers),
        test=None if source.test is None else preload(source.test, num_workers),
    )


def _split(
    source: SourceData, classes: Classes, partitioner: Partitioner, options: Splits, groups: Any
) -> FederatedSplits:
    _check_partitioner(source, partitioner)
    group_numbers = source.groups
    group_names = source.group_names
    if group_numbers is None:
        group_numbers, group_names = named_groups(source.train, groups)

    if source.val is not None or source.val_loaders is not None:
        options = replace(options, server_val=0.0)
    if has_streams(source.train):
        _check_streams(source, partitioner, options)
    samples = source.indices
    if samples is None:
        samples = torch.arange(len(classes.labels))
    return split_federation(
        classes.labels,
        len(classes.names),
        groups=group_numbers,
        pool=samples,
        partitioner=partitioner,
        options=options,
        column=partial(_split_column, source),
        group_names=group_names,
        whole=source.is_by_client,
    )


def _check_partitioner(source: SourceData, partitioner: Partitioner) -> None:
    if source.is_by_client and not partitioner.keeps_groups:
        names_of_clients = listed(source.group_names, show=repr)
        raise ConfigurationError(
            f"The data are given by client ({names_of_clients}), so that they need no partitioner. Remove "
            f"{partitioner!r} (in a configuration: null)."
        )


def _split_column(source: SourceData, name: str) -> Any:
    """Return the training samples' values in a column by which they are split."""
    if name in source.split_columns:
        return source.split_columns[name]
    return column(source.train, name, "splits")


def _check_streams(source: SourceData, partitioner: Partitioner, options: Splits) -> None:
    is_of_one_client = isinstance(partitioner, OneClient)
    if not source.is_by_client and not is_of_one_client:
        raise ConfigurationError(
            "A stream cannot be divided among clients. Give each client its own stream: clients={'Boston': stream, "
            "...}."
        )
    if options.max_samples is not None:
        raise ConfigurationError(
            "Splits(max_samples=...) cannot shorten a stream. Remove it, and set Stream(samples=...) instead."
        )
    held_out = [name for name in HELD_OUT if getattr(options, name)]
    if held_out:
        names = ", ".join(f"{name}=0" for name in held_out)
        raise ConfigurationError(
            f"Samples of a stream cannot be held out. Set splits=Splits({names}), and give validation data as val."
        )


def _check_inputs(source: SourceData, splits: FederatedSplits) -> None:
    broken = not_finite(source.train)
    is_held_out = torch.isin(broken, splits.held_out)
    broken_by_part = {"the held-out": broken[is_held_out]}
    for name, data in {"validation": source.val, "test": source.test}.items():
        if data is not None:
            broken_by_part[f"the {name}"] = not_finite(data)

    for part, indices in broken_by_part.items():
        if len(indices):
            raise ConfigurationError(
                f"{len(indices)} samples of {part} data have NaN or infinite inputs: {in_words(indices.tolist())}. "
                "Correct or remove them."
            )


def not_finite(dataset: Dataset[Any]) -> Tensor:
    """Return the indices of samples with NaN or infinite inputs, int64 ``[n]``. Labels are not checked."""
    tensors, rows = tensors_of(dataset)
    if not tensors or not len(tensors[0]):
        return torch.empty(0, dtype=torch.long)

    num_samples = len(tensors[0])
    is_finite = torch.ones(num_samples, dtype=torch.bool)
    # The last of several tensors has the labels.
    num_inputs = max(1, len(tensors) - 1)
    for inputs in tensors[:num_inputs]:
        if inputs.is_complex():
            inputs = torch.view_as_real(inputs)
        if inputs.is_floating_point() and inputs.numel():
            # NaN is the smallest and the largest number of its row. isfinite of all inputs would need more memory.
            smallest, largest = inputs.reshape(num_samples, -1).aminmax(dim=1)
            is_finite &= (smallest.isfinite() & largest.isfinite()).cpu()
    if rows is not None:
        is_finite = is_finite[rows]
    return (~is_finite).nonzero().flatten()


def check_full_batches(splits: FederatedSplits, source: SourceData) -> None:
    """Raise ConfigurationError if a client has no training batch because of ``drop_last`` or weights of 0."""
    samples_per_epoch = list(map(len, splits.train))
    if source.draws is not None:  # samples are drawn by weights
        for client, samples in enumerate(splits.train):
            draws = source.draws.restricted_to(samples)
            _check_weights(draws, client_called(client, splits.names))
            samples_per_epoch[client] = draws.count

    batch_size = source.train_options["batch_size"]
    fewest = min(samples_per_epoch)
    if source.train_options["drop_last"] and fewest < batch_size:
        client_name = client_called(samples_per_epoch.index(fewest), splits.names, "Client")
        raise ConfigurationError(
            f"{client_name} has {fewest} samples, fewer than one batch of {batch_size}, and drop_last=True drops "
            f"batches that are not full. Lower batch_size to {fewest}, or set drop_last=False."
        )


def _check_weights(draws: WeightedDraws, client_name: str) -> None:
    num_weighted = int((draws.weights > 0).sum())
    # Without replacement, torch.multinomial would draw samples of weight 0 as well.
    num_needed = 1 if draws.replacement else draws.count
    if num_weighted < num_needed:
        raise ConfigurationError(
            f"The WeightedRandomSampler of the training loader draws {draws.count} samples of "
            f"{client_name}, but only {num_weighted} have a weight above 0. Give more samples a weight, or set "
            "replacement=True."
        )


def _apply_corruptions(division: Division, corruptions: Sequence[Corruption]) -> Division:
    """Apply the corruptions, and mark the samples that they changed in ``is_changed``."""
    classes = division.classes
    clean_inputs, *other_columns = _columns(division)
    inputs = clean_inputs
    labels = classes.labels.clone()
    is_changed = division.is_changed.clone()
    for client, client_corruptions in _corruptions_by_client(division, corruptions).items():
        samples = division.splits.train[client]
        clean_x = clean_inputs[samples.to(clean_inputs.device)].cpu()
        clean_y = classes.labels[samples]
        x, y = _corrupted(clean_x, clean_y, len(classes.names), client, client_corruptions)
        labels[samples] = y
        has_new_x = _differ(x, clean_x)
        is_changed[samples] = has_new_x | (y != clean_y)
        if has_new_x.any():
            if inputs is clean_inputs:  # copied once, and only if some inputs change
                inputs = clean_inputs.clone()
            changed_rows = samples[has_new_x].to(inputs.device)
            inputs[changed_rows] = x[has_new_x].to(inputs.device)

    if not classes.missing_reason:
        label_column = other_columns[-1]
        other_columns[-1] = labels.view(label_column.shape).to(label_column)
    source = replace(division.source, train=TensorDataset(inputs, *other_columns))
    return replace(
        division, source=source, classes=replace(classes, labels=labels), is_changed=is_changed
    )


def _corrupted(
    clean_x: Tensor,
    clean_y: Tensor,
    num_classes: int,
    client: int,
    corruptions: Mapping[int, Corruption],
) -> tuple[Tensor, Tensor]:
    """Apply a client's corruptions, which are given by their positions, to copies of its samples."""
    x = clean_x.clone()
    y = clean_y.clone()
    for position, corruption in corruptions.items():
        # The position gives two corruptions with the same seed different random numbers.
        generator = generator_for(corruption.seed, "corruption", position, client)
        x, y = corruption(x, y, num_classes, generator)
    return x, y


def _corruptions_by_client(
    division: Division, corruptions: Sequence[Corruption]
) -> dict[int, dict[int, Corruption]]:
    """Return the corruptions of each corrupted client, by their positions, in the order of the clients."""
    corruptions_by_client: dict[int, dict[int, Corruption]] = {}
    for position, corruption in enumerate(corruptions):
        for client in corruption.chosen(len(division.splits.train)):
            corruptions_by_client.setdefault(client, {})[position] = corruption
    return dict(sorted(corruptions_by_client.items()))


def _differ(x: Tensor, clean_x: Tensor) -> Tensor:
    """Return which rows differ in a value, bool ``[n]``. NaN equals NaN."""
    is_equal = (x == clean_x) | (x.isnan() & clean_x.isnan())
    return ~is_equal.reshape(len(x), -1).all(1)


def _columns(division: Division) -> list[Tensor]:
    """Return the training samples as tensors ``[N, ...]``, with the inputs first, and labels, if any, last."""
    source = division.source
    collate_fn = source.train_options.get("collate_fn")
    tensors, rows = tensors_of(source.train, collate_fn=collate_fn)
    if tensors is None:
        raise ConfigurationError(
            f"corruptions need samples in tensors, but {type(source.train).__name__} reads its samples one by one. Set "
            "Loader(preload=True)."
        )
    if rows is None:
        columns = list(tensors)
    else:
        columns = [tensor[rows.to(tensor.device)] for tensor in tensors]
    if division.classes.missing_reason:
        return columns  # the data have no labels
    last_column = columns[-1].flatten().cpu().long()
    if len(columns) == 1 or not torch.equal(last_column, division.classes.labels):
        raise ConfigurationError(
            "corruptions need samples (x, ..., label), but the last part of these samples is not their label. Change "
            "the order of the parts."
        )
    return columns


def _without_unknown(
    splits: FederatedSplits,
    labels: Tensor,
    unknown_classes: Tensor,
    corruptions: Sequence[Corruption],
) -> FederatedSplits:
    """Remove the samples of ``unknown_classes`` from all splits but the corrupted clients' training sets."""
    if not len(unknown_classes):
        return splits
    clients_with_unknown = set[int]()
    for corruption in corruptions:
        if corruption.unknown_classes:
            clients_with_unknown.update(corruption.chosen(len(splits.clients)))

    is_known = ~torch.isin(labels, unknown_classes)
    server_val = splits.server_val[is_known[splits.server_val]]
    clients = []
    for client, client_split in enumerate(splits.clients):
        known_samples = {name: samples[is_known[samples]] for name, samples in client_split.items()}
        if client in clients_with_unknown:
            known_samples["train"] = client_split["train"]
        clients.append(known_samples)
    num_unknown = [
        len(client_split["train"]) - len(known_samples["train"])
        for client_split, known_samples in zip(splits.clients, clients)
    ]
    known_splits = replace(
        splits,
        server_val=server_val,
        clients=tuple(clients),
        left_out={**splits.left_out, "unknown classes": torch.tensor(num_unknown)},
    )
    _check_samples_left(known_splits, splits, unknown_classes)
    return known_splits


def _check_samples_left(
    known_splits: FederatedSplits, all_splits: FederatedSplits, unknown: Tensor
) -> None:
    owners_without = []
    for client, samples in enumerate(known_splits.train):
        if not len(samples):
            owners_without.append(client_called(client, known_splits.names))
    if not owners_without and len(all_splits.server_val) and not len(known_splits.server_val):
        owners_without.append("the server")
    if owners_without:
        raise ConfigurationError(
            f"All samples of {listed(owners_without)} are of unknown_classes={unknown.tolist()}, which are removed. "
            "Choose other classes."
        )


def _of_known_classes(dataset: Dataset[Any] | None, unknown: Tensor) -> Dataset[Any] | None:
    if dataset is None or not len(unknown):
        return dataset
    is_known = ~torch.isin(dataset_labels(dataset), unknown)
    known_samples = is_known.nonzero().flatten()
    return Subset(dataset, known_samples.tolist())


def without_flagged(division: Division, unflagged_by_client: Sequence[Tensor]) -> Division:
    """Keep only the training samples that are not flagged, bool ``[m]`` for each client."""
    splits = division.splits
    client_splits = []
    for client, is_unflagged in enumerate(unflagged_by_client):
        client_split = splits.clients[client]
        unflagged_samples = client_split["train"][is_unflagged]
        if len(unflagged_samples) == 0:
            raise ConfigurationError(
                f"Splits(drop_flagged=...) flags all training samples of {client_called(client, splits.names)}, so "
                "that none is left. Remove this client's data, or drop_flagged."
            )
        client_splits.append({**client_split, "train": unflagged_samples})

    num_flagged = [int((~is_unflagged).sum()) for is_unflagged in unflagged_by_client]
    left_out = {**splits.left_out, "drop_flagged": torch.tensor(num_flagged)}
    splits = replace(splits, clients=tuple(client_splits), left_out=left_out)
    check_full_batches(splits, division.source)
    return replace(division, splits=splits)
