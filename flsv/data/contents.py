"""Samples that loaders read, and checks of inputs for NaN and infinite numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flsv._lightning.evaluation import list_loaders
from flsv.data.loaders import TensorBatches, rows_of, tensors_of
from flsv.data.sample_hashes import content_hash
from flsv.data.splits import FederatedSplits
from flsv.utilities.errors import ConfigurationError, in_words

_ROWS_AT_ONCE = 1024  # samples that are checked at a time


def loader_hash(loaders: Any) -> str:
    """Return the hash of the samples that loaders read, or "" if the samples cannot be accessed."""
    if not isinstance(loaders, list | tuple):
        loaders = [loaders]
    hashes: list[str] = []
    for loader in loaders:
        if isinstance(loader, TensorBatches):
            hashes.append(content_hash(TensorDataset(*loader.tensors), loader.indices))
        elif isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__"):
            hashes.append(content_hash(loader.dataset, rows_of(loader)))
    return " ".join(hashes)


def loader_rows(loaders: Any) -> int | None:
    """Count the samples that one or several loaders read. Return None if a loader has no length."""
    num_rows = 0
    for loader in list_loaders(loaders):
        has_length = hasattr(getattr(loader, "dataset", None), "__len__")
        if isinstance(loader, TensorBatches):
            num_rows += len(loader.indices)
        elif isinstance(loader, DataLoader) and has_length:
            num_rows += len(rows_of(loader))
        elif has_length:
            num_rows += len(loader.dataset)
        else:
            return None
    return num_rows


def not_finite(dataset: Dataset[Any]) -> Tensor:
    """Return the indices of samples with NaN or infinite inputs, int64 ``[n]``.

    The last of several tensors is the target and is not checked.
    """
    tensors, rows = tensors_of(dataset)
    if not tensors or not len(tensors[0]):
        return torch.empty(0, dtype=torch.long)

    num_samples = len(tensors[0])
    is_finite = torch.ones(num_samples, dtype=torch.bool)
    # The last tensor has the labels.
    num_inputs = max(1, len(tensors) - 1)
    for inputs in tensors[:num_inputs]:
        if not (inputs.is_floating_point() or inputs.is_complex()):
            continue
        # A few rows at a time: isfinite needs several times the memory of its argument.
        row_masks = []
        for block in inputs.split(_ROWS_AT_ONCE):
            flat_block = block.reshape(len(block), -1)
            row_masks.append(flat_block.isfinite().all(1).cpu())
        is_finite &= torch.cat(row_masks)
    if rows is not None:
        is_finite = is_finite[rows]
    return (~is_finite).nonzero().flatten()


def check_inputs(
    train: Dataset[Any], splits: FederatedSplits, held_out: dict[str, Dataset[Any] | None]
) -> None:
    """Raise ConfigurationError if validation or test samples have NaN or infinite inputs."""
    held_out_indices = [splits.server_val]
    for client_split in splits.clients:
        held_out_indices += [client_split["val"], client_split["test"]]
    broken = not_finite(train)
    is_held_out = torch.isin(broken, torch.cat(held_out_indices))
    broken_by_part = {"the held-out": broken[is_held_out]}
    for name, data in held_out.items():
        if data is not None:
            broken_by_part[f"the {name}"] = not_finite(data)

    for part, indices in broken_by_part.items():
        if len(indices):
            raise ConfigurationError(
                f"{len(indices)} samples of {part} data have NaN or infinite inputs: {in_words(indices.tolist())}. "
                "Repair them or leave them out."
            )
