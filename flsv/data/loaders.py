"""Loaders of batches: one that gathers batches from tensors, and torch's DataLoader for all other data.

Both draw the same permutations from the same generator, so that the kind of loader changes only the speed.

A data set, its transforms or a collate_fn may have random generators, whose state depends on all samples read before. A
resumed run has not read these samples. So these generators are seeded at the beginning of each pass over a loader: in
training by the client, the round and the local epoch, in evaluation always with the same seed. Each worker has its own
seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import lightning as L
import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, TensorDataset, default_collate

from flsv.isolation.reachable import find_generators
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.plain_values import digest
from flsv.utilities.seeding import seed_generators


@dataclass(frozen=True)
class WeightedDraws:
    """Draws of an epoch's samples by weights, as torch's ``WeightedRandomSampler`` makes them.

    Args:
        weights: weight of each sample, float64 ``[n]``.
        count: number of samples in an epoch.
        replacement: whether a sample may be drawn again.
    """

    weights: Tensor
    count: int
    replacement: bool

    def restricted_to(self, indices: Tensor) -> WeightedDraws:
        """Restrict the draws to the samples ``indices``. The epoch is shortened in proportion."""
        count = round(self.count * len(indices) / len(self.weights))
        if len(indices):
            count = max(1, count)
        return WeightedDraws(self.weights[indices], count, self.replacement)

    def describe(self) -> str:
        digest_of_weights = digest([self.weights, self.replacement]).hex()
        return f"{self.count} draws by weights {digest_of_weights[:12]}"


def drawn_order(
    length: int, generator: torch.Generator, draws: WeightedDraws | None = None
) -> Tensor:
    """Draw the order of an epoch's samples, int64: a permutation of ``length``, or weighted ``draws``."""
    if draws is None:
        return torch.randperm(length, generator=generator)
    return torch.multinomial(draws.weights, draws.count, draws.replacement, generator=generator)


