"""Data sets and loaders of some clients' samples, of the classes of the user's own data set and loader.

User code gets them from the Trainer or the data module: those of the client that trains, or of a coalition's members.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
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
    WeightedRandomSampler,
)

from flsv.data.sources.source_data import SourceData
from flsv.data.streams import StreamSamples, parts_with_rows
from flsv.isolation.reachable import attributes_and_slots

#: Longer collections are not searched for columns, which have an item for each sample.
_MAX_COLUMNS = 100

# ---- data sets


def rows_as(dataset: Any, rows: Tensor) -> Any:
    """Return some rows of a map-style data set as an object of the same class.

    Attributes with an item for each sample, such as labels, have the items of the rows. All others are shared, so that
    a method which sets one sets it in the data set. If the class cannot be extended, the result is a ``Subset``.

    Args:
        dataset: the data set, or another object with rows: a list, a tensor, an array, a table.
        rows: indices of samples in increasing order, int64 ``[n]``.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> samples = rows_as(TensorDataset(torch.arange(5)), torch.tensor([1, 3]))
        >>> type(samples).__name__, len(samples), samples.tensors, samples[1]
        ('TensorDataset', 2, (tensor([1, 3]),), (tensor(3),))
    """
    if len(rows) == len(dataset):
        return dataset
    # The type's attributes are looked at, since a data set may pass on those of a table.
    kind = type(dataset)
    indices = rows.tolist()
    if isinstance(dataset, Tensor | np.ndarray):
        return dataset[indices]
    if hasattr(kind, "iloc"):
        return dataset.iloc[indices]
    if kind in (list, tuple):
        return kind(dataset[row] for row in indices)
    if kind is Subset:
        indices_of_rows = [dataset.indices[row] for row in indices]
        return Subset(dataset.dataset, indices_of_rows)
    if hasattr(kind, "select") and not isinstance(dataset, Dataset):  # of Hugging Face
        return dataset.select(indices)
    if kind is ConcatDataset:
        parts = [rows_as(part, part_rows) for part, part_rows in parts_with_rows(dataset, rows)]
        return parts[0] if len(parts) == 1 else ConcatDataset(parts)
    return _view_or_subset(dataset, rows)


def _view_or_subset(dataset: Any, rows: Tensor) -> Any:
    """Return an object with the class and the attributes of a data set, but with only some of its rows."""
    kind: Any = type(dataset)
    try:
        methods = _methods_of_view(dataset, rows)
        view_class = type(kind)(kind.__name__, (kind,), methods)
        return object.__new__(view_class)
    except Exception:
        # Built-in classes cannot be extended, nor some with a metaclass or an __init_subclass__.
        return Subset(dataset, rows.tolist())


def _methods_of_view(dataset: Any, rows: Tensor) -> dict[str, Any]:
    users_class: Any = type(dataset)
    num_samples = len(dataset)
    indices = rows.tolist()

    def get_attribute(view: Any, name: str) -> Any:
        if name in attributes_and_slots(dataset):
            return items_of_rows(getattr(dataset, name), rows, num_samples)
        return users_class.__getattribute__(view, name)

    # The view stores nothing itself, so all methods use the data set.
    methods: dict[str, Any] = {
        "__getattribute__": get_attribute,
        "__setattr__": lambda view, name, value: setattr(dataset, name, value),
        "__len__": lambda view: len(indices),
        "__getitem__": lambda view, index: dataset[indices[index]],
        "__reduce_ex__": lambda view, protocol: (rows_as, (dataset, rows)),  # for pickle
        "__doc__": users_class.__doc__,
        "__module__": users_class.__module__,
    }
    if hasattr(users_class, "__getitems__"):  # reads a batch at once
        methods["__getitems__"] = lambda view, positions: dataset.__getitems__(
            [indices[position] for position in positions]
        )
    return methods


def items_of_rows(value: Any, rows: Tensor, num_samples: int) -> Any:
    """Return the items of some samples, if a value has an item for each of ``num_samples``, else the value.

    Example:
        >>> items_of_rows((["a", "b", "c"], "abc"), torch.tensor([0, 2]), num_samples=3)
        (['a', 'c'], 'abc')
    """
    has_rows = partial(_has_rows, num_samples=num_samples)
    return _with_parts(value, has_rows, lambda part: rows_as(part, rows))


def _has_rows(value: Any, num_samples: int) -> bool:
    """Return whether a value is a list, a tensor, an array, a table or a data set of length ``num_samples``."""
    if isinstance(value, Tensor | np.ndarray):
        return value.shape[:1] == (num_samples,)
    is_list_or_table = type(value) in (list, tuple) or hasattr(type(value), "iloc")
    is_map_style = hasattr(value, "__len__") and not isinstance(value, IterableDataset)
    if is_list_or_table or (isinstance(value, Dataset) and is_map_style):
        return len(value) == num_samples
    return False


def _with_parts(
    value: Any,
    is_part: Callable[[Any], bool],
    change: Callable[[Any], Any],
) -> Any:
    """Replace the parts of a value, perhaps a nested collection, for which ``is_part`` is true."""
    is_leaf = partial(_is_leaf, is_part=is_part)
    if not any(map(is_part, tree_leaves(value, is_leaf=is_leaf))):
        return value  # the same object
    return tree_map(lambda leaf: change(leaf) if is_part(leaf) else leaf, value, is_leaf=is_leaf)


def _is_leaf(node: Any, is_part: Callable[[Any], bool]) -> bool:
    """Return whether a node of a nested collection is a part, or is too long to be searched."""
    is_long = isinstance(node, list | tuple | dict) and len(node) > _MAX_COLUMNS
    return is_long or is_part(node)


# ---- loaders


def loader_as(
    source: SourceData,
    rows: Tensor,
    num_batches: Callable[[], int],
) -> DataLoader[Any]:
    """Return a loader of some training rows of the class of the user's loader, with the options of the clients'
    loaders.

    ``num_batches`` returns its length, the number of batches that are trained on.
    """
    dataset: Any = _stream_of(source.train, rows)
    if dataset is None:  # not `or`, which reads the length that a stream may not have
        dataset = rows_as(source.train, rows)
    sampler = None
    if not isinstance(dataset, IterableDataset):
        sampler = _sampler(dataset, source, rows)
    if source.train_loader is None:
        loader_class = _class_with_length(DataLoader, num_batches)
        return loader_class(dataset, sampler=sampler, **source.train_options)
    return _copied_loader(source.train_loader, dataset, sampler, source.train_options, num_batches)


def _class_with_length(kind: Any, num_batches: Callable[[], int]) -> Any:
    """Return a subclass with the same name, since Python asks an object's class for its length."""
    class_body = {"__len__": lambda self: num_batches(), "__module__": kind.__module__}
    return type(kind)(kind.__name__, (kind,), class_body)


