"""Clients' samples and loaders in the form that their owner knows: the data set's own class, and the loader's.

Who asks a Trainer or a data module for them gets those of the client that trains, or of a coalition's members.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from flsv.data.sources.base import SourceData
from flsv.data.streams import StreamSamples

#: Number of entries of a data set's list or tuple that may be columns of samples.
_MAX_COLUMNS = 100

# ---- data sets


def rows_as(dataset: Any, rows: Tensor) -> Any:
    """Return some rows of a map-style data set as an object of its class.

    Attributes with an entry for each sample, such as labels, have those of the rows. All others are the data set's own,
    so that a method which sets one acts on the data set. Of a class that cannot be extended it is a ``Subset``.

    Args:
        dataset: the data set, of length N.
        rows: indices of samples in increasing order, int64 ``[n]``.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> samples = rows_as(TensorDataset(torch.arange(5)), torch.tensor([1, 3]))
        >>> type(samples).__name__, len(samples), samples.tensors, samples[1]
        ('TensorDataset', 2, (tensor([1, 3]),), (tensor(3),))
    """
    if isinstance(dataset, ConcatDataset):
        first_row = int(rows[0])
        last_row = int(rows[-1])
        for offset, part in _parts_with_offsets(dataset):
            if offset <= first_row and last_row < offset + len(part):
                return rows_as(part, rows - offset)
    if len(rows) == len(dataset):
        return dataset
    if hasattr(dataset, "select") and not isinstance(dataset, Dataset):  # of Hugging Face
        return dataset.select(rows.tolist())
    try:
        return _view(dataset, rows)
    except Exception:  # a class with slots, or whose metaclass or __init_subclass__ refuses
        return Subset(dataset, rows.tolist())


def _parts_with_offsets(dataset: Any) -> Iterator[tuple[int, Any]]:
    """Yield the first row and the data set of each part of a ``ConcatDataset``. Any other data set is one part."""
    if not isinstance(dataset, ConcatDataset):
        yield 0, dataset
        return
    offsets = [0, *dataset.cumulative_sizes]
    yield from zip(offsets, dataset.datasets)


def _view(dataset: Any, rows: Tensor) -> Any:
    """Return an object with the class and the attributes of a data set that has some of its rows."""
    kind: Any = type(dataset)
    num_samples = len(dataset)
    indices = rows.tolist()

    def get_attribute(view: Any, name: str) -> Any:
        value = kind.__getattribute__(view, name)
        if name in vars(dataset):
            return entries_of_rows(value, rows, num_samples)
        return value

    methods: dict[str, Any] = {
        "__getattribute__": get_attribute,
        "__len__": lambda view: len(indices),
        "__getitem__": lambda view, index: dataset[indices[index]],
        "__reduce_ex__": lambda view, protocol: (rows_as, (dataset, rows)),
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
    }
    if hasattr(kind, "__getitems__"):  # batches at once

        def get_items(view: Any, positions: Sequence[int]) -> Any:
            batch_indices = [indices[position] for position in positions]
            return dataset.__getitems__(batch_indices)

        methods["__getitems__"] = get_items

    view_class = type(kind)(kind.__name__, (kind,), methods)
    view = object.__new__(view_class)
    object.__setattr__(view, "__dict__", vars(dataset))
    return view


def entries_of_rows(value: Any, rows: Tensor, num_samples: int) -> Any:
    """Return the entries of some samples, if a value has one for each of ``num_samples``, else the value.

    Example:
        >>> entries_of_rows((["a", "b", "c"], "abc"), torch.tensor([0, 2]), num_samples=3)
        (['a', 'c'], 'abc')
    """
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim > 0 and len(value) == num_samples:
            return _rows_of_array(value, rows)
        return value
    if hasattr(value, "iloc"):  # of pandas
        if len(value) == num_samples:
            return value.iloc[rows.numpy()]
        return value

    if type(value) in (list, tuple):
        if len(value) == num_samples:
            entries = [value[row] for row in rows.tolist()]
        else:
            entries = [entries_of_rows(entry, rows, num_samples) for entry in value]
        return type(value)(entries)
    if type(value) is dict:
        entries_by_key = {}
        for key, entry in value.items():
            entries_by_key[key] = entries_of_rows(entry, rows, num_samples)
        return entries_by_key
    return value


def _rows_of_array(array: Tensor | np.ndarray, rows: Tensor) -> Tensor | np.ndarray:
    if isinstance(array, Tensor):
        return array[rows.to(array.device)]
    return array[rows.numpy()]


# ---- loaders


def loader_as(
    source: SourceData,
    rows: Tensor,
    num_batches: Callable[[], int],
) -> DataLoader[Any]:
    """Return a loader of some training rows like the user's own, or by the options of the clients' loaders.

    ``num_batches`` returns its length, which is the number of batches that are trained on.
    """
    options = source.train_options
    dataset: Any = _stream_of(source.train, rows)
    if dataset is None:  # a stream may have no length, by which `or` would decide
        dataset = rows_as(source.train, rows)
    sampler = None
    if not isinstance(dataset, IterableDataset):
        sampler = _sampler(dataset, source, rows)

    if source.train_loader is None:
        loader: Any = DataLoader(dataset, sampler=sampler, **options)
    else:
        loader = copy.copy(source.train_loader)
        attributes = {**options, "dataset": dataset}
        if loader.batch_size is None:  # the user gave a sampler of batches
            attributes |= {"batch_size": None, "drop_last": False}
        if sampler is not None:
            attributes["sampler"] = sampler
            attributes["batch_sampler"] = BatchSampler(
                sampler,
                batch_size=options["batch_size"],
                drop_last=options["drop_last"],
            )
        vars(loader).update(attributes)

    kind: Any = type(loader)
    methods = {
        "__len__": lambda loader: num_batches(),
        "__module__": kind.__module__,
    }
    loader.__class__ = type(kind.__name__, (kind,), methods)
    return loader


def _stream_of(dataset: Any, rows: Tensor) -> IterableDataset[Any] | None:
    """Return the user's stream that has these rows, or all streams one after the other. None without streams."""
    streams: list[IterableDataset[Any]] = []
    for offset, part in _parts_with_offsets(dataset):
        if isinstance(part, StreamSamples) and offset in rows:
            users_stream = part.stream.dataset
            if isinstance(users_stream, IterableDataset):
                streams.append(users_stream)
            else:
                streams.append(part.stream)
    if not streams:
        return None
    if len(streams) == 1:
        return streams[0]
    return ChainDataset(streams)


