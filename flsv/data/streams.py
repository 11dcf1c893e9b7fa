"""Parts of a data set that a training loader reads: samples by their numbers, or a stream, one after the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset

from flsv.data.loaders import SeededLoader
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError


class Stream(IterableDataset[Any]):
    """Stream of samples, which every local epoch begins anew, as an epoch does in Lightning.

    A data set that goes on over the rounds has a method ``set_epoch``, which is called with the round's index.

    Args:
        dataset: the samples, such as an ``IterableDataset``.
        samples: number of samples in a local epoch, and the client's weight in an average by samples.

    Raises:
        ConfigurationError: ``samples`` is below 1, or the data set cannot be begun anew, as an iterator.
        RuntimeError: while it is read, if the data set has fewer samples.

    Example:
        >>> len(Stream(range(100), samples=3)), list(Stream(range(100), samples=3))
        (3, [0, 1, 2])
    """

    @checked
    def __init__(self, dataset: Iterable[Any], samples: Count) -> None:
        if isinstance(dataset, Iterator):
            raise ConfigurationError(
                f"Stream: a {type(dataset).__name__} is read only once, and each local epoch begins a stream anew. "
                "Give an IterableDataset whose __iter__ returns a new iterator."
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
                f"a stream ({type(self.dataset).__name__}) has ended after {num_samples} of {self.samples} samples, by "
                "which its client is weighted. Announce as many as a local epoch has."
            )

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set the round's index, if it has this method."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


class StreamSamples(Dataset[Any]):
    """Samples of a stream in a local epoch, which can be counted only."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __len__(self) -> int:
        return len(self.stream)

    def __getitem__(self, index: int) -> Any:
        raise ConfigurationError(
            f"the samples of a stream ({type(self.stream.dataset).__name__}) cannot be read by number, and so not be "
            "labeled, held out, read into memory, changed or valued one by one. Leave that out, or give a map-style "
            "data set."
        )

    def loader(
        self, generator: torch.Generator | None, options: Mapping[str, Any]
    ) -> DataLoader[Any]:
        """Return a loader seeded by ``generator``."""
        if options.get("num_workers", 0) > 1:
            raise ConfigurationError(
                "Several workers would each read a stream from its beginning. Set num_workers to 1 or 0."
            )
        seed = 0
        if generator is not None:
            seed = generator.initial_seed()
        return SeededLoader(self.stream, generator=torch.Generator().manual_seed(seed), **options)


def stream_samples(dataset: IterableDataset[Any]) -> StreamSamples:
    """Return the samples of a stream that knows its length."""
    if isinstance(dataset, Stream):
        return StreamSamples(dataset)
    try:
        length = len(dataset)  # type: ignore[arg-type]  # some have a length
    except (TypeError, NotImplementedError) as error:
        raise ConfigurationError(
            f"{type(dataset).__name__} is a stream of unknown length, and a client's weight is its number of samples. "
            "Say how many a local epoch reads: flsv.data.Stream(dataset, samples=640)."
        ) from error
    return StreamSamples(Stream(dataset, length))


def part_of(dataset: Any, row: int) -> Any:
    """Return the data set within a ``ConcatDataset`` that has a row."""
    while isinstance(dataset, ConcatDataset):
        sizes_so_far = dataset.cumulative_sizes
        part_index = bisect_right(sizes_so_far, row)
        if part_index > 0:
            row -= sizes_so_far[part_index - 1]
        dataset = dataset.datasets[part_index]
    return dataset


def parts_with_rows(dataset: Any, rows: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Yield each part of a ``ConcatDataset`` with some of the rows, by its own numbers. Others are one part."""
    if not isinstance(dataset, ConcatDataset):
        yield dataset, rows
        return
    first_rows = [0, *dataset.cumulative_sizes]
    end_rows = torch.tensor(dataset.cumulative_sizes)
    part_numbers = torch.searchsorted(end_rows, rows, right=True)
    for part_number in part_numbers.unique().tolist():
        rows_of_part = rows[part_numbers == part_number]
        yield dataset.datasets[part_number], rows_of_part - first_rows[part_number]


def has_streams(dataset: Any) -> bool:
    """Return whether a data set, or a part of it, is a stream."""
    if isinstance(dataset, ConcatDataset):
        return any(map(has_streams, dataset.datasets))
    return isinstance(dataset, StreamSamples)