def _copied_loader(
    users_loader: DataLoader[Any],
    dataset: Any,
    sampler: Sampler[int] | None,
    options: Mapping[str, Any],
    num_batches: Callable[[], int],
) -> DataLoader[Any]:
    attributes = {**vars(copy.copy(users_loader)), **options, "dataset": dataset}
    if users_loader.batch_size is None:  # the user gave a sampler of batches
        attributes |= {"batch_size": None, "drop_last": False}
    if sampler is not None:
        attributes["sampler"] = sampler
        attributes["batch_sampler"] = BatchSampler(
            sampler, options["batch_size"], options["drop_last"]
        )
    loader_class = _class_with_length(type(users_loader), num_batches)
    loader: DataLoader[Any] = object.__new__(loader_class)
    vars(loader).update(attributes)  # setattr would raise an error
    return loader


def _stream_of(dataset: Any, rows: Tensor) -> IterableDataset[Any] | None:
    """Return the user's stream with these rows, or several streams chained. None without streams."""
    streams = []
    for part, _ in parts_with_rows(dataset, rows):
        if isinstance(part, StreamSamples):
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


def _sampler(dataset: Any, source: SourceData, rows: Tensor) -> Sampler[int]:
    if source.draws is None:
        return RandomSampler(dataset)
    draws = source.draws.restricted_to(rows)
    return WeightedRandomSampler(
        draws.weights,  # type: ignore[arg-type]  # accepts tensors
        draws.count,
        draws.replacement,
    )