def _sampler(
    dataset: Any,
    source: SourceData,
    rows: Tensor,
) -> Sampler[int]:
    """Return the sampler of rows, of the class of the user's own where flsv draws as that does."""
    draws = source.draws
    if draws is not None:
        draws = draws.restricted_to(rows)
        return WeightedRandomSampler(
            draws.weights,  # type: ignore[arg-type]  # tensors are taken, too
            draws.count,
            draws.replacement,
        )

    users_sampler = getattr(source.train_loader, "sampler", None)
    if isinstance(users_sampler, SubsetRandomSampler):
        return SubsetRandomSampler(range(len(dataset)))
    if isinstance(users_sampler, RandomSampler) and dataset is users_sampler.data_source:
        return users_sampler
    return RandomSampler(dataset)


# ---- a data module in a coalition


def parts_of_samples(dataset: Any) -> list[Any]:
    """Return a training data set, the data set of which it is a ``Subset``, and what both have in attributes."""
    parts = _held_by(dataset)
    while type(dataset) is Subset:
        dataset = dataset.dataset
        parts += _held_by(dataset)
    return parts


def _held_by(dataset: Any) -> list[Any]:
    parts = [dataset]
    for value in vars(dataset).values():
        parts.append(value)
        if type(value) in (list, tuple):
            parts += value[:_MAX_COLUMNS]
    return parts


def restrict_to_rows(
    module: L.LightningDataModule,
    dataset: Any,
    rows: Tensor,
) -> None:
    """Let a data module's attributes that are :func:`parts_of_samples` have some rows of the data set only."""
    restricted = _restricted_parts(dataset, rows)
    while type(dataset) is Subset:
        rows = _rows_left(dataset, rows)
        dataset = dataset.dataset
        restricted |= _restricted_parts(dataset, rows)

    attributes = vars(module)
    for name, value in attributes.items():
        attributes[name] = restricted.get(id(value), value)


def _restricted_parts(dataset: Any, rows: Tensor) -> dict[int, Any]:
    """Return some rows of a data set and of what it holds for each sample, by the id of the whole."""
    restricted = {}
    num_samples = len(dataset)
    for part in _held_by(dataset):
        restricted[id(part)] = entries_of_rows(part, rows, num_samples)
    restricted[id(dataset)] = rows_as(dataset, rows)
    return restricted


def _rows_left(subset: Subset[Any], rows: Tensor) -> Tensor:
    """Return the rows of a subset's data set without those that the subset has, and ``rows`` lacks."""
    indices = torch.as_tensor(subset.indices)
    is_left_out = torch.ones(len(indices), dtype=torch.bool)
    is_left_out[rows] = False

    is_left = torch.ones(len(subset.dataset), dtype=torch.bool)  # type: ignore[arg-type]
    is_left[indices[is_left_out]] = False
    return is_left.nonzero()[:, 0]
