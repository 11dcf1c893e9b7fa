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
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from flsv._lightning.evaluation import each_loader
from flsv.data.groups import client_called
from flsv.data.loaders import TensorBatches, rows_of, tensors_of
from flsv.data.splits import FederatedSplits
from flsv.utilities.digest import digest
from flsv.utilities.errors import ConfigurationError, in_words
from flsv.utilities.seeding import isolated_rngs

#: The contents of files are hashed only if a participant's files have fewer bytes than this in total.
FILE_BYTES = 2**26
_ROWS = 1024  # samples that are processed at a time
_PLAIN = (bool, int, float, complex, str, bytes)


def content_hashes(dataset: Dataset, holders: Mapping[str, Tensor]) -> dict[str, str]:
    """Return ``{participant: hash}`` of the samples at the indices in ``holders``. docs/reliability.md says what is
    hashed.
    """
    return {name: _hash_of(dataset, indices) for name, indices in holders.items() if len(indices)}


def _hash_of(dataset: Any, indices: Tensor) -> str:
    tensors, rows = tensors_of(dataset, indices)
    if tensors is not None and rows is not None:
        return digest([tensor[rows.to(tensor.device)] for tensor in tensors]).hex()
    while type(dataset) is Subset:
        dataset, indices = (
            dataset.dataset,
            torch.as_tensor(dataset.indices, dtype=torch.long)[indices],
        )
    found = _of_files(dataset, indices)
    for name, held in sorted(getattr(dataset, "__dict__", {}).items()):
        # A memory-mapped file may be larger than the memory.
        if (
            _is_numbers(held)
            and not isinstance(held, np.memmap)
            and held.shape[:1] == (len(dataset),)
        ):
            found += [name, torch.as_tensor(held)[indices]]
    return digest([*found, _read(dataset, int(indices[0])) if len(indices) else b""]).hex()


def _of_files(dataset: Any, indices: Tensor) -> list[Any]:
    """Return an image folder's file names and sizes at ``indices``, and hashes of small files. Other data give none."""
    from torchvision.datasets import DatasetFolder

    if not isinstance(dataset, DatasetFolder):
        return []
    files = [Path(dataset.samples[i][0]) for i in indices.tolist()]
    sizes = [file.stat().st_size for file in files]
    # Not the whole path: the same data in another folder are the same.
    names = [(f"{file.parent.name}/{file.name}", size) for file, size in zip(files, sizes)]
    return [
        *names,
        *(sha256(file.read_bytes()).digest() for file in files if sum(sizes) < FILE_BYTES),
    ]


def _is_numbers(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    )


def _read(dataset: Any, index: int) -> bytes:
    """Return the hash of one sample, or an empty one if two readings differ or fail.

    It reads from a shallow copy of the data set, because each worker must open the data set's files itself.
    """
    twice = []
    for _ in range(2):
        with isolated_rngs(0, "contents"):
            try:
                leaves = tree_leaves(copy.copy(dataset)[index])
            except Exception:
                return b""  # training raises an error that names the sample
        known = [leaf for leaf in leaves if isinstance(leaf, _PLAIN) or _is_numbers(leaf)]
        twice.append(
            digest([torch.as_tensor(leaf) if _is_numbers(leaf) else leaf for leaf in known])
        )
    return twice[0] if twice[0] == twice[1] else b""


def loader_hash(loaders: Any) -> str:
    """Return the hash of the samples that loaders read, or "" if the samples cannot be accessed."""
    parts: list[str] = []
    for loader in loaders if isinstance(loaders, list | tuple) else [loaders]:
        if isinstance(loader, TensorBatches):
            parts.append(_hash_of(TensorDataset(*loader.tensors), loader.indices))
        elif isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__"):
            parts.append(_hash_of(loader.dataset, rows_of(loader)))
    return " ".join(parts)


def loader_rows(loaders: Any) -> int | None:
    """Count the samples that one or several loaders read. Return None if a loader has no length."""
    num_rows = 0
    for loader in each_loader(loaders):
        if isinstance(loader, TensorBatches):
            num_rows += len(loader.indices)
        elif isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__"):
            num_rows += len(rows_of(loader))
        elif hasattr(getattr(loader, "dataset", None), "__len__"):
            num_rows += len(loader.dataset)
        else:
            return None
    return num_rows


def not_finite(dataset: Dataset) -> Tensor:
    """Return the indices of samples with NaN or infinite inputs, int64 ``[n]``.

    The last of several tensors is the target and is not checked.
    """
    tensors, rows = tensors_of(dataset, None)
    held = tensors or ()
    inputs = [
        tensor
        for tensor in held[: max(1, len(held) - 1)]
        if tensor.is_floating_point() or tensor.is_complex()
    ]
    if not inputs or not len(inputs[0]):
        return torch.empty(0, dtype=torch.long)
    # A few rows at a time: isfinite needs several times the memory of its argument.
    finite = torch.ones(len(inputs[0]), dtype=torch.bool)
    for x in inputs:
        finite &= torch.cat(
            [torch.isfinite(some).reshape(len(some), -1).all(1).cpu() for some in x.split(_ROWS)]
        )
    return (~(finite if rows is None else finite[rows])).nonzero().flatten()


def check_inputs(
    train: Dataset, splits: FederatedSplits, held_out: dict[str, Dataset | None]
) -> None:
    """Raise ConfigurationError if validation or test samples have NaN or infinite inputs."""
    broken = not_finite(train)
    sets = {"the server's validation set": splits.server_val}
    for client, parts in enumerate(splits.clients):
        sets |= {
            f"{client_called(client, splits.names)}'s {name} set": parts[name]
            for name in ("val", "test")
        }
    found = {name: rows[torch.isin(rows, broken)] for name, rows in sets.items()}
    found |= {
        f"the {name} data": not_finite(data) for name, data in held_out.items() if data is not None
    }
    for name, rows in found.items():
        if len(rows):
            raise ConfigurationError(
                f"{len(rows)} samples of {name} have NaN or infinite inputs: {in_words(rows.tolist())}. Repair them or "
                "leave them out."
            )