# ---- a data module in a coalition


def parts_of_samples(dataset: Any) -> list[Any]:
    """Return a training data set and all its attributes that have an item for each sample, also of data sets in it."""
    if isinstance(dataset, IterableDataset):
        return [dataset]
    parts: dict[int, tuple[Any, Tensor]] = {}
    _add_parts(dataset, torch.arange(len(dataset)), parts)
    return [part for part, _ in parts.values()]


def _add_parts(
    dataset: Any,
    rows: Tensor,
    parts_by_id: dict[int, tuple[Any, Tensor]],
) -> None:
    """Add a data set and its attributes with an item for each sample to ``parts_by_id``, each with its own indices of
    ``rows``.
    """
    if id(dataset) in parts_by_id:
        return
    parts_by_id[id(dataset)] = (dataset, rows)
    if type(dataset) is Subset:
        _add_parts(dataset.dataset, _rows_kept(dataset, rows), parts_by_id)
    if type(dataset) is ConcatDataset:
        for part, part_rows in parts_with_rows(dataset, rows):
            _add_parts(part, part_rows, parts_by_id)
        no_rows = rows[:0]
        for part in dataset.datasets:  # those that are not added yet
            _add_parts(part, no_rows, parts_by_id)

    for column in _columns(dataset):
        _add_parts(column, rows, parts_by_id)


def _columns(dataset: Any) -> Iterator[Any]:
    """Yield the attributes of a data set, and the parts of nested ones, that have an item for each sample."""
    has_rows = partial(_has_rows, num_samples=len(dataset))
    is_leaf = partial(_is_leaf, is_part=has_rows)
    for value in attributes_and_slots(dataset).values():
        yield from filter(has_rows, tree_leaves(value, is_leaf=is_leaf))


def restrict_to_rows(
    module: L.LightningDataModule,
    dataset: Any,
    rows: Tensor,
) -> None:
    """Restrict those attributes of a data module that are :func:`parts_of_samples` of a data set to some rows."""
    parts: dict[int, tuple[Any, Tensor]] = {}
    _add_parts(dataset, rows, parts)
    attributes = vars(module)
    for name, value in attributes.items():
        attributes[name] = _with_parts(
            value,
            is_part=lambda part: id(part) in parts,
            change=lambda part: rows_as(*parts[id(part)]),
        )


def attributes_of_samples(module: L.LightningDataModule, dataset: Any) -> list[str]:
    """Return the names of those attributes of a data module that hold :func:`parts_of_samples` of a data set."""
    ids = set(map(id, parts_of_samples(dataset)))
    is_leaf = partial(_is_leaf, is_part=lambda part: id(part) in ids)
    names = []
    for name, value in vars(module).items():
        if not ids.isdisjoint(map(id, tree_leaves(value, is_leaf=is_leaf))):
            names.append(name)
    return names


def _rows_kept(subset: Subset[Any], rows: Tensor) -> Tensor:
    """Return the rows of a subset's data set, without those samples of the subset that are not in ``rows``."""
    indices = torch.as_tensor(subset.indices)
    is_removed = torch.ones(len(indices), dtype=torch.bool)
    is_removed[rows] = False

    is_kept = torch.ones(len(subset.dataset), dtype=torch.bool)  # type: ignore[arg-type]
    is_kept[indices[is_removed]] = False
    return is_kept.nonzero()[:, 0]
