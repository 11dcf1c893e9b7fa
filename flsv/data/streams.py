"""Streams of samples, and parts of concatenated data sets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset

from flsv.data.loaders import SeededLoader, worker_generator
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError


class Stream(IterableDataset[Any]):
    """Stream of samples, which each local epoch reads from the beginning, as an epoch does in Lightning.

    If the data set has a method ``set_epoch``, it is called with the round's index, so that the data set can continue
    over the rounds.

    Args:
        dataset: the samples, such as an ``IterableDataset``.
        samples: number of samples in a local epoch, and the client's weight in an average by samples.

    Raises:
        ConfigurationError: ``samples`` is below 1, or the data set is an iterator, which can be read only once.
        RuntimeError: while it is read, if the data set has fewer samples.

    Example:
        >>> len(Stream(range(100), samples=3)), list(Stream(range(100), samples=3))
        (3, [0, 1, 2])
    """

    @checked
    def __init__(self, dataset: Iterable[Any], samples: Count) -> None:
        if isinstance(dataset, Iterator):
            raise ConfigurationError(
                f"Stream: a {type(dataset).__name__} can be read only once, but each local epoch reads a stream from "
                "the beginning. Give an IterableDataset whose __iter__ returns a new iterator."
            )
        self.dataset = dataset
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[Any]:
        num_samples = 0
        for sample in islice(self.dataset, self.samples):
            num_samples += 1
            yield sample
        if num_samples < self.samples:
            raise RuntimeError(
                f"A stream ({type(self.dataset).__name__}) has ended after {num_samples} samples, but its client is "
                f"weighted by Stream(samples={self.samples}). Set samples to the number in a local epoch."
            )

    def set_epoch(self, epoch: int) -> None:
        """Call the data set's method ``set_epoch``, if any, with the round's index."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


class StreamSamples(Dataset[Any]):
    """Samples of a stream in a local epoch, which can be counted, but not read by their indices."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __len__(self) -> int:
        return len(self.stream)

    def __getitem__(self, index: int) -> Any:
        raise ConfigurationError(
            f"The samples of a stream ({type(self.stream.dataset).__name__}) cannot be read by their indices. So they "
            "cannot be labeled, held out, read into memory, changed or valued one by one. Remove the option that does "
            "so, or give a map-style data set."
        )

    def loader(
        self, generator: torch.Generator | None, options: Mapping[str, Any]
    ) -> DataLoader[Any]:
        """Return a loader seeded by ``generator``."""
        if options.get("num_workers", 0) > 1:
            raise ConfigurationError(
                "Each of several workers would yield as many samples of a stream as a local epoch has, also if the "
                "data set divides its samples by get_worker_info. Set num_workers to 1 or 0."
            )
        return SeededLoader(self.stream, generator=worker_generator(generator), **options)


def stream_samples(dataset: IterableDataset[Any]) -> StreamSamples:
    """Return the samples of a stream, which needs a length."""
    if isinstance(dataset, Stream):
        return StreamSamples(dataset)
    try:
        length = len(dataset)  # type: ignore[arg-type]  # some streams have a length
    except (TypeError, NotImplementedError) as error:
        raise ConfigurationError(
            f"{type(dataset).__name__} is a stream without a length, but a client's weight is its number of samples. "
            "Set the number of samples in a local epoch: flsv.data.Stream(dataset, samples=640)."
        ) from error
    return StreamSamples(Stream(dataset, length))


def parts_with_rows(dataset: Any, rows: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Yield the parts of a ``ConcatDataset`` that have some of the rows, each with its own indices of these.

    Any other data set is a single part.
    """
    if not isinstance(dataset, ConcatDataset):
        yield dataset, rows
        return
    # Part i has the rows from first_rows[i] up to first_rows[i + 1], which is not included.
    first_rows = torch.tensor([0, *dataset.cumulative_sizes])
    part_of_row = torch.searchsorted(first_rows, rows, right=True) - 1
    for part in part_of_row.unique().tolist():
        rows_of_part = rows[part_of_row == part]
        yield dataset.datasets[part], rows_of_part - first_rows[part]


def current_length(dataset: Any) -> int:
    """Return a data set's present length. A ``ConcatDataset`` only knows the length that it had at first."""
    if isinstance(dataset, ConcatDataset):
        return sum(map(current_length, dataset.datasets))
    return len(dataset)


def has_streams(dataset: Any) -> bool:
    """Return whether a data set or a part of it is a stream."""
    if isinstance(dataset, ConcatDataset):
        return any(map(has_streams, dataset.datasets))
    return isinstance(dataset, StreamSamples)
