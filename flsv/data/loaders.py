"""Batches of samples: gathered from tensors where data are tensors, by torch's DataLoader otherwise.

Both kinds draw the same permutations from the same generator, so which one serves a data set changes its speed only.

The state of generators that a data set, its transforms or a collate_fn hold depends on everything that was read before,
which a resumed run has not read. So every pass over a loader begins by seeding them: in training by the client, the
round and the local epoch, in evaluation always by the same seed. Each worker gets a stream of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import lightning as L
import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler, Subset, TensorDataset, default_collate

from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import derive_seed


class TensorBatches:
    """Loader that gathers batches from tensors with one ``index_select`` per tensor and batch.

    Args:
        tensors: tensors of equal length ``N`` on one device, as in a ``TensorDataset``.
        indices: which rows, int64 ``[n]``; None for all.
        batch_size: rows per batch.
        drop_last: leave out a last batch that is not full.
        generator: CPU generator that draws a new order for every pass; None: in order.

    Yields:
        Tuples of tensors, each ``[batch_size, ...]``; the last batch may be smaller.

    Example:
        >>> batches = TensorBatches([torch.arange(10)], torch.tensor([1, 3, 5]), batch_size=2)
        >>> len(batches), list(batches)
        (2, [(tensor([1, 3]),), (tensor([5]),)])
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        indices: Tensor | None,
        batch_size: int,
        *,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        self.tensors = tuple(tensors)
        self.indices = torch.arange(len(self.tensors[0])) if indices is None else indices
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.generator = generator

    def __len__(self) -> int:
        full, rest = divmod(len(self.indices), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def rows(self) -> Sequence[Tensor]:
        """Draw the order of a pass and return the rows of each batch, int64 ``[B]`` each."""
        order = self.indices
        if self.generator is not None:
            order = order[torch.randperm(len(order), generator=self.generator)]
        return order.to(self.tensors[0].device).split(self.batch_size)[: len(self)]

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for rows in self.rows():
            yield tuple(tensor.index_select(0, rows) for tensor in self.tensors)


@checked
def make_loader(
    dataset: Dataset,
    indices: Tensor | None = None,
    *,
    batch_size: Count,
    drop_last: bool = False,
    generator: torch.Generator | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    **options: Any,
) -> TensorBatches | DataLoader:
    """Make a loader of a map-style data set, or of some of its samples.

    A ``TensorDataset``, or ``Subset`` of one, with the default ``collate_fn`` is served by :class:`TensorBatches` (then
    ``options`` have no use), anything else by a ``DataLoader``. The numbers of batches and the orders are the same.

    Args:
        dataset: what to read.
        indices: which of its samples, int64 ``[n]``; None for all.
        batch_size: samples per batch.
        drop_last: leave out a last batch that is not full.
        generator: CPU generator that draws a new order for every pass; None: in order. Workers' seeds follow from its
            initial seed.
        collate_fn: as of ``DataLoader``.
        options: further ``DataLoader`` arguments (``num_workers``, ``pin_memory``, ...).

    Raises:
        ConfigurationError: ``batch_size`` below 1.

    Example:
        >>> images, labels = torch.zeros(10, 1, 8, 8), torch.arange(10)
        >>> loader = make_loader(TensorDataset(images, labels), torch.arange(5), batch_size=4)
        >>> type(loader).__name__, [len(y) for x, y in loader]
        ('TensorBatches', [4, 1])
    """
    tensors, rows = tensors_of(dataset, indices, collate_fn)
    if tensors is not None:
        return TensorBatches(tensors, rows, batch_size, drop_last=drop_last, generator=generator)
    collate_fn = collate_fn or default_collate
    subset = dataset if indices is None else Subset(dataset, indices.tolist())
    # A DataLoader draws its workers' seeds before its first order, from the global generator unless it has its own.
    own = torch.Generator().manual_seed(generator.initial_seed() if generator is not None else 0)
    kind = SeededLoader if held_generators(subset, collate_fn) else DataLoader
    # For mypy: a map-style data set has a length.
    sampler: Any = SequentialSampler(subset) if generator is None else _Shuffled(len(subset), generator)  # type: ignore[arg-type]
    return kind(
        subset,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        collate_fn=collate_fn,
        generator=own,
        **options,
    )


def tensors_of(
    dataset: Dataset, indices: Tensor | None, collate_fn: Callable[[list[Any]], Any] | None = None
) -> tuple[tuple[Tensor, ...] | None, Tensor | None]:
    """Return the tensors whose rows make up the batches of ``dataset``, and the indices of these rows (None: all);
    ``(None, None)`` where samples are read one by one."""
    # Exact types: a subclass may do anything in __getitem__.
    while type(dataset) is Subset:
        outer = torch.as_tensor(dataset.indices, dtype=torch.long)
        indices = outer if indices is None else outer[indices]
        dataset = dataset.dataset
    plain = type(dataset) is TensorDataset and collate_fn in (None, default_collate)
    return (dataset.tensors, indices) if plain else (None, None)  # type: ignore[attr-defined]  # plain says what it is


class _Shuffled(Sampler[int]):
    """Sampler of a new order for every pass by one ``randperm``; torch's RandomSampler would draw a second, unused."""

    def __init__(self, length: int, generator: torch.Generator) -> None:
        self.length = length
        self.generator = generator

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.length, generator=self.generator).tolist()


