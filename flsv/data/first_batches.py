"""Check of each client's first batch: its number of rows and its labels have to be those that flsv counts.

flsv reads labels from an attribute of the data set, before it reads samples. The model is trained on what the loader
yields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flsv.data.division import Division
from flsv.data.groups import client_called
from flsv.data.labels import label_vectors, rows_of_batch
from flsv.data.loaders import has_default_collate, loader_of_batches
from flsv.data.streams import has_streams
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.plain_values import are_equal, is_plain
from flsv.utilities.seeding import isolated_rngs

#: Largest number of samples that are read of all clients together, and of one client.
MAX_SAMPLES = 512
MAX_SAMPLES_OF_CLIENT = 16


def check_first_batches(division: Division, compare_labels: bool) -> None:
    """Read a batch of each client. Compare its length and, with ``compare_labels``, its labels with the division.

    Raises:
        ConfigurationError: a batch has other labels, or fewer rows than samples.
    """
    source = division.source
    if source.tensors or has_streams(source.train):
        return
    labels = None
    if compare_labels and not division.classes.missing_reason:
        labels = division.classes.labels
    # A collate_fn of the user's may sort, repeat or drop samples.
    keeps_samples = has_default_collate(source.train_options)
    if keeps_samples and labels is None:
        return

    splits = division.splits
    rows_by_client = [_evenly_spaced(rows, len(splits.clients)) for rows in splits.train]
    batches = _read(source.train, rows_by_client, source.train_options)
    for client, batch in enumerate(batches):
        rows = rows_by_client[client]
        description = f"{type(source.train).__name__}, {client_called(client, splits.names)}"
        _check_length(batch, len(rows), description)
        if labels is not None:
            _check_labels(batch, labels[rows], keeps_samples, description)


def _check_length(batch: Any, num_samples: int, description: str) -> None:
    num_rows = rows_of_batch(batch)
    if num_rows is not None and num_rows < num_samples:
        raise ConfigurationError(
            f"{description}: collate_fn makes a batch of {num_rows} rows of {num_samples} samples, but the client's "
            "weight would count all of them. Remove samples from the data set instead, for example with "
            "torch.utils.data.Subset."
        )


def _check_labels(batch: Any, labels: Tensor, keeps_samples: bool, description: str) -> None:
    """Raise ConfigurationError if a batch has vectors of whole numbers, but none of them equals the labels."""
    candidates = [vector.cpu() for vector in label_vectors(batch)]  # [B] each
    if not keeps_samples:
        labels = labels.unique()
        candidates = [candidate.unique() for candidate in candidates]

    labels_of_batch = None
    for candidate in candidates:
        numbers = candidate.double()
        if torch.equal(numbers, labels.double()):
            return
        are_whole = torch.equal(numbers, numbers.round())
        if are_whole:
            labels_of_batch = numbers.long()
    if labels_of_batch is None:
        return
    raise ConfigurationError(
        f"{description}: flsv has read the labels {listed(labels.tolist(), 20)}, but in a batch the same samples have "
        f"{listed(labels_of_batch.tolist(), 20)}. Set the attribute `targets` of the data set to the labels of its "
        "samples, or give labels=[...], one for each sample."
    )


def warn_of_random_evaluation(division: Division) -> None:
    """Warn if samples that flsv holds out for evaluation change at random, as by augmentation for training."""
    source = division.source
    if source.tensors:
        return
    # A few are enough, since all samples are read in the same way.
    rows = division.splits.held_out[:8]
    if len(rows) == 0:
        return
    options = dict(source.eval_options)
    if has_default_collate(options):
        options["collate_fn"] = list  # the samples need not be collated
    batch, batch_again = _read(source.train, [rows, rows], options)
    for value, value_again in zip(tree_leaves(batch), tree_leaves(batch_again)):
        if is_plain(value) and not are_equal(value, value_again):
            rank_zero_warn(
                "flsv: the validation and test samples that are held out of the training data change at random "
                "whenever they are read, by the data set's transforms or the training loader's collate_fn. Give "
                "separate validation data (val=, or a val_dataloader) with Splits(server_val=0), or augment samples "
                "in the module's training_step."
            )
            return


def _read(
    dataset: Any,
    rows_of_batches: list[Tensor],
    options: Mapping[str, Any],
) -> Iterator[Any]:
    batches = [rows.tolist() for rows in rows_of_batches]
    with isolated_rngs(0, "first batches"):
        yield from loader_of_batches(dataset, batches, options)


def _evenly_spaced(rows: Tensor, num_clients: int) -> Tensor:
    max_count = min(MAX_SAMPLES_OF_CLIENT, max(1, MAX_SAMPLES // num_clients))
    num_rows = len(rows)
    positions = torch.linspace(0, num_rows - 1, min(num_rows, max_count))
    return rows[positions.round().long()]