class TensorBatches:
    """Loader that gathers batches from tensors with one ``index_select`` per tensor and batch.

    Args:
        tensors: tensors of equal length ``N`` on one device, as in a ``TensorDataset``.
        indices: indices of the rows to read, int64 ``[n]``. None: all rows.
        batch_size: rows per batch.
        drop_last: whether to drop a last batch that is not full.
        generator: CPU generator that draws a new order of the rows for each pass. None: the order of ``indices``.
        draws: weights with which ``generator`` draws the rows of a pass. None: each row once.

    Yields:
        Tuples of tensors, each ``[batch_size, ...]``. The last batch may be smaller.

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
        draws: WeightedDraws | None = None,
    ) -> None:
        self.tensors = tuple(tensors)
        if indices is None:
            indices = torch.arange(len(self.tensors[0]))
        self.indices = indices
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.generator = generator
        self.draws = draws

    def __len__(self) -> int:
        num_rows = len(self.indices) if self.draws is None else self.draws.count
        if self.drop_last:
            return num_rows // self.batch_size
        return math.ceil(num_rows / self.batch_size)

    def rows(self) -> Sequence[Tensor]:
        """Draw the order of one pass. Return the row indices of each batch, int64 ``[batch_size]``."""
        order = self.indices
        if self.generator is not None:
            order = order[drawn_order(len(order), self.generator, self.draws)]
        batches = order.to(self.tensors[0].device).split(self.batch_size)
        return batches[: len(self)]

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for rows in self.rows():
            yield tuple(tensor.index_select(0, rows) for tensor in self.tensors)


@checked
def make_loader(
    dataset: Dataset[Any],
    indices: Tensor | None = None,
    *,
    batch_size: Count,
    drop_last: bool = False,
    generator: torch.Generator | None = None,
    draws: WeightedDraws | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    **options: Any,
) -> TensorBatches | DataLoader[Any]:
    """Make a loader of a map-style data set, or of some of its samples.

    It is a :class:`TensorBatches`, which ignores ``options``, for a ``TensorDataset`` or a ``Subset`` of one with the
    default ``collate_fn``, and else a ``DataLoader``. Both give the same samples in the same order.

    Args:
        dataset: map-style data set to read.
        indices: indices of the samples to read, int64 ``[n]``. None: all samples.
        batch_size: see :class:`TensorBatches`, as for the next three.
        drop_last: see there.
        generator: see there. The seeds of worker processes are derived from its initial seed.
        draws: see there.
        collate_fn: function that makes a batch of a list of samples. None: torch's default.
        options: further ``DataLoader`` arguments (``num_workers``, ``pin_memory``, ...).

    Raises:
        ConfigurationError: ``batch_size`` is below 1.

    Example:
        >>> images, labels = torch.zeros(10, 1, 8, 8), torch.arange(10)
        >>> loader = make_loader(TensorDataset(images, labels), torch.arange(5), batch_size=4)
        >>> type(loader).__name__, [len(y) for x, y in loader]
        ('TensorBatches', [4, 1])
    """
    tensors, rows = tensors_of(dataset, indices, collate_fn)
    if tensors is not None:
        return TensorBatches(
            tensors, rows, batch_size, drop_last=drop_last, generator=generator, draws=draws
        )
    if indices is None:
        indices = torch.arange(len(dataset))  # type: ignore[arg-type]  # map-style: has a length
    return SeededLoader(
        dataset,
        batch_size=batch_size,
        sampler=_RowSampler(indices, generator, draws),
        drop_last=drop_last,
        collate_fn=collate_fn or default_collate,
        generator=worker_generator(generator),
        **options,
    )


def worker_generator(generator: torch.Generator | None) -> torch.Generator:
    """Return a generator from which a ``DataLoader`` draws its workers' seeds.

    It has the initial seed of ``generator``, by default 0. Without it, the loader would change the global generator.
    """
    seed = 0 if generator is None else generator.initial_seed()
    return torch.Generator().manual_seed(seed)


def loader_of_batches(
    dataset: Dataset[Any], batches: list[list[int]], options: Mapping[str, Any]
) -> DataLoader[Any]:
    """Make a loader of given batches, lists of indices. Of ``options``, those are used that concern samples."""
    return SeededLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=options.get("collate_fn") or default_collate,
        num_workers=options.get("num_workers", 0),
        worker_init_fn=options.get("worker_init_fn"),
        generator=worker_generator(None),
    )


def has_default_collate(options: Mapping[str, Any]) -> bool:
    """Return whether ``DataLoader`` options have no ``collate_fn``, or torch's."""
    return options.get("collate_fn") in (None, default_collate)


def tensors_of(
    dataset: Dataset[Any],
    indices: Tensor | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> tuple[tuple[Tensor, ...] | None, Tensor | None]:
    """Return the tensors ``[N, ...]`` of a data set, and the row indices to read (None: all).

    Return ``(None, None)`` if the data set has to be read sample by sample.
    """
    # Exact types, since a subclass may return other samples from __getitem__.
    while type(dataset) is Subset:
        subset_indices = torch.as_tensor(dataset.indices, dtype=torch.long)
        indices = subset_indices if indices is None else subset_indices[indices]
        dataset = dataset.dataset
    if type(dataset) is TensorDataset and collate_fn in (None, default_collate):
        return dataset.tensors, indices
    return None, None


class _RowSampler(Sampler[int]):
    """Sampler of a data set's rows. Unlike torch's RandomSampler, it draws only one order for each pass."""

    def __init__(
        self, rows: Tensor, generator: torch.Generator | None, draws: WeightedDraws | None
    ) -> None:
        self.rows = rows
        self.generator = generator
        self.draws = draws

    def __len__(self) -> int:
        return len(self.rows) if self.draws is None else self.draws.count

    def __iter__(self) -> Iterator[int]:
        rows = self.rows
        if self.generator is not None:
            rows = rows[drawn_order(len(rows), self.generator, self.draws)]
        yield from rows.tolist()


def samples_of(loader: Any) -> tuple[Any, Tensor | None]:
    """Return a loader's data set, and the indices of the samples that it reads, int64 ``[n]``.

    The indices are None if the data set has no length.
    """
    if isinstance(loader, TensorBatches):
        return TensorDataset(*loader.tensors), loader.indices
    dataset: Any = getattr(loader, "dataset", None)
    if not hasattr(dataset, "__len__"):
        return dataset, None
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, _RowSampler):
        return dataset, sampler.rows
    return dataset, torch.arange(len(dataset))


