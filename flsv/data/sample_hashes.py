"""Hashes of samples, by which changed data of a resumed run and equal samples of two clients are found."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from flsv.data.loaders import samples_of, tensors_of
from flsv.data.streams import parts_with_rows
from flsv.isolation.reachable import attributes_and_slots
from flsv.utilities.plain_values import digest, is_plain
from flsv.utilities.seeding import isolated_rngs

_ROWS_AT_ONCE = 1024  # samples that are hashed at a time


def hash_samples(dataset: Dataset[Any], indices: Tensor) -> np.ndarray | None:
    """Return the hash of each sample at ``indices``, uint64 ``[n]``.

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
        for parts_of_sample in zip(*bytes_by_column):
            hashes.append(_hash_of_parts(parts_of_sample))
    return np.frombuffer(b"".join(hashes), dtype=np.uint64)


def hash_samples_and_inputs(
    dataset: Dataset[Any], indices: Tensor
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the hashes of :func:`hash_samples`, and those of samples without their targets, uint64 ``[n]`` each.

    The latter are None unless samples are pairs of tensors, inputs and a target.
    """
    tensors = dataset.tensors if type(dataset) is TensorDataset else ()
    if len(tensors) == 2 and _may_be_inputs(tensors[0]):
        inputs, targets = tensors
        return _hash_pairs(inputs, targets, indices)
    return hash_samples(dataset, indices), None


def _hash_pairs(inputs: Tensor, targets: Tensor, indices: Tensor) -> tuple[np.ndarray, np.ndarray]:
    hashes = []
    input_hashes = []
    for rows in indices.split(_ROWS_AT_ONCE):
        bytes_of_inputs = _bytes_of_rows(inputs, rows)
        bytes_of_targets = _bytes_of_rows(targets, rows)
        for input_bytes, target_bytes in zip(bytes_of_inputs, bytes_of_targets):
            row_hash = blake2b(input_bytes, digest_size=8)
            input_hashes.append(row_hash.digest())
            row_hash.update(target_bytes)
            hashes.append(row_hash.digest())
    return (
        np.frombuffer(b"".join(hashes), dtype=np.uint64),
        np.frombuffer(b"".join(input_hashes), dtype=np.uint64),
    )


def forms_of(dataset: Any) -> set[str]:
    """Return the types and shapes of what is hashed of each sample, of each part of a concatenation.

    Samples of two data sets with different forms have different hashes, even if they are the same.
    """
    if type(dataset) is Subset:
        return forms_of(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return set().union(*map(forms_of, dataset.datasets))
    forms = []
    for column in _columns_of(dataset):
        if _is_sequence(column):
            forms.append(type(column[0]).__name__ if len(column) else "")
        else:
            forms.append(f"{column.dtype} {list(column.shape[1:])}")
    return {", ".join(forms)}


def _hash_of_parts(parts: Iterable[bytes]) -> bytes:
    sample_hash = blake2b(digest_size=8)
    for part in parts:
        sample_hash.update(part)
    return sample_hash.digest()


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
    columns = _columns_of(dataset)
    hashed_values: list[Any] = [_bytes_of_rows(column, indices) for column in columns]
    if len(indices):
        hashed_values.append(_hash_of_sample(dataset, int(indices[0])))
    return digest(hashed_values).hex()


def loader_hash(loaders: Any) -> str:
    """Return a hash of the samples that loaders read, or "" if these cannot be read by index."""
    if not isinstance(loaders, list | tuple):
        loaders = [loaders]
    hashes = []
    for loader in loaders:
        dataset, rows = samples_of(loader)
        if rows is not None:
            hashes.append(content_hash(dataset, rows))
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


def _hash_parts(
    dataset: ConcatDataset[Any],
    indices: Tensor,
) -> np.ndarray | None:
    sorted_indices, order = indices.sort()
    hashes = [np.empty(0, dtype=np.uint64)]
    for part, rows in parts_with_rows(dataset, sorted_indices):
        hashes_of_part = hash_samples(part, rows)
        if hashes_of_part is None:
            return None
        hashes.append(hashes_of_part)
    return np.concatenate(hashes)[order.argsort().numpy()]


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