def preload(
    dataset: Dataset, collate_fn: Callable[[list[Any]], Any] | None = None, num_workers: int = 0
) -> TensorDataset:
    """Read the whole of ``dataset`` into memory, so that batches need no Python per sample.

    For data sets that decode or transform each sample anew, always to the same result. Random augmentation would be
    frozen at its first draw: a module's ``on_after_batch_transfer`` can do it.

    Args:
        dataset: map-style; samples are tuples of equally shaped tensors or numbers.
        collate_fn: what turns a list of samples into a tuple of tensors, by default torch's.
        num_workers: processes that read.

    Raises:
        ConfigurationError: samples that do not collate to a tuple of tensors of one length.

    Example:
        >>> class Squares(torch.utils.data.Dataset):
        ...     def __len__(self):
        ...         return 3
        ...     def __getitem__(self, index):
        ...         return torch.tensor([float(index)]), index**2
        >>> preload(Squares()).tensors
        (tensor([[0.],
                [1.],
                [2.]]), tensor([0, 1, 4]))
    """
    if type(dataset) is TensorDataset and collate_fn in (None, default_collate):
        return dataset
    batches = list(make_loader(dataset, batch_size=256, collate_fn=collate_fn, num_workers=num_workers))
    if not all(isinstance(batch, list | tuple) and all(isinstance(x, Tensor) for x in batch) for batch in batches):
        raise ConfigurationError(f"preload: samples of {type(dataset).__name__} do not collate to a tuple of tensors.")
    return TensorDataset(*(torch.cat(fields) for fields in zip(*batches)))


_KINDS = (np.random.RandomState, np.random.Generator, random.Random, torch.Generator)
#: The global generators, which are seeded anyway.
# For mypy: the stubs declare no private generators.
_GLOBAL = (np.random.mtrand._rand, random._inst, torch.default_generator)  # type: ignore[attr-defined]
#: Types that are not searched: data, and objects that refer to everything.
_CLOSED = (str, bytes, int, float, Tensor, np.ndarray, type, L.Trainer, L.LightningModule, L.LightningDataModule)
#: How many objects may lie between a data set and a generator; how many entries of a collection are searched, since
#: lists of file names may be very long.
_DEPTH, _LOOKED_AT = 4, 1000


