"""Hashes of samples: a run is resumed only with equal ones, and samples of two clients with equal ones are copies."""

from __future__ import annotations

import copy
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, Dataset, Subset

from flsv.data.loaders import tensors_of
from flsv.data.streams import parts_with_rows
from flsv.utilities.plain_values import digest, is_plain
from flsv.utilities.reachable import attributes_and_slots
from flsv.utilities.seeding import isolated_rngs

_ROWS_AT_ONCE = 1024  # samples that are hashed at a time
#: In place of the hash of a sample whose inputs are all NaN.
NO_VALUES = 2**64 - 1


def hash_samples(
    dataset: Dataset[Any],
    indices: Tensor,
) -> np.ndarray | None:
    """Hash each sample of a data set at ``indices``, uint64 ``[n]``. One whose inputs are all NaN is NO_VALUES.

    None is returned for a data set that does not hold its samples, but reads or makes them one by one.
    """
    if type(dataset) is Subset:
        outer_indices = torch.as_tensor(dataset.indices, dtype=torch.long)
        return hash_samples(dataset.dataset, outer_indices[indices])
    if type(dataset) is ConcatDataset:
        return _hash_parts(dataset, indices)

    columns = _columns_of(dataset)
    if not any(map(_may_be_inputs, columns)):
        return None
    if len(indices) == 0:
        return np.empty(0, dtype=np.uint64)

    hashes = []
    for rows in indices.split(_ROWS_AT_ONCE):
        bytes_by_column = [_bytes_of_rows(column, rows) for column in columns]
        for parts in zip(*bytes_by_column):
            sample_hash = blake2b(digest_size=8)
            for part in parts:
                sample_hash.update(part)
            hashes.append(sample_hash.digest())
    joined_hashes = b"".join(hashes)
    sample_hashes = np.frombuffer(joined_hashes, dtype=np.uint64)

    # Samples without a value are equal, so that only hashes that occur more than once are looked at.
    values, positions, counts = np.unique(sample_hashes, return_index=True, return_counts=True)
    is_repeated = counts > 1
    repeated_samples = indices[torch.from_numpy(positions[is_repeated])]
    empty_hashes = values[is_repeated][_are_all_nan(columns, repeated_samples)]
    return np.where(np.isin(sample_hashes, empty_hashes), np.uint64(NO_VALUES), sample_hashes)


def content_hash(dataset: Any, indices: Tensor) -> str:
    """Return a hash of the samples at ``indices``. docs/reliability.md says what is hashed."""
    if type(dataset) is ConcatDataset:
        parts = parts_with_rows(dataset, indices)
        return " ".join(content_hash(part, part_rows) for part, part_rows in parts)
    sample_hashes = hash_samples(dataset, indices)
    if sample_hashes is not None:
        return digest(sample_hashes).hex()

    # Samples are read one by one. What is stored beside them is hashed, and one sample.
    while type(dataset) is Subset:
        outer_indices = torch.as_tensor(dataset.indices, dtype=torch.long)
        indices = outer_indices[indices]
        dataset = dataset.dataset
    hashed_values: list[Any] = [_bytes_of_rows(column, indices) for column in _columns_of(dataset)]
    if len(indices):
        hashed_values.append(_hash_of_sample(dataset, int(indices[0])))
    return digest(hashed_values).hex()


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
        hashes.append(digest(list(filter(is_plain, leaves))))
    is_repeatable = hashes[0] == hashes[1]
    return hashes[0] if is_repeatable else b""


def _are_all_nan(columns: list[Any], indices: Tensor) -> np.ndarray:
    """Return whether all inputs of each sample are NaN, bool ``[n]``."""
    are_nan = np.ones(len(indices), dtype=bool)
    for column in filter(_may_be_inputs, columns):
        if isinstance(column, np.ndarray):
            column = torch.from_numpy(column[indices.numpy()])
        elif isinstance(column, Tensor):
            column = column[indices.to(column.device)]
        else:  # texts, files or lists
            return np.zeros_like(are_nan)
        are_nan &= column.isnan().flatten(1).all(1).cpu().numpy()
    return are_nan


def _hash_parts(
    dataset: ConcatDataset[Any],
    indices: Tensor,
) -> np.ndarray | None:
    hashes = np.empty(len(indices), dtype=np.uint64)
    first_index = 0
    for part in dataset.datasets:
        length = len(part)  # type: ignore[arg-type]  # torch's ConcatDataset asks it, too
        end_index = first_index + length
        is_in_part = (indices >= first_index) & (indices < end_index)
        indices_in_part = indices[is_in_part] - first_index
        hashes_of_part = hash_samples(part, indices_in_part)
        if hashes_of_part is None:
            return None
        hashes[is_in_part.numpy()] = hashes_of_part
        first_index = end_index
    return hashes


def _columns_of(dataset: Any) -> list[Any]:
    """Return what a data set holds of its samples, each of its length."""
    tensors, rows = tensors_of(dataset)
    if tensors is not None and rows is None:
        return list(tensors)
    files = _files_of(dataset)
    if files:
        return [files]
    if isinstance(dataset, list | tuple):
        return [dataset] if is_plain(dataset) else []

    columns = []
    num_samples = len(dataset)
    attributes = attributes_and_slots(dataset)
    for _, value in sorted(attributes.items()):
        candidates = [value]
        if _is_sequence(value) and len(value) != num_samples:
            candidates = list(value)  # such as a TensorDataset's tensors
        for candidate in candidates:
            if _is_column(candidate, num_samples):
                columns.append(candidate)
    return columns


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _may_be_inputs(column: Any) -> bool:
    """Return whether a column is more than one number for each sample, as labels are."""
    if _is_sequence(column):
        return True
    return bool(column.ndim > 1)


def _files_of(dataset: Any) -> list[Path]:
    from torchvision.datasets import DatasetFolder

    if not isinstance(dataset, DatasetFolder):
        return []
    return [Path(path) for path, _ in dataset.samples]


def _is_column(value: Any, length: int) -> bool:
    if isinstance(value, np.memmap):
        return False  # it may be larger than the memory
    if _is_sequence(value):
        return len(value) == length and is_plain(value)
    if not isinstance(value, Tensor | np.ndarray):
        return False

    if value.shape[:1] != (length,):
        return False
    if isinstance(value, Tensor):
        return value.layout == torch.strided
    return value.dtype.kind in "biufc"


def _bytes_of_rows(column: Any, rows: Tensor) -> list[bytes]:
    """Return the bytes of a column's entries at ``rows``."""
    if isinstance(column, list | tuple):
        entries = [column[index] for index in rows.tolist()]
        return [_bytes_of_entry(entry) for entry in entries]
    if isinstance(column, np.ndarray):
        return [entry.tobytes() for entry in column[rows.numpy()]]

    rows_on_device = rows.to(column.device)
    tensor = column[rows_on_device].detach().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat_entries = tensor.reshape(len(rows), -1).contiguous()
    bytes_of_entries = flat_entries.view(torch.uint8).numpy()
    return [entry.tobytes() for entry in bytes_of_entries]


def _bytes_of_entry(entry: Any) -> bytes:
    if isinstance(entry, Path):
        return entry.read_bytes()
    return digest([entry])
