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
    has_default_collate = source.train_options.get("collate_fn") in (None, default_collate)
    if source.tensors or has_streams(source.train) or (has_default_collate and not compare_labels):
        return

    splits = source.splits
    num_samples = min(MAX_SAMPLES_OF_CLIENT, max(1, MAX_SAMPLES // len(splits.clients)))
    rows_by_client = [_evenly_spaced(rows, num_samples) for rows in splits.train]
    batches = _read(source.train, rows_by_client, source.train_options)
    for client, (rows, batch) in enumerate(zip(rows_by_client, batches)):
        description = f"{type(source.train).__name__}, {client_called(client, splits.names)}"
        vectors = label_vectors(batch)  # [B] each, of which one has to be the labels
        num_rows = 0 if batch is None else max(map(len, vectors), default=len(rows))
        if num_rows < len(rows):
            raise ConfigurationError(
                f"{description}: a batch of {len(rows)} samples has {num_rows} rows. Samples that collate_fn leaves "
                "out would count as trained: leave them out of the data set, as with torch.utils.data.Subset."
            )
        if compare_labels:
            labels = classes.labels[rows]
            if not has_default_collate:  # which may sort samples, or repeat them
                labels = labels.unique()
                vectors = [vector.unique() for vector in vectors]
            _check_labels(vectors, labels, description)


def _check_labels(vectors: list[Tensor], labels: Tensor, description: str) -> None:
    """Raise ConfigurationError if a batch has vectors of whole numbers, and none of them has these labels."""
    vectors = [vector.double() for vector in vectors]
    vectors = [vector for vector in vectors if torch.equal(vector, vector.round())]
    if not vectors or any(torch.equal(vector, labels.double()) for vector in vectors):
        return
    raise ConfigurationError(
        f"{description}: flsv has the labels {listed(labels.tolist(), 20)} for samples that in a batch have "
        f"{listed(vectors[0].tolist(), 20, show='{:g}'.format)}. Store the samples' own labels as `targets`, or give "
        "labels=[...], one per sample."
    )


def warn_of_random_evaluation(source: SourceData) -> None:
    """Warn if samples that flsv has split off for evaluation are read with random changes, as those for training."""
    if source.tensors:
        return
    held_out = [source.splits.server_val]
    for client_split in source.splits.clients:
        held_out += [client_split["val"], client_split["test"]]
    rows = torch.cat(held_out)[:8]  # a few suffice, since all samples are read alike
    options = dict(source.eval_options)
    if options.get("collate_fn") in (None, default_collate):
        options["collate_fn"] = list  # samples that it cannot collate are no concern here
    if len(rows) == 0:
        return
    leaves, leaves_again = map(tree_leaves, _read(source.train, [rows, rows], options))
    pairs = zip(leaves, leaves_again)
    if not all(are_equal(*pair) for pair in pairs if is_plain(pair[0])):
        rank_zero_warn(
            "flsv: the validation and test samples that were split off change at random whenever they are read, by the "
            "data set's transforms or the training loader's collate_fn. Give validation data of their own (val=, or a "
            "val_dataloader) and Splits(server_val=0), or change samples in the module's training_step."
        )


def _read(dataset: Any, rows_of_batches: list[Tensor], options: Mapping[str, Any]) -> Iterator[Any]:
    batches = [rows.tolist() for rows in rows_of_batches]
    with isolated_rngs(0, "first batches"):
        yield from loader_of_batches(dataset, batches, options)


def _evenly_spaced(rows: Tensor, max_count: int) -> Tensor:
    positions = torch.linspace(0, len(rows) - 1, min(len(rows), max_count))
    return rows[positions.round().long()]
