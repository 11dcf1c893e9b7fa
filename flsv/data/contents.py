"""Hashes of samples, and checks of inputs for NaN and infinite numbers.

A run is resumed only if its samples have the same hashes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from flsv._lightning.evaluation import list_loaders
from flsv.data.loaders import TensorBatches, rows_of, tensors_of
from flsv.data.splits import FederatedSplits
from flsv.data.streams import parts_with_rows
from flsv.utilities.errors import ConfigurationError, in_words
from flsv.utilities.plain_values import digest, is_plain
from flsv.utilities.reachable import attributes_and_slots
from flsv.utilities.seeding import isolated_rngs

#: The contents of files are hashed only if a participant's files have fewer bytes than this in total.
FILE_BYTES = 2**26
_ROWS_AT_ONCE = 1024  # samples that are checked at a time
_PLAIN_TYPES = (bool, int, float, complex, str, bytes)


def content_hashes(dataset: Dataset[Any], holders: Mapping[str, Tensor]) -> dict[str, str]:
    """Return ``{participant: hash}`` of the samples at the indices in ``holders``. docs/reliability.md says what is
    hashed.
    """
    hashes = {}
    for name, indices in holders.items():
        if len(indices):
            hashes[name] = _hash_of_rows(dataset, indices)
    return hashes


def _hash_of_rows(dataset: Any, indices: Tensor) -> str:
    tensors, rows = tensors_of(dataset, indices)
    if tensors is not None and rows is not None:
        columns = [tensor[rows.to(tensor.device)] for tensor in tensors]
        return digest(columns).hex()

    # Samples are read one by one. What is stored beside them is hashed, and one sample.
    while type(dataset) is Subset:
        outer_indices = torch.as_tensor(dataset.indices, dtype=torch.long)
        indices = outer_indices[indices]
        dataset = dataset.dataset
    if type(dataset) is ConcatDataset:
        parts = parts_with_rows(dataset, indices)
        return " ".join(_hash_of_rows(part, part_rows) for part, part_rows in parts)

    hashed_values = _contents_of_files(dataset, indices)
    attributes = attributes_and_slots(dataset)
    if isinstance(dataset, list | tuple):
        samples = [dataset[index] for index in indices.tolist()]
        hashed_values += filter(is_plain, samples)
    for name, value in sorted(attributes.items()):
        # A memory-mapped file may be larger than the memory.
        if not _is_numeric_array(value) or isinstance(value, np.memmap):
            continue
        if value.shape[:1] == (len(dataset),):
            tensor = torch.as_tensor(value)
            hashed_values += [name, tensor[indices]]
    hash_of_first_sample = b""
    if len(indices):
        hash_of_first_sample = _hash_of_sample(dataset, int(indices[0]))
    return digest([*hashed_values, hash_of_first_sample]).hex()


def _contents_of_files(dataset: Any, indices: Tensor) -> list[Any]:
    """Return an image folder's file names and sizes at ``indices``, and small files' hashes."""
    from torchvision.datasets import DatasetFolder

    if not isinstance(dataset, DatasetFolder):
        return []
    files = []
    for index in indices.tolist():
        path, _ = dataset.samples[index]
        files.append(Path(path))
    sizes = [file.stat().st_size for file in files]
    # Not the whole path: the same data in another folder are the same.
    contents: list[Any] = []
    for file, size in zip(files, sizes):
        contents.append((f"{file.parent.name}/{file.name}", size))
    if sum(sizes) < FILE_BYTES:
        contents += [sha256(file.read_bytes()).digest() for file in files]
    return contents


def _is_numeric_array(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc"
    return isinstance(value, Tensor)


def _hash_of_sample(dataset: Any, index: int) -> bytes:
    """Return one sample's hash, or an empty one if two readings differ or fail. A shallow copy lets each worker open
    files itself.
    """
    hashes = []
    for _ in range(2):  # read twice, to see whether it changes
        with isolated_rngs(0, "contents"):
            try:
                fresh_dataset = copy.copy(dataset)
                leaves = tree_leaves(fresh_dataset[index])
            except Exception:
                return b""  # training raises an error that names the sample
        hashed_values: list[Any] = []
        for leaf in leaves:
            if _is_numeric_array(leaf):
                hashed_values.append(torch.as_tensor(leaf))
            elif isinstance(leaf, _PLAIN_TYPES):
                hashed_values.append(leaf)
        hashes.append(digest(hashed_values))
    is_repeatable = hashes[0] == hashes[1]
    return hashes[0] if is_repeatable else b""


def loader_hash(loaders: Any) -> str:
    """Return the hash of the samples that loaders read, or "" if the samples cannot be accessed."""
    if not isinstance(loaders, list | tuple):
        loaders = [loaders]
    hashes: list[str] = []
    for loader in loaders:
        if isinstance(loader, TensorBatches):
            hashes.append(_hash_of_rows(TensorDataset(*loader.tensors), loader.indices))
        elif isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__"):
            hashes.append(_hash_of_rows(loader.dataset, rows_of(loader)))
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