def held_generators(*holders: Any) -> list[Any]:
    """Find the random generators that objects hold in attributes, of their classes too (MONAI's ``R``), lists, tuples
    and dictionaries; each is returned once. At most four objects may lie between a data set and its generator.

    Example:
        >>> class Cropped(torch.utils.data.Dataset):
        ...     def __init__(self):
        ...         self.transforms = [np.random.RandomState(3)]
        >>> len(held_generators(Cropped()))
        1
    """
    found: dict[int, Any] = {}
    deepest: dict[int, int] = {}

    def look(value: Any, depth: int) -> None:
        if isinstance(value, _KINDS):
            if not any(value is each for each in _GLOBAL):
                found.setdefault(id(value), value)
            return
        depth = _DEPTH + 1 if isinstance(value, Dataset) else depth
        if value is None or isinstance(value, _CLOSED) or depth <= deepest.get(id(value), 0):
            return
        deepest[id(value)] = depth
        for part in _parts(value):
            look(part, depth - 1)

    for holder in holders:
        look(holder, _DEPTH + 1)
    return list(found.values())


def _parts(value: Any) -> list[Any]:
    if isinstance(value, list | tuple | Mapping):
        return list(value.values() if isinstance(value, Mapping) else value)[:_LOOKED_AT]
    of_classes = [part for kind in type(value).__mro__ for part in vars(kind).values() if isinstance(part, _KINDS)]
    return [*getattr(value, "__dict__", {}).values(), *of_classes]


def seed_held(generators: Iterable[Any], seed: int, *path: int | str) -> None:
    """Seed each of the generators with a stream of its own, derived from ``seed`` and ``path``."""
    for place, generator in enumerate(generators):
        derived = derive_seed(seed, "held generator", place, *path)
        if isinstance(generator, np.random.RandomState):
            generator.seed(derived % 2**32)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(derived).state
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(derived)
        else:
            generator.seed(derived)


class SeededLoader(DataLoader):
    """A ``DataLoader`` that seeds the data's random generators at the start of each pass."""

    def _get_iterator(self) -> Any:
        holders, seed = (self.dataset, self.collate_fn), self.generator.initial_seed()
        seed_held(held_generators(*holders), seed)
        init = self.worker_init_fn
        if self.num_workers and getattr(init, "func", None) is not _in_worker:
            self.worker_init_fn = partial(_in_worker, holders, seed, init)
        return super()._get_iterator()


def _in_worker(holders: tuple[Any, ...], seed: int, init: Callable[[int], None] | None, worker: int) -> None:
    """Seed a worker's generators (as ``worker_init_fn``): their copies in several workers would draw the same."""
    seed_held(held_generators(*holders), seed, worker)
    if init is not None:
        init(worker)


@checked
@dataclass(frozen=True)
class Loader:
    """Options of batches, named as ``DataLoader``'s; None takes the wrapped loader's own.

    Args:
        eval_batch_size: samples per evaluation batch; None for the wrapped loader's, else ``batch_size``, and at least
            256 for data held as tensors. It changes no score, except what a module logs as a mean of its batches with a
            ``batch_size`` of its own (or that is no mean of samples, such as a mean over the tokens of each batch).
        drop_last: leave out a client's last training batch if not full; None for the wrapped loader's, else False.
        num_workers: processes that read data that are not tensors; None for the wrapped loader's, else 0.
        pin_memory: likewise; None for the wrapped loader's, else False.
        preload: read every sample once and keep it as tensors; not for data sets that augment at random.
        on_device: whether data held as tensors lie on a CUDA device during a federated fit, where batches are gathered
            without a copy, the same to the bit: if they take at most a quarter of the memory that is free there when
            the fit begins, and neither module has hooks that are handed batches before they are there.

    Raises:
        ConfigurationError: an ``eval_batch_size`` below 1, anything of another type.
    """

    eval_batch_size: Count | None = None
    drop_last: bool | None = None
    num_workers: Annotated[int, Ge(0)] | None = None
    pin_memory: bool | None = None
    preload: bool = False
    on_device: bool = True

    def changes(self) -> dict[str, bool | int]:
        """Return the options that replace those of the source's own loaders."""
        given = {"drop_last": self.drop_last, "num_workers": self.num_workers, "pin_memory": self.pin_memory}
        return {name: value for name, value in given.items() if value is not None}
