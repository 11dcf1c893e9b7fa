"""Check of each client's first batch: it has as many rows and the same labels as flsv holds.

Labels are known before samples are read, from a stored attribute. What a model is trained on is what the loader yields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from flsv.data.groups import client_called
from flsv.data.labels import label_vectors
from flsv.data.loaders import loader_of_batches
from flsv.data.sources.base import SourceData
from flsv.data.streams import has_streams
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.plain_values import are_equal, is_plain
from flsv.utilities.seeding import isolated_rngs

#: Largest number of samples that are read of all clients together, and of one client.
MAX_SAMPLES = 512
MAX_SAMPLES_OF_CLIENT = 16


def check_first_batches(source: SourceData, compare_labels: bool) -> None:
    """Read a batch of each client, and compare its length and, with ``compare_labels``, its labels with the source.

    Raises:
        ConfigurationError: a batch has other labels, or ``collate_fn`` leaves samples out.
    """
    classes = source.classes
    compare_labels = compare_labels and not classes.missing_reason
    collates_by_default = has_default_collate(source.train_options)
    if source.tensors or has_streams(source.train):
        return
    if collates_by_default and not compare_labels:
        return

    splits = source.splits
    max_samples = max(1, MAX_SAMPLES // len(splits.clients))
    max_samples = min(MAX_SAMPLES_OF_CLIENT, max_samples)
    rows_by_client = [_evenly_spaced(rows, max_samples) for rows in splits.train]
    batches = _read(source.train, rows_by_client, source.train_options)
    for client, batch in enumerate(batches):
        rows = rows_by_client[client]
        client_name = client_called(client, splits.names)
        description = f"{type(source.train).__name__}, {client_name}"
        vectors = label_vectors(batch)  # [B] each, of which one has to be the labels
        num_rows = max(map(len, vectors), default=len(rows))
        if batch is None:
            num_rows = 0
        if num_rows < len(rows):
            raise ConfigurationError(
                f"{description}: a batch of {len(rows)} samples has {num_rows} rows. Samples that collate_fn leaves "
                "out would count as trained: leave them out of the data set, as with torch.utils.data.Subset."
            )
        if compare_labels:
            labels = classes.labels[rows]
            if not collates_by_default:  # it may sort samples, or repeat them
                labels = labels.unique()
                vectors = [vector.unique() for vector in vectors]
            _check_labels(vectors, labels, description)


def _check_labels(vectors: list[Tensor], labels: Tensor, description: str) -> None:
    """Raise ConfigurationError if a batch has vectors of whole numbers, and none of them has these labels."""
    labels_of_batch = None
    for vector in vectors:
        numbers = vector.double()
        if torch.equal(numbers, labels.double()):
            return
        if torch.equal(numbers, numbers.round()):
            labels_of_batch = numbers.long()
    if labels_of_batch is None:
        return
    raise ConfigurationError(
        f"{description}: flsv has the labels {listed(labels.tolist(), 20)} for samples that in a batch have "
        f"{listed(labels_of_batch.tolist(), 20)}. Store the samples' own labels as `targets`, or give labels=[...], "
        "one per sample."
    )


def warn_of_random_evaluation(source: SourceData) -> None:
    """Warn if samples that flsv has split off for evaluation are read with random changes, as those for training."""
    if source.tensors:
        return
    held_out = [source.splits.server_val]
    for client_split in source.splits.clients:
        held_out += [client_split["val"], client_split["test"]]
    rows = torch.cat(held_out)[:8]  # a few suffice, since all samples are read alike
    if len(rows) == 0:
        return
    options = dict(source.eval_options)
    if has_default_collate(options):
        options["collate_fn"] = list  # samples that it cannot collate are no concern here
    batch, batch_again = _read(source.train, [rows, rows], options)
    for value, value_again in zip(tree_leaves(batch), tree_leaves(batch_again)):
        if is_plain(value) and not are_equal(value, value_again):
            rank_zero_warn(
                "flsv: the validation and test samples that were split off change at random whenever they are read, "
                "by the data set's transforms or the training loader's collate_fn. Give validation data of their own "
                "(val=, or a val_dataloader) and Splits(server_val=0), or change samples in the module's training_step."
            )
            return


def has_default_collate(options: Mapping[str, Any]) -> bool:
    return options.get("collate_fn") in (None, default_collate)


def _read(
    dataset: Any,
    rows_of_batches: list[Tensor],
    options: Mapping[str, Any],
) -> Iterator[Any]:
    batches = [rows.tolist() for rows in rows_of_batches]
    with isolated_rngs(0, "first batches"):
        yield from loader_of_batches(dataset, batches, options)


def _evenly_spaced(rows: Tensor, max_count: int) -> Tensor:
    num_rows = len(rows)
    count = min(num_rows, max_count)
    positions = torch.linspace(0, num_rows - 1, count)
    return rows[positions.round().long()]
