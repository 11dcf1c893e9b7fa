"""What the samples hold: hashes of them, inputs included, at the cost of reading once what lies in memory or in files;
and NaN and infinity, found before they make every value NaN, or wrong."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from flsv._lightning.evaluation import each_loader
from flsv.data.groups import client_called
from flsv.data.loaders import TensorBatches, tensors_of
from flsv.data.splits import FederatedSplits
from flsv.errors import ConfigurationError, in_words
from flsv.seeding import isolated_rngs

#: Bytes of files that are read for all holders together; of larger data sets, of evenly spaced files.
FILE_BYTES = 2**28
#: Samples that are read of a data set that does not say where its samples are.
LOOKED_AT = 8
_NUMBERS = "biufcmM"  # NumPy's kinds
_FIRST = torch.zeros(1, dtype=torch.long)
_AT_ONCE = 2**20  # bytes that are gathered at a time
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def content_hashes(dataset: Dataset, holders: Mapping[str, Tensor]) -> dict[str, str]:
    """A hash of each holder's samples.

    Of tensors and arrays all bytes; of a folder of images every file's name and size, and the bytes of all where they
    are below :data:`FILE_BYTES`, else of evenly spaced ones. Any other data set is asked for what it holds by sample:
    the public attributes of its length that are arrays, tensors or lists (of paths: their files, as above), and what it
    wraps. Beyond that, of :data:`LOOKED_AT` holders the first sample is read.

    Args:
        dataset: map-style.
        holders: name to the indices of its samples, int64 ``[n]``.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.arange(6.0).reshape(3, 2))
        >>> before = content_hashes(data, {"a": torch.tensor([0, 1]), "b": torch.tensor([2])})
        >>> data.tensors[0][2, 1] = 7.0
        >>> after = content_hashes(data, {"a": torch.tensor([0, 1]), "b": torch.tensor([2])})
        >>> before["a"] == after["a"], before["b"] == after["b"]
        (True, False)
    """
    held = {name: indices for name, indices in holders.items() if len(indices)}
    result = {}
    for place, (name, indices) in enumerate(held.items()):
        digest = _Digest(FILE_BYTES // len(held))
        known = digest.add_samples(dataset, indices)
        if not known and place % -(-len(held) // LOOKED_AT) == 0:
            digest.add_values(_read(dataset, int(indices[0])))
        result[name] = digest.hexdigest()
    return result


def loader_hash(loaders: Any) -> str:
    """A hash of the samples that a loader, or several, read; the empty string where there are none to be found."""
    parts: list[str] = []
    dataset: Dataset
    for loader in loaders if isinstance(loaders, list | tuple) else [loaders]:
        if isinstance(loader, TensorBatches):
            dataset, indices = torch.utils.data.TensorDataset(*loader.tensors), loader.indices
        elif isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__"):
            dataset, indices = loader.dataset, torch.arange(len(loader.dataset))
        else:
            continue
        parts += content_hashes(dataset, {"": indices}).values()
    return " ".join(parts)


def loader_rows(loaders: Any) -> int | None:
    """How many samples a loader, or several, read; None where one of them does not say."""
    rows = 0
    for loader in each_loader(loaders):
        if isinstance(loader, TensorBatches):
            rows += len(loader.indices)
        elif hasattr(held := getattr(loader, "dataset", None), "__len__"):
            rows += len(held)  # type: ignore[arg-type]
        else:
            return None
    return rows


class _Digest:
    def __init__(self, file_bytes: int) -> None:
        self._digest, self._file_bytes = hashlib.sha256(), file_bytes
        self.hexdigest = self._digest.hexdigest

    def add_samples(self, dataset: Any, indices: Tensor) -> bool:
        """Whether that is all there is to them."""
        tensors, rows = tensors_of(dataset, indices)
        if tensors is not None and rows is not None:
            for tensor in tensors:
                self._add_rows(tensor, rows)
            return True
        if type(dataset) is Subset:
            return self.add_samples(dataset.dataset, torch.as_tensor(dataset.indices, dtype=torch.long)[indices])
        if type(dataset) is ConcatDataset:
            ends = torch.tensor(dataset.cumulative_sizes)
            which = torch.searchsorted(ends, indices, right=True)
            starts = ends - torch.tensor([len(part) for part in dataset.datasets])  # type: ignore[arg-type]
            parts = [int(part) for part in which.unique()]
            known = [self.add_samples(dataset.datasets[i], (indices - starts[i])[which == i]) for i in parts]
            return all(known)
        from torchvision.datasets import DatasetFolder

        if isinstance(dataset, DatasetFolder):
            self._add_list([dataset.samples[i] for i in indices.tolist()])
            return True
        self._add_columns(dataset, indices)
        return False

    def add_values(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self._add_rows(value[None], _FIRST)
            elif isinstance(value, _PLAIN):
                self._digest.update(f"{type(value).__name__}{value!r};".encode())
            elif hasattr(value, "__array__") and np.asarray(value).dtype.kind in _NUMBERS:
                self._add_rows(np.asarray(value)[None], _FIRST)

    def _add_columns(self, dataset: Any, indices: Tensor) -> None:
        for name, column in sorted(getattr(dataset, "__dict__", {}).items()):
            if name.startswith("_"):
                continue
            # What is mapped from a file may be larger than the memory.
            if isinstance(column, str | bytes | Mapping | np.memmap) or not hasattr(column, "__len__"):
                continue
            if hasattr(column, "to_numpy") and not isinstance(column, np.ndarray):
                column = column.to_numpy()  # a table's or one of its columns
            if len(column) != len(dataset):
                continue
            self._digest.update(f"{name}:".encode())
            if isinstance(column, Dataset):
                self.add_samples(column, indices)
            elif isinstance(column, Tensor) or (isinstance(column, np.ndarray) and column.dtype.kind in _NUMBERS):
                self._add_rows(column, indices)
            elif isinstance(column, list | tuple | np.ndarray):
                self._add_list([column[i] for i in indices.tolist()])

    def _add_rows(self, table: Tensor | np.ndarray, rows: Tensor) -> None:
        self._digest.update(f"{table.dtype}{list(table.shape[1:])}{len(rows)}:".encode())
        if 0 in table.shape:
            return
        if isinstance(table, Tensor):
            whole = table.detach().cpu().contiguous().reshape(len(table), -1)
            # A column of one entry counts as contiguous whatever its stride, and bytes of it cannot be viewed then.
            whole = whole if whole.stride(1) == 1 else whole.clone(memory_format=torch.contiguous_format)
            flat = whole.view(torch.uint8).numpy()
        else:
            flat = np.ascontiguousarray(table).reshape(len(table), -1).view(np.uint8)
        for some in rows.cpu().split(max(1, _AT_ONCE // flat.shape[1])):
            self._digest.update(flat[some.numpy()].data)

    def _add_list(self, values: list[Any]) -> None:
        leaves = [leaf for value in values for leaf in tree_leaves(value)]
        files = {
            i: Path(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, str | os.PathLike) and _is_file(leaf)
        }
        sizes = {i: file.stat().st_size for i, file in files.items()}
        every = max(1, -(-sum(sizes.values()) // self._file_bytes))
        self.add_values(leaf for i, leaf in enumerate(leaves) if i not in files)
        for place, (i, file) in enumerate(files.items()):
            # Not the whole path: the same data in another folder are the same.
            self._digest.update(f"{file.parent.name}/{file.name}:{sizes[i]};".encode())
            if place % every == 0:
                self._digest.update(file.read_bytes())


def _is_file(text: Any) -> bool:
    return os.path.isfile(text)


def _read(dataset: Any, index: int) -> list[Any]:
    """A sample's parts; nothing of one that is another each time it is read, or that cannot be read here.

    A shallow copy is read: what a data set opens when it is first read, its workers open themselves.
    """
    try:
        twice = []
        for _ in range(2):
            with isolated_rngs(0, "contents"):
                twice.append(tree_leaves(copy.copy(dataset)[index]))
    except Exception:
        return []  # training says by name what cannot be read
    first, second = (_hash_of(leaves) for leaves in twice)
    return twice[0] if first == second else []


def _hash_of(values: list[Any]) -> str:
    digest = _Digest(0)
    digest.add_values(values)
    return digest.hexdigest()


_ROWS = 1024


def not_finite(dataset: Dataset, indices: Tensor | None = None) -> Tensor:
    """Which samples have an input that is not finite, int64 ``[k]``; none of data that are not held as tensors.

    Args:
        dataset: the last of several tensors are the labels, or what is to be predicted.
        indices: the samples to look at, int64 ``[n]``; None for all.

    Example:
        >>> not_finite(torch.utils.data.TensorDataset(torch.tensor([0.0, torch.nan, 1.0]), torch.zeros(3)))
        tensor([1])
    """
    tensors, rows = tensors_of(dataset, indices)
    held = tensors or ()
    inputs = [tensor for tensor in held[: max(1, len(held) - 1)] if tensor.is_floating_point() or tensor.is_complex()]
    if not inputs:
        return torch.empty(0, dtype=torch.long)
    found = torch.ones(len(inputs[0]) if rows is None else len(rows), dtype=torch.bool)
    # A few rows at a time: isfinite needs several times the memory of what it looks at.
    for start in range(0, len(found), _ROWS):
        part = slice(start, start + _ROWS)
        for x in inputs:
            found[part] &= _finite(x[part] if rows is None else x[rows[part].to(x.device)])
    broken = (~found).nonzero().flatten()
    return broken if indices is None else indices[broken]


def check_inputs(train: Dataset, splits: FederatedSplits, held_out: dict[str, Dataset | None]) -> None:
    """Refuse validation and test samples that are not finite; warn of training samples.

    Training goes on with such a sample in it, as it would in a real federation: its client is named and left out of the
    rounds that it spoils, and ``drop_flagged`` leaves out the sample. An evaluation on one only looks like one.

    Args:
        train: the training data that ``splits`` refer to.
        splits: who holds which sample.
        held_out: validation and test data by name.

    Raises:
        ConfigurationError: an evaluation sample that is not finite.
    """
    broken = not_finite(train)
    if len(broken):
        sets = {"the server's validation set": splits.server_val}
        sets |= {
            f"{client_called(i, splits.names)}'s {name} set": held[name]
            for i, held in enumerate(splits.clients)
            for name in held
        }
        for name, rows in sets.items():
            here = rows[torch.isin(rows, broken)]
            if len(here) and not name.endswith(" train set"):
                raise ConfigurationError(_said(name, here, len(rows), "the training data"))
        rank_zero_warn(_said("the training data", broken, len(train), "them"))  # type: ignore[arg-type]
    for name, dataset in held_out.items():
        found = torch.empty(0) if dataset is None else not_finite(dataset)
        if dataset is not None and len(found):
            raise ConfigurationError(_said(f"the {name} data", found, len(dataset), "them"))  # type: ignore[arg-type]


def _finite(x: Tensor) -> Tensor:
    """Which rows are, bool ``[n]``."""
    # NaN and infinity survive a sum, and one number is looked at faster than all.
    if torch.isfinite(x.sum()):
        return torch.ones(len(x), dtype=torch.bool)
    return torch.isfinite(x).reshape(len(x), -1).all(1).cpu()


def _said(name: str, broken: Tensor, total: int, where: str) -> str:
    return (
        f"{len(broken)} of {total} samples of {name} have NaN or infinite inputs: {in_words(broken.tolist())} of "
        f"{where}. Repair them or leave them out."
    )
