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
from torch.utils.data import DataLoader, Dataset, default_collate

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
class ReadingTask:
    """Samples ``rows``, int64 ``[n]``, of one owner and one class, which one batch is to hold."""

    owner: str
    label: int
    rows: Tensor


@dataclass(frozen=True)
class _Reader:
    """A data set as a loader reads it, and names for messages."""

    dataset: Any
    options: Mapping[str, Any]
    class_names: tuple[str, ...]
    compare_labels: bool

    def check(self, tasks: list[ReadingTask]) -> None:
        """Raise ConfigurationError if a batch of a task's samples has fewer rows, or another label."""
        batches = self._batches(tasks)
        for task, batch in zip(tasks, batches, strict=True):
            candidate_labels = label_vectors(batch)  # tensors [B]
            has_known_size = bool(candidate_labels) or batch is None  # None: of no samples
            if has_known_size:
                self._check_count(task, candidate_labels)
            if self.compare_labels:
                self._check_label(task, candidate_labels)

    def _batches(self, tasks: list[ReadingTask]) -> Iterator[Any]:
        """Yield one batch for each task."""
        collate_fn = self.options.get("collate_fn")
        tensors, indices = tensors_of(self.dataset, collate_fn=collate_fn)
        if tensors is None:
            batches = [task.rows.tolist() for task in tasks]
            loader = loader_of_batches(self.dataset, batches, self.options)
            with isolated_rngs(0, "read back"):
                yield from loader
            return

        for task in tasks:
            rows = task.rows
            if indices is not None:
                rows = indices[rows]
            yield [tensor[rows.to(tensor.device)] for tensor in tensors]

    def is_random(self, rows: Tensor) -> bool:
        """Return whether samples differ when they are read again."""
        collate_fn = self.options.get("collate_fn")
        tensors, _ = tensors_of(self.dataset, collate_fn=collate_fn)
        are_stored = tensors is not None  # stored tensors are the same each time
        if are_stored or len(rows) == 0:
            return False
        options = dict(self.options)
        if collate_fn in (None, default_collate):
            options["collate_fn"] = list  # samples that it cannot collate are no concern here
        same_rows_twice = [rows.tolist(), rows.tolist()]
        loader = loader_of_batches(self.dataset, same_rows_twice, options)
        with isolated_rngs(0, "read twice"):
            batch, batch_again = loader
        return not _hold_the_same(batch, batch_again)

    def _check_count(self, task: ReadingTask, candidate_labels: list[Tensor]) -> None:
        num_rows = max(map(len, candidate_labels), default=0)
        if num_rows < len(task.rows):
            raise ConfigurationError(
                f"{self._described(task)}: a batch of {len(task.rows)} samples has {num_rows} rows. "
                "Samples that collate_fn leaves out would count as trained: leave them out of the "
                "data set, as with torch.utils.data.Subset."
            )

    def _check_label(self, task: ReadingTask, candidate_labels: list[Tensor]) -> None:
        # Each tensor [B] has one number per sample, and one of them has to be the label.
        candidates = [labels for labels in candidate_labels if _has_whole_numbers(labels)]
        if not candidates:
            return
        for labels in candidates:
            if torch.all(labels == task.label):
                return
        labels_in_batch = candidates[-1].unique().tolist()  # labels are usually last
        raise ConfigurationError(
            f"{self._described(task)}: flsv has the number {task.label} for these samples, and in a "
            f"batch they have {listed(labels_in_batch, show='{:g}'.format)}. Their stored "
            "labels are others (targets, labels), or __getitem__ leaves out target_transform, or "
            "collate_fn changes them. Store the samples' own labels, or give labels=[...], one per "
            "sample."
        )

    def _described(self, task: ReadingTask) -> str:
        """Return text for messages: data set, client and class."""
        dataset = part_of(self.dataset, int(task.rows[0]))
        name = str(task.label)
        if task.label < len(self.class_names):
            name = repr(self.class_names[task.label])
        return f"{type(dataset).__name__}, {task.owner}, class {name}"


