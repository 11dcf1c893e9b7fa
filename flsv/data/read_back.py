"""Check of partitioned data: samples, read as training and evaluation read them, have the labels that flsv holds.

Labels are known before samples are read: from a stored attribute, from names, from numbers that flsv has set. What a
model is trained on is what the loader yields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, default_collate

from flsv.data.groups import client_called
from flsv.data.labels import label_vectors, stored_classes
from flsv.data.loaders import loader_of_batches, tensors_of
from flsv.data.sources.base import SourceData
from flsv.data.streams import has_streams, part_of
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.plain_values import are_equal, is_plain
from flsv.utilities.seeding import isolated_rngs

#: Largest number of samples that are read of all clients together.
MAX_SAMPLES = 512
#: Largest number of samples that are read of one class of one client.
MAX_SAMPLES_OF_CLASS = 8


@dataclass(frozen=True)
class _Reader:
    """A data set as a loader reads it, and names for messages."""

    dataset: Any
    options: Mapping[str, Any]
    class_names: tuple[str, ...]
    compare_labels: bool = True

    @property
    def holds_samples(self) -> bool:
        """Tell whether samples are rows of tensors, which no worker has to read, and which are the same each time."""
        collate_fn = self.options.get("collate_fn")
        tensors, _ = tensors_of(self.dataset, collate_fn=collate_fn)
        return tensors is not None

    def check(
        self,
        rows_by_owner: Mapping[str, Tensor],
        labels: Tensor,
    ) -> None:
        """Raise ConfigurationError if a batch of an owner's samples has fewer rows, or another label.

        Args:
            rows_by_owner: indices of the samples, int64 ``[n]``, of each owner.
            labels: the class of each sample of the data set, int64 ``[N]``.
        """
        batches = []
        for owner, rows in rows_by_owner.items():
            row_labels = labels[rows]
            for label in row_labels.unique().tolist():
                batches.append((owner, label, rows[row_labels == label]))
        if not batches:
            return

        # Few samples are read: at least one of a class of an owner, and at most MAX_SAMPLES together.
        batches = [batches[position] for position in _evenly_spaced(len(batches), MAX_SAMPLES)]
        max_samples_of_batch = min(MAX_SAMPLES // len(batches), MAX_SAMPLES_OF_CLASS)
        rows_read = []
        for _, _, rows in batches:
            positions = _evenly_spaced(len(rows), max_samples_of_batch)
            rows_read.append(rows[positions].tolist())

        contents = self._read(rows_read, self.options)
        for (owner, label, _), indices, content in zip(batches, rows_read, contents, strict=True):
            description = self._described(owner, indices[0], label)
            self._check_batch(content, len(indices), label=label, description=description)

    def is_random(self, rows: Tensor) -> bool:
        """Return whether samples differ when they are read again."""
        options = dict(self.options)
        if options.get("collate_fn") in (None, default_collate):
            options["collate_fn"] = list  # samples that it cannot collate are no concern here
        same_rows_twice = [rows.tolist(), rows.tolist()]
        batch, batch_again = self._read(same_rows_twice, options)
        return not _hold_the_same(batch, batch_again)

    def _read(
        self,
        rows_of_batches: list[list[int]],
        options: Mapping[str, Any],
    ) -> Iterator[Any]:
        if self.holds_samples:
            options = {}
        with isolated_rngs(0, "read back"):
            yield from loader_of_batches(self.dataset, rows_of_batches, options)

    def _check_batch(
        self,
        batch: Any,
        num_samples: int,
        label: int,
        description: str,
    ) -> None:
        candidates = label_vectors(batch)  # tensors [B], of which one has to be the labels
        num_rows = 0 if batch is None else max(map(len, candidates), default=num_samples)
        if num_rows < num_samples:
            raise ConfigurationError(
                f"{description}: a batch of {num_samples} samples has {num_rows} rows. "
                "Samples that collate_fn leaves out would count as trained: leave them out of the "
                "data set, as with torch.utils.data.Subset."
            )
        candidates = [labels for labels in candidates if _has_whole_numbers(labels)]
        if not self.compare_labels or not candidates:
            return
        if any(torch.all(labels == label) for labels in candidates):
            return
        labels_in_batch = candidates[-1].unique().tolist()  # labels are usually last
        raise ConfigurationError(
            f"{description}: flsv has the number {label} for these samples, and in a batch they have "
            f"{listed(labels_in_batch, show='{:g}'.format)}. Store the samples' own labels (targets, labels), or give "
            "labels=[...], one per sample."
        )

    def _described(self, owner: str, row: int, label: int) -> str:
        """Return text for messages: data set, client and class."""
        name = str(label)
        if label < len(self.class_names):
            name = repr(self.class_names[label])
        return f"{type(part_of(self.dataset, row)).__name__}, {owner}, class {name}"


def check_read_back(source: SourceData, compare_labels: bool = True) -> None:
    """Read samples of each class of each client, and compare their labels and their number with those in ``source``.

    Args:
        source: the divided source.
        compare_labels: whether samples have to show these labels. False if the user has given other ones.

    Raises:
        ConfigurationError: a sample has another label, or ``collate_fn`` leaves samples out.
    """
    classes = source.classes
    if classes.missing_reason:
        # Only numbers of samples can be compared, unless these cannot differ either.
        compare_labels = False
        has_default_collate = source.train_options.get("collate_fn") in (None, default_collate)
        if has_default_collate or has_streams(source.train):
            return

    training_rows = {}
    for client, samples in enumerate(source.splits.train):
        training_rows[client_called(client, source.splits.names)] = samples
    reader = _Reader(
        source.train,
        source.train_options,
        class_names=classes.names,
        compare_labels=compare_labels,
    )
    reader.check(training_rows, classes.labels)
    validation_rows = {"the server": source.splits.server_val}
    eval_reader = replace(reader, options=source.eval_options)
    eval_reader.check(validation_rows, classes.labels)
    if not compare_labels:
        return

    val_options: Mapping[str, Any] = source.eval_options
    val = source.val
    if isinstance(source.val_loaders, DataLoader):
        val = source.val_loaders.dataset
        val_options = vars(source.val_loaders)
    held_out = {"the validation data": (val, val_options)}
    held_out["the test data"] = (source.test, source.eval_options)
    for owner, (dataset, options) in held_out.items():
        labels = None if dataset is None else stored_classes(dataset)
        if labels is not None:
            all_rows = torch.arange(len(labels))
            reader = _Reader(dataset, options, classes.names)
            reader.check({owner: all_rows}, labels)


def warn_of_random_evaluation(source: SourceData) -> None:
    """Warn if samples that flsv has split off for evaluation are read with random changes, as those for training."""
    reader = _Reader(source.train, source.eval_options, source.classes.names)
    if reader.holds_samples:
        return
    held_out = [source.splits.server_val]
    for client_split in source.splits.clients:
        held_out += [client_split["val"], client_split["test"]]
    # A few suffice, since all samples are read alike.
    rows = torch.cat(held_out)[:MAX_SAMPLES_OF_CLASS]
    if len(rows) and reader.is_random(rows):
        rank_zero_warn(
            "flsv: the validation and test samples that were split off change at random whenever they are read, by the "
            "data set's transforms or the training loader's collate_fn. Give validation data of their own (val=, or a "
            "val_dataloader) and Splits(server_val=0), or change samples in the module's training_step."
        )


def _hold_the_same(batch: Any, batch_again: Any) -> bool:
    """Return whether two batches hold equal tensors, arrays and numbers. Other objects are not compared."""
    leaves = tree_leaves(batch)
    leaves_again = tree_leaves(batch_again)
    if len(leaves) != len(leaves_again):
        return False
    pairs = zip(leaves, leaves_again)
    return all(are_equal(*pair) for pair in pairs if is_plain(pair[0]))


def _evenly_spaced(length: int, max_count: int) -> list[int]:
    """Return at most ``max_count`` positions, evenly spaced over ``length``."""
    positions = np.linspace(0, length - 1, min(length, max_count))
    return positions.round().astype(int).tolist()


def _has_whole_numbers(labels: Tensor) -> bool:
    return not labels.is_floating_point() or torch.equal(labels, labels.round())