def preload(dataset: Dataset[Any], num_workers: int = 0) -> TensorDataset:
    """Read all samples into memory as tensors. Random augmentation is applied only once."""
    if type(dataset) is TensorDataset:
        return dataset  # its samples are tensors already
    loader = make_loader(dataset, batch_size=256, num_workers=num_workers)
    batches = list(loader)
    first_batch = batches[0]
    is_tuple = isinstance(first_batch, list | tuple)
    if not is_tuple or not all(isinstance(field, Tensor) for field in first_batch):
        raise ConfigurationError(
            f"Loader(preload=True) needs samples that torch collates to a tuple of tensors, but those of "
            f"{type(dataset).__name__} do not. Set preload=False."
        )
    batches_by_column = zip(*batches, strict=True)
    return TensorDataset(*map(torch.cat, batches_by_column))


#: Types that are not searched for generators: they hold data, or refer to many other objects.
_CLOSED_TYPES = (Tensor, np.ndarray, L.Trainer, L.LightningModule, L.LightningDataModule)


class SeededLoader(DataLoader[Any]):
    """``DataLoader`` that seeds the random generators of its data set and ``collate_fn`` at the start of each pass.

    These are all generators that the two refer to, such as those of MONAI's transforms in a ``Compose``.
    """

    def _get_iterator(self) -> Any:
        random_objects = self.dataset, self.collate_fn
        seed = self.generator.initial_seed()
        generators = find_generators(*random_objects, closed=_CLOSED_TYPES)
        seed_generators(generators, seed)

        # Each worker has copies of the generators, which have to be seeded before the user's worker_init_fn.
        users_init = self.worker_init_fn
        is_replaced = getattr(users_init, "func", None) is _seed_worker
        if generators and self.num_workers and not is_replaced:
            self.worker_init_fn = partial(_seed_worker, random_objects, seed, users_init)
        return super()._get_iterator()


def _seed_worker(
    random_objects: tuple[Any, ...],
    seed: int,
    users_init: Callable[[int], None] | None,
    worker: int,
) -> None:
    generators = find_generators(*random_objects, closed=_CLOSED_TYPES)
    seed_generators(generators, seed, worker)
    if users_init is not None:
        users_init(worker)


@checked
@dataclass(frozen=True)
class Loader:
    """Options of the loaders, most with ``DataLoader``'s names.

    If an option is None, that of a wrapped data module's loader is used.

    Args:
        eval_batch_size: samples per evaluation batch. None: that of the wrapped loader, else ``batch_size``, and at
            least 256 if the data are tensors. Scores that are means over samples do not depend on it. Scores do that
            the module logs with its own ``batch_size``, and means over something else, such as tokens.
        drop_last: whether to drop a client's last training batch if it is not full. None: as the wrapped loader, else
            False.
        num_workers: number of processes that read data that are not tensors. None: as the wrapped loader, else 0.
        pin_memory: whether batches of data that are not tensors are copied to pinned memory. None: as the wrapped
            loader, else False.
        preload: whether to read each sample once and keep it in tensors. Not for data sets that augment at random. A
            ``collate_fn`` is an error.
        on_device: whether data that are tensors are moved to the CUDA device for a federated fit, with bitwise equal
            results. They are moved only if they take at most a quarter of the memory that is free when the fit begins,
            and if neither the model nor the data module overrides a hook for batches that are not yet on the device.

    Raises:
        ConfigurationError: ``eval_batch_size`` is below 1, or an argument has another type.
    """

    eval_batch_size: Count | None = None
    drop_last: bool | None = None
    num_workers: Annotated[int, Ge(0)] | None = None
    pin_memory: bool | None = None
    preload: bool = False
    on_device: bool = True

    def changes(self) -> dict[str, bool | int]:
        """Return the ``DataLoader`` options that are not None, which replace those of the source's loaders."""
        changes = {}
        for name in ("drop_last", "num_workers", "pin_memory"):
            value = getattr(self, name)
            if value is not None:
                changes[name] = value
        return changes