def check_read_back(source: SourceData, compare_labels: bool = True) -> None:
    """Read samples of each class of each client, and compare their labels and their number with those in ``source``.

    Args:
        source: the divided source.
        compare_labels: whether samples have to show these labels. False if the user has given other ones.

    Raises:
        ConfigurationError: a sample has another label, or ``collate_fn`` leaves samples out.
    """
    labels = source.classes.labels
    if source.classes.missing_reason:
        # Only numbers of samples can be compared, unless these cannot differ either.
        compare_labels = False
        has_default_collate = source.train_options.get("collate_fn") in (None, default_collate)
        if has_default_collate or has_streams(source.train):
            return

    training_rows = {}
    for client, samples in enumerate(source.splits.train):
        owner = client_called(client, source.splits.names)
        training_rows[owner] = samples
    reader = _Reader(
        source.train,
        source.train_options,
        class_names=source.classes.names,
        compare_labels=compare_labels,
    )
    reader.check(_reading_tasks(training_rows, labels))

    validation_rows = {"the server": source.splits.server_val}
    eval_reader = replace(reader, options=source.eval_options)
    eval_reader.check(_reading_tasks(validation_rows, labels))

    if compare_labels:
        _check_held_out(source)


def warn_of_random_evaluation(source: SourceData) -> None:
    """Warn if samples that flsv has split off for evaluation are read with random changes, as those for training."""
    rows_by_owner = {"the server": source.splits.server_val}
    for client, client_split in enumerate(source.splits.clients):
        owner = client_called(client, source.splits.names)
        rows_by_owner[owner] = torch.cat([client_split["val"], client_split["test"]])
    reader = _Reader(
        source.train, source.eval_options, class_names=source.classes.names, compare_labels=False
    )
    owners = [owner for owner, rows in rows_by_owner.items() if len(rows) > 0]
    if not owners:
        return
    owner = owners[0]  # one owner suffices, since all samples are read alike
    if reader.is_random(rows_by_owner[owner][:MAX_SAMPLES_OF_CLASS]):
        rank_zero_warn(
            f"flsv: the validation and test samples of {owner} are training samples that were split off, and they "
            "change at random whenever they are read, by the data set's transforms or the training loader's "
            "collate_fn. Scores are of changed samples. Give validation data of their own (val=, or a "
            "val_dataloader) and Splits(server_val=0), or change samples in the module's training_step."
        )


def _hold_the_same(batch: Any, batch_again: Any) -> bool:
    """Return whether two batches hold equal tensors, arrays and numbers. Other objects are not compared."""
    leaves = tree_leaves(batch)
    leaves_again = tree_leaves(batch_again)
    if len(leaves) != len(leaves_again):
        return False
    for leaf, leaf_again in zip(leaves, leaves_again):
        if is_plain(leaf) and not are_equal(leaf, leaf_again):
            return False
    return True


def _check_held_out(source: SourceData) -> None:
    """Compare the labels that validation and test sets store with those of their samples."""
    class_names = source.classes.names
    if source.val is not None:
        _check_stored_labels("the validation data", source.val, source.eval_options, class_names)
    elif isinstance(source.val_loaders, DataLoader):
        loader = source.val_loaders
        _check_stored_labels("the validation data", loader.dataset, vars(loader), class_names)
    if source.test is not None:
        _check_stored_labels("the test data", source.test, source.eval_options, class_names)


def _check_stored_labels(
    owner: str, dataset: Dataset[Any], options: Mapping[str, Any], class_names: tuple[str, ...]
) -> None:
    labels = stored_classes(dataset)
    if labels is None:
        return
    reader = _Reader(dataset, options, class_names=class_names, compare_labels=True)
    all_rows = torch.arange(len(labels))
    rows_by_owner = {owner: all_rows}
    reader.check(_reading_tasks(rows_by_owner, labels))


def _reading_tasks(rows_by_owner: Mapping[str, Tensor], labels: Tensor) -> list[ReadingTask]:
    """Return up to eight samples of each owner and class."""
    tasks = []
    for owner, rows in rows_by_owner.items():
        row_labels = labels[rows]
        for label in row_labels.unique().tolist():
            task = ReadingTask(owner, label, rows[row_labels == label])
            tasks.append(task)
    if not tasks:
        return []

    # Few samples are read: at least one of a task, and at most MAX_SAMPLES of all tasks together.
    equal_share = max(1, MAX_SAMPLES // len(tasks))
    max_samples_of_task = min(equal_share, MAX_SAMPLES_OF_CLASS)
    smaller_tasks = []
    for task_index in _evenly_spaced(len(tasks), MAX_SAMPLES):
        task = tasks[task_index]
        positions = _evenly_spaced(len(task.rows), max_samples_of_task)
        smaller_tasks.append(replace(task, rows=task.rows[positions]))
    return smaller_tasks


def _evenly_spaced(length: int, max_count: int) -> list[int]:
    """Return at most ``max_count`` positions, evenly spaced over ``length``."""
    positions = np.linspace(0, length - 1, min(length, max_count))
    return positions.round().astype(int).tolist()


def _has_whole_numbers(labels: Tensor) -> bool:
    if not labels.is_floating_point():
        return True
    return torch.equal(labels, labels.round())
