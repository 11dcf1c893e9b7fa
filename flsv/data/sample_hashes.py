"""Hashes of samples, by which changed data of a resumed run and equal samples of two clients are found."""

from __future__ import annotations

import copy
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from flsv.data.loaders import TensorBatches, rows_of, tensors_of
from flsv.data.streams import parts_with_rows
from flsv.utilities.plain_values import digest, is_plain
from flsv.utilities.reachable import attributes_and_slots
from flsv.utilities.seeding import isolated_rngs

_ROWS_AT_ONCE = 1024  # samples that are hashed at a time
#: Hash of all samples whose inputs are all NaN.
NO_VALUES = 2**64 - 1


def hash_samples(
    dataset: Dataset[Any],
    indices: Tensor,
) -> np.ndarray | None:
    """Return the hash of each sample at ``indices``, uint64 ``[n]``, or NO_VALUES if all inputs of a sample are NaN.

    Return None if the data set does not store its samples, but reads or makes them one by one.
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

    # Samples without values have equal hashes. So NaN is looked for only where a hash occurs more than once.
    values, positions, counts = np.unique(sample_hashes, return_index=True, return_counts=True)
    is_repeated = counts > 1
    repeated_samples = indices[torch.from_numpy(positions[is_repeated])]
    empty_hashes = values[is_repeated][_are_all_nan(columns, repeated_samples)]
    return np.where(np.isin(sample_hashes, empty_hashes), np.uint64(NO_VALUES), sample_hashes)


def content_hash(dataset: Any, indices: Tensor) -> str:
    """Return one hash of all samples at ``indices``. docs/reliability.md says what is hashed."""
    if type(dataset) is ConcatDataset:
        parts = parts_with_rows(dataset, indices)
        return " ".join(content_hash(part, part_rows) for part, part_rows in parts)
    sample_hashes = hash_samples(dataset, indices)
    if sample_hashes is not None:
        return digest(sample_hashes).hex()

    # The data set reads its samples one by one. Only one sample, and what is stored beside the samples, is hashed.
    while type(dataset) is Subset:
        outer_indices = torch.as_tensor(dataset.indices, dtype=torch.long)
        indices = outer_indices[indices]
        dataset = dataset.dataset
    hashed_values: list[Any] = [_bytes_of_rows(column, indices) for column in _columns_of(dataset)]
    if len(indices):
        hashed_values.append(_hash_of_sample(dataset, int(indices[0])))
    return digest(hashed_values).hex()


def loader_hash(loaders: Any) -> str:
    """Return a hash of the samples that loaders read, or "" if these cannot be read by index."""
    if not isinstance(loaders, list | tuple):
        loaders = [loaders]
    hashes: list[str] = []
    for loader in loaders:
        if isinstance(loader, TensorBatches):
            hashes.append(content_hash(TensorDataset(*loader.tensors), loader.indices))
        elif isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__"):
            hashes.append(content_hash(loader.dataset, rows_of(loader)))
    return " ".join(hashes)


def _hash_of_sample(dataset: Any, index: int) -> bytes:
    """Return the hash of one sample, or an empty one if the sample changes from one reading to the next."""
    hashes = []
    for _ in range(2):
        with isolated_rngs(0, "contents"):
            try:
                # A data set may open its file at the first reading, which a worker has to do by itself.
                copied_dataset = copy.copy(dataset)
                leaves = tree_leaves(copied_dataset[index])
            except Exception:
                return b""  # training raises an error that names the sample
        hashes.append(digest(list(filter(is_plain, leaves))))
    is_repeatable = hashes[0] == hashes[1]
    return hashes[0] if is_repeatable else b""


def _are_all_nan(columns: list[Any], indices: Tensor) -> np.ndarray:
    are_nan = np.ones(len(indices), dtype=bool)
    for column in filter(_may_be_inputs, columns):
        if isinstance(column, np.ndarray):
            column = torch.from_numpy(column[indices.numpy()])
        elif isinstance(column, Tensor):
            column = column[indices.to(column.device)]
        else:  # texts, files and lists are not checked
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
    """Return the tensors, arrays and lists of a data set that have one item for each sample."""
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
            candidates = list(value)  # as the tensors of a subclass of TensorDataset
        for candidate in candidates:
            if _is_column(candidate, num_samples):
                columns.append(candidate)
    return columns


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _may_be_inputs(column: Any) -> bool:
    """Return whether a column has more than one number for each sample. Labels have one."""
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
        return False  # a file may be larger than the memory
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
    if isinstance(column, list | tuple):
        items = [column[index] for index in rows.tolist()]
        return [_bytes_of_item(item) for item in items]
    if isinstance(column, np.ndarray):
        return [item.tobytes() for item in column[rows.numpy()]]

    rows_on_device = rows.to(column.device)
    tensor = column[rows_on_device].detach().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat_items = tensor.reshape(len(rows), -1).contiguous()
    bytes_of_items = flat_items.view(torch.uint8).numpy()
    return [item.tobytes() for item in bytes_of_items]


def _bytes_of_item(item: Any) -> bytes:
    if isinstance(item, Path):
        return item.read_bytes()
    return digest([item])
