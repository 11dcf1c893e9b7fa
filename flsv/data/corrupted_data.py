"""The training data with corrupted samples in place of the original ones, and without those of unknown classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from flsv.data.corruption import Corruption
from flsv.data.groups import client_called
from flsv.data.labels import Classes, dataset_labels
from flsv.data.loaders import tensors_of
from flsv.data.splits import FederatedSplits
from flsv.errors import ConfigurationError
from flsv.seeding import generator_for


def corrupt_clients(
    dataset: Dataset,
    classes: Classes,
    splits: FederatedSplits,
    corruptions: Sequence[Corruption],
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> tuple[TensorDataset, Tensor, Tensor]:
    """Let the corruptions act, in turn, on the training samples of the clients that they concern.

    Args:
        dataset: the training data, held as tensors; not modified.
        classes: of every sample; where they have none, only inputs can change.
        splits: who has what.
        corruptions: what happens to it.
        collate_fn: how the data set's samples become batches.

    Returns:
        The data as the clients have them; the class of each sample, int64 ``[N]``; and whether a sample differs from
        the data set's, bool ``[N]``.

    Raises:
        ConfigurationError: data that are not tensors, or samples that do not end with their label.
    """
    tensors, rows = tensors_of(dataset, None)
    if tensors is None or collate_fn not in (None, default_collate):
        raise ConfigurationError(
            f"corruptions work on data held as tensors, and {type(dataset).__name__} is read sample by sample. Say "
            f"preload: true to read it once into memory, or corrupt the samples in the data set itself."
        )
    first, *fields = tensors if rows is None else [tensor[rows.to(tensor.device)] for tensor in tensors]
    inputs, labels = first, classes.labels.clone()
    last = fields[-1].flatten().cpu() if fields else labels[:0]
    if not classes.missing and (len(last) != len(labels) or (last != labels).any()):
        raise ConfigurationError(
            f"corruptions need samples (x, ..., label), and the last element of those of {type(dataset).__name__} is "
            f"not their label."
        )
    differs = torch.zeros(len(labels), dtype=torch.bool)
    concerned = [corruption.chosen(len(splits.clients)) for corruption in corruptions]
    for client in sorted({client for clients in concerned for client in clients}):
        samples = splits.clients[client]["train"]
        before, true = first[samples.to(first.device)].cpu(), classes.labels[samples]
        x, y = before.clone(), true.clone()
        for position, (corruption, clients) in enumerate(zip(corruptions, concerned, strict=True)):
            if client in clients:
                # The position tells two corruptions of one seed apart.
                generator = generator_for(corruption.seed, "corruption", position, client)
                x, y = corruption(x, y, len(classes.names), generator)
        same = (x == before) | (x.isnan() & before.isnan())
        other = ~same.reshape(len(x), -1).all(1)
        labels[samples], differs[samples] = y, other | (y != true)
        if other.any():
            inputs = first.clone() if inputs is first else inputs
            inputs[samples[other].to(inputs.device)] = x[other].to(inputs.device)
    if not classes.missing:
        fields[-1] = labels.view(fields[-1].shape).to(fields[-1])
    return TensorDataset(inputs, *fields), labels, differs


def leave_out_unknown(splits: FederatedSplits, labels: Tensor, corruptions: Sequence[Corruption]) -> FederatedSplits:
    """The splits without the samples of unknown classes, but for the training sets of the clients concerned.

    Args:
        splits: who has what.
        labels: true class of every sample, int64 ``[N]``.
        corruptions: all that there are; those without ``unknown_classes`` do not matter.

    Raises:
        ConfigurationError: a client or the server's validation set is left with nothing.
    """
    unknown = unknown_classes(corruptions)
    if not unknown:
        return splits
    count = len(splits.clients)
    concerned = {client for each in corruptions if each.unknown_classes for client in each.chosen(count)}
    known = ~torch.isin(labels, torch.tensor(unknown))

    # An irrelevant client's own validation and test sets may well come out empty; who needs them, asks for them.
    clients = tuple(
        {
            name: samples if name == "train" and client in concerned else samples[known[samples]]
            for name, samples in sets.items()
        }
        for client, sets in enumerate(splits.clients)
    )
    left = replace(splits, server_val=splits.server_val[known[splits.server_val]], clients=clients)
    empty = [client_called(client, splits.names) for client, sets in enumerate(left.clients) if not len(sets["train"])]
    empty += ["the server's validation set"] if len(splits.server_val) and not len(left.server_val) else []
    if empty:
        raise ConfigurationError(
            f"Without the classes {unknown}, which the task does not know, {empty[0]} has no samples. Choose another "
            f"partition or other unknown_classes (the clients that OpenSetLabelNoise concerns keep their samples)."
        )
    return left


def unknown_classes(corruptions: Sequence[Corruption]) -> list[int]:
    """The classes that any of the corruptions declares unknown."""
    return sorted({label for corruption in corruptions for label in corruption.unknown_classes})


def known_samples(dataset: Dataset, unknown: list[int]) -> Dataset:
    """The data set, without the samples of ``unknown`` classes if there are any such classes."""
    if not unknown:
        return dataset
    return Subset(dataset, (~torch.isin(dataset_labels(dataset), torch.tensor(unknown))).nonzero().flatten().tolist())
