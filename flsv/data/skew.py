"""Partitioners whose clients differ in size and classes.

They use given proportions, Dirichlet shares (Hsu et al. 2019), a few classes per client, label-sorted shards (McMahan
et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data", section 3), or a long tail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge
from torch import Generator, Tensor

from flsv.data.partition import Clients, Partitioner, cut, shuffled
from flsv.utilities.declared import Count, NonNegative, Positive, Rules
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import derive_seed

_MAX_DRAWS = 1000


class DirichletPartitioner(Partitioner):
    """Partition of each class over the clients in proportions drawn from ``Dirichlet(alpha, ..., alpha)``.

    With a small ``alpha``, a few clients have most samples of a class. With a large ``alpha``, the partition is close
    to IID. All samples are used. The proportions of all classes are drawn again until each client has ``min_samples``,
    at most 1000 times.

    Args:
        num_clients: number of clients, at least 2.
        alpha: concentration of the Dirichlet distribution, above 0. Common values are 0.1 (strong skew) to 1.
        min_samples: smallest number of samples of a client, at least 1.
        seed: seed of the draws.

    Raises:
        ConfigurationError: at construction: an argument is out of range. At the call: in no draw does every client have
            ``min_samples``.

    Example:
        >>> labels = torch.arange(10).repeat_interleave(100)
        >>> parts = DirichletPartitioner(num_clients=5, alpha=0.3)(labels, num_classes=10)
        >>> sum(len(part) for part in parts)
        1000
    """

    def __init__(
        self, num_clients: Clients, alpha: Positive, min_samples: Count = 1, seed: int | None = None
    ) -> None:
        super().__init__(num_clients, seed)
        self.alpha = alpha
        self.min_samples = min_samples

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: Generator
    ) -> list[Tensor]:
        class_sizes = np.bincount(labels.numpy(), minlength=num_classes)
        # numpy's Dirichlet stays finite at small alpha, where normalized gamma variates all underflow to 0.
        rng = np.random.default_rng(derive_seed(self.seed, "dirichlet"))
        best_minimum = 0  # samples of the smallest client, in the best draw
        for _ in range(_MAX_DRAWS):
            counts = self._draw_counts(class_sizes, rng)
            samples_of_smallest = int(counts.sum(axis=0).min())
            if samples_of_smallest >= self.min_samples:
                counts_by_client = torch.from_numpy(counts.T)
                return _divide_by_class(labels, range(num_classes), generator, counts_by_client)
            best_minimum = max(best_minimum, samples_of_smallest)
        raise ConfigurationError(
            f"{self!r} cannot be met: in each of {_MAX_DRAWS} draws over {len(labels)} samples, a client had fewer "
            f"than {self.min_samples} samples, at best {best_minimum}. Lower min_samples to {best_minimum}, lower "
            "num_clients, or raise alpha, which divides the classes more evenly."
        )

    def _draw_counts(self, class_sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draw the number of samples by class and client, int64 ``[M, n]``."""
        concentrations = np.full(self.num_clients, self.alpha)
        shares = rng.dirichlet(concentrations, size=len(class_sizes))  # [M, n]
        # Rounding cumulative sums keeps each class's total.
        boundaries = np.cumsum(shares, axis=1) * class_sizes[:, None]
        boundaries = np.rint(boundaries).astype(np.int64)
        boundaries[:, -1] = class_sizes
        return np.diff(boundaries, axis=1, prepend=0)


class PathologicalPartitioner(Partitioner):
    """Partition in which every client has exactly ``classes_per_client`` classes.

    A class is divided evenly among its clients. Each client gets the classes that have the fewest clients so far, with
    ties broken at random. So each class has a client if ``num_clients * classes_per_client >= num_classes``. Otherwise
    the samples of some classes are not used.

    Args:
        num_clients: number of clients, at least 2.
        classes_per_client: number of classes of each client, at least 1.
        seed: seed of all random choices.

    Raises:
        ConfigurationError: at the call: ``classes_per_client`` exceeds the number of classes, or a class has fewer
            samples than it has clients.

    Example:
        >>> labels = torch.arange(10).repeat_interleave(100)
        >>> parts = PathologicalPartitioner(num_clients=5, classes_per_client=2)(labels, num_classes=10)
        >>> [len(labels[part].unique()) for part in parts]
        [2, 2, 2, 2, 2]
    """

    def __init__(
        self, num_clients: Clients, classes_per_client: Count, seed: int | None = None
    ) -> None:
        super().__init__(num_clients, seed)
        self.classes_per_client = classes_per_client

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: Generator
    ) -> list[Tensor]:
        classes = labels.unique()
        if self.classes_per_client > len(classes):
            raise ConfigurationError(
                f"{self!r}: the data have {len(classes)} classes only. Lower classes_per_client."
            )
        has_class = self._choose_classes(classes, num_classes, generator)
        num_holders = has_class.sum(0)  # [M], the clients of each class
        class_sizes = torch.bincount(labels, minlength=num_classes)
        for label in classes.tolist():
            if num_holders[label] > class_sizes[label]:
                raise ConfigurationError(
                    f"{self!r}: class {label} has fewer samples than its {num_holders[label]} clients. Lower "
                    "num_clients."
                )

        chosen_classes = num_holders.nonzero().flatten().tolist()
        counts = _even_counts(has_class, class_sizes)
        return _divide_by_class(labels, chosen_classes, generator, counts)

    def _choose_classes(self, classes: Tensor, num_classes: int, generator: Generator) -> Tensor:
        """Return which classes each client has, bool ``[n, M]``."""
        has_class = torch.zeros(self.num_clients, num_classes, dtype=torch.bool)
        for client in range(self.num_clients):
            # A stable sort of a random order: the classes with the fewest clients first, ties at random.
            order = shuffled(classes, generator)
            num_holders = has_class.sum(0)
            order = order[num_holders[order].argsort(stable=True)]
            has_class[client, order[: self.classes_per_client]] = True
        return has_class


def _even_counts(has_class: Tensor, class_sizes: Tensor) -> Tensor:
    """Divide each class evenly among the clients that have it, int64 ``[n, M]``."""
    # With a remainder of r samples, the first r clients of a class have one sample more.
    divisor = has_class.sum(0).clamp(min=1)
    rank_in_class = has_class.cumsum(0) - 1
    has_one_more = rank_in_class < class_sizes % divisor
    return (class_sizes // divisor + has_one_more) * has_class


class ShardPartitioner(Partitioner):
    """Partition of samples sorted by label and cut into equal shards.

    Each client gets ``shards_per_client`` random shards, so that it has about as many classes. A shard may have samples
    of two classes. The clients' numbers of samples differ by at most one sample per shard. All samples are used.

    Args:
        num_clients: number of clients, at least 2.
        shards_per_client: number of shards of each client, at least 1. McMahan et al. use 2.
        seed: seed of all random choices.

    Example:
        >>> labels = torch.arange(10).repeat_interleave(60)
        >>> parts = ShardPartitioner(num_clients=10, shards_per_client=2)(labels, num_classes=10)
        >>> max(len(labels[part].unique()) for part in parts)
        2
    """

    def __init__(
        self, num_clients: Clients, shards_per_client: Count = 2, seed: int | None = None
    ) -> None:
        super().__init__(num_clients, seed)
        self.shards_per_client = shards_per_client

    def partition(
        self,
        labels: Tensor,
        num_classes: int,
        groups: Tensor | None,
        generator: Generator,
    ) -> list[Tensor]:
        num_shards = self.num_clients * self.shards_per_client
        # Shuffled first, so that the order of the data set does not decide which samples of a class share a shard.
        shuffled_samples = shuffled(torch.arange(len(labels)), generator)
        by_class = labels[shuffled_samples].argsort(stable=True)
        shards = shuffled_samples[by_class].tensor_split(num_shards)
        shard_order = torch.randperm(num_shards, generator=generator).tolist()
        parts = []
        for client in range(self.num_clients):
            shards_of_client = shard_order[client :: self.num_clients]
            client_shards = [shards[shard] for shard in shards_of_client]
            parts.append(torch.cat(client_shards))
        return parts


class SizePartitioner(Partitioner):
    """Random partition of all samples into clients of given relative sizes.

    Args:
        proportions: relative size of each client, positive numbers on any scale: with ``[2, 3, 4, 5, 6]`` the clients
            have 2/20 .. 6/20 of the samples, up to one sample each.
        seed: seed of the shuffle.

    Raises:
        ConfigurationError: there are fewer than 2 proportions, or one is not a positive finite number.

    Example:
        >>> [len(part) for part in SizePartitioner([1, 2, 2])(torch.zeros(10, dtype=torch.long), num_classes=1)]
        [2, 4, 4]
    """

    needs_classes = False

    def __init__(self, proportions: list[Positive], seed: int | None = None) -> None:
        super().__init__(len(proportions), seed)
        self.proportions = list(proportions)

    def partition(
        self,
        labels: Tensor,
        num_classes: int,
        groups: Tensor | None,
        generator: Generator,
    ) -> list[Tensor]:
        shares = torch.tensor(self.proportions, dtype=torch.float64)
        order = shuffled(torch.arange(len(labels)), generator)
        return cut(order, shares / shares.sum())


class ProportionPartitioner(Partitioner):
    """Partition given by a matrix with one row per client and one column per class.

    The argument ``of`` chooses the meaning of an entry:

    - ``"class"``: the share of the column's class that the row's client receives. A column sums to at most 1. If it
      sums to less, some samples of the class are not used.
    - ``"client"``: the weight of the column's class among the samples of the row's client. Rows are on any scale: with
      ``[4, 4, 1, 1]`` the client has 80 % of its samples in the first two classes and 20 % in the other two. The
      clients' numbers of samples are set by ``sizes`` and ``total``.

    A row with a single entry has this entry in every column.

    ========================================  ====================================================================
    ShapFed's imbalanced split, 4 clients     ``[[0.7], [0.1], [0.1], [0.1]]``
    ShapFed's heterogeneous one, 2 clients    ``[[1, 0.5, 0.5], [0, 0.5, 0.5]]``
    ShapFed's chest X-rays, 5 hospitals       ``[[.4, 0], [.3, .1], [.2, .2], [.1, .3], [0, .4]]``
    ========================================  ====================================================================

    Args:
        matrix: the entries, ``num_clients`` rows of ``num_classes`` non-negative numbers, or of a single number.
        of: ``"class"`` or ``"client"``: the meaning of an entry, see above.
        sizes: relative numbers of samples of the clients, only with ``of="client"``. None: equal numbers.
        total: number of samples of all clients together, only with ``of="client"``. None: as many as the data allow.
        seed: seed of the random order in which a class's samples are divided among the clients.

    Raises:
        ConfigurationError: ``matrix`` has rows of different lengths or a row of zeros, a column sums to more than 1, or
            the matrix requires more samples than the data have.

    Example:
        >>> labels = torch.arange(2).repeat_interleave(100)
        >>> xrays = ProportionPartitioner([[0.4, 0.0], [0.3, 0.1], [0.2, 0.2], [0.1, 0.3], [0.0, 0.4]])
        >>> [torch.bincount(labels[part], minlength=2).tolist() for part in xrays(labels, num_classes=2)]
        [[40, 0], [30, 10], [20, 20], [10, 30], [0, 40]]
    """

    rules: ClassVar[Rules] = (
        (lambda a: len(a.matrix) > 1, "matrix: expected a row for each of at least 2 clients."),
        (
            lambda a: a.of == "client" or a.sizes is a.total is None,
            "sizes and total need of='client'.",
        ),
        (
            lambda a: a.sizes is None or len(a.sizes) == len(a.matrix),
            "sizes: expected one positive number per client.",
        ),
        (
            lambda a: all(map(any, a.matrix)),
            "matrix: a row has only zeros, but each client needs a sample.",
        ),
        (
            lambda a: a.of != "class" or _have_shares_of_classes(a.matrix),
            "matrix: a column sums to more than 1, but its entries are shares of a class's samples. For shares of a "
            "client's samples, set of='client'.",
        ),
    )

    def __init__(
        self,
        matrix: list[list[NonNegative]],
        of: Literal["class", "client"] = "class",
        sizes: list[Positive] | None = None,
        total: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(len(matrix), seed)
        self.matrix = [[float(entry) for entry in row] for row in matrix]
        # A row with a single entry needs no classes, since the entry is the same for each of them.
        self.needs_classes = any(len(row) != 1 for row in self.matrix)
        self.of = of
        self.sizes = sizes
        self.total = total

    def partition(
        self,
        labels: Tensor,
        num_classes: int,
        groups: Tensor | None,
        generator: Generator,
    ) -> list[Tensor]:
        entries = _entries(self.matrix, num_classes)
        available = torch.bincount(labels, minlength=num_classes)
        counts = self._counts(entries, available)
        return _divide_by_class(labels, range(num_classes), generator, counts)

    def _counts(self, entries: Tensor, available: Tensor) -> Tensor:
        """Return the number of samples by client and class, int64 ``[num_clients, num_classes]``.

        ``entries`` is the matrix with a column for each class, ``available`` the number of samples of each class.
        """
        if self.of == "class":
            boundaries = (entries.cumsum(0) * available).round().long()
            return _sizes_between(boundaries.minimum(available), dim=0)

        mix = self._mix(entries)
        total = self._total_of(mix, available)
        # Rounding cumulative sums keeps each client's number of samples within one of the exact number.
        boundaries = (mix * total).cumsum(1).round().long()
        counts = _sizes_between(boundaries, dim=1)
        for label, num_available in enumerate(available.tolist()):
            counts_of_class = counts[:, label]  # a view
            while counts_of_class.sum() > num_available:  # rounding may have added samples
                counts_of_class[counts_of_class.argmax()] -= 1
        return counts

    def _mix(self, entries: Tensor) -> Tensor:
        """Return each client's and class's share of all samples, float64 ``[n, M]``."""
        sizes = torch.tensor(self.sizes or [1.0] * self.num_clients, dtype=torch.float64)
        client_shares = sizes / sizes.sum()
        class_shares = entries / entries.sum(1, keepdim=True)
        return class_shares * client_shares[:, None]

    def _total_of(self, mix: Tensor, available: Tensor) -> float:
        """Return the number of samples of all clients. Raise ConfigurationError if a class has too few."""
        demand = mix.sum(0)
        largest_total = float((available / demand)[demand > 0].min())
        if self.total is None:
            return largest_total
        if self.total > largest_total:
            raise ConfigurationError(
                f"{self!r}: some classes have too few samples. Lower total to at most {int(largest_total)}."
            )
        return self.total


class LongTail(Partitioner):
    """Partition of a long-tailed subset of the samples by another partitioner.

    Cao et al., "Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss", NeurIPS 2019, section 4: class
    j of C classes (j from 0 to C - 1) keeps n_max * ratio^(-j / (C - 1)) samples, where ratio is ``imbalance_ratio``
    and n_max is the size of the largest class. If the classes are not equally large, n_max is the largest number for
    which every class has enough samples, so that the ratio is exact. This is the first scenario of ShapleyFL (KDD 2023,
    appendix B.3). The server's validation set is held out before, and keeps the original proportions of classes.

    Args:
        partitioner: partitioner that assigns the kept samples to clients.
        imbalance_ratio: number of samples of the largest class divided by that of the smallest, at least 1.
        seed: seed of the random choice of the samples that a class keeps.

    Raises:
        ConfigurationError: at construction: the ratio is below 1. At the call: a class would keep no sample.

    Example:
        >>> from flsv.data import IIDPartitioner, partition_counts
        >>> labels = torch.arange(3).repeat_interleave(100)
        >>> parts = LongTail(IIDPartitioner(2), imbalance_ratio=25)(labels, num_classes=3)
        >>> partition_counts(parts, labels, num_classes=3).sum(0)
        tensor([100,  20,   4])
    """

    def __init__(
        self,
        partitioner: Partitioner,
        imbalance_ratio: Annotated[float, Ge(1)],
        seed: int | None = None,
    ) -> None:
        # The base class's constructor would refuse the num_clients=None of a GroupPartitioner.
        self.partitioner = partitioner
        self.num_clients = partitioner.num_clients
        self.imbalance_ratio = imbalance_ratio
        self.seed = seed

    def partition(
        self,
        labels: Tensor,
        num_classes: int,
        groups: Tensor | None,
        generator: Generator,
    ) -> list[Tensor]:
        samples = self._draw_tail(labels, num_classes, generator)
        if groups is not None:
            groups = groups[samples]
        parts = self.partitioner(labels[samples], num_classes, groups)
        return [samples[part] for part in parts]

    def _draw_tail(self, labels: Tensor, num_classes: int, generator: Generator) -> Tensor:
        """Draw the samples of the long-tailed subset. Return their sorted indices, int64 ``[n]``."""
        num_samples_of_class = torch.bincount(labels, minlength=num_classes)
        classes = num_samples_of_class.nonzero().flatten()  # those with samples
        available = num_samples_of_class[classes]
        # Sizes fall geometrically from the first class to the last, to 1 / imbalance_ratio of the first.
        exponents = torch.linspace(0, 1, len(classes), dtype=torch.float64)
        relative_sizes = self.imbalance_ratio**-exponents
        # The first class can have the largest size for which each class has enough samples.
        size_of_first = float((available / relative_sizes).min())
        sizes = (size_of_first * relative_sizes).round().long()
        sizes = sizes.minimum(available)  # rounding may have added a sample
        if sizes.min() == 0:
            raise ConfigurationError(
                f"{self!r}: the smallest class would keep no sample. Lower imbalance_ratio."
            )
        samples = []
        for label, size in zip(classes.tolist(), sizes.tolist(), strict=True):
            members = (labels == label).nonzero().flatten()
            samples.append(shuffled(members, generator)[:size])
        return torch.cat(samples).sort().values


def _sizes_between(boundaries: Tensor, dim: int) -> Tensor:
    """Return the differences of successive boundaries along ``dim``, the first from 0."""
    shape = list(boundaries.shape)
    shape[dim] = 1
    return boundaries.diff(dim=dim, prepend=torch.zeros(shape, dtype=torch.long))


def _divide_by_class(
    labels: Tensor,
    classes: Iterable[int],
    generator: Generator,
    counts_by_part: Tensor,
) -> list[Tensor]:
    """Divide each class's samples among the clients in random order. ``counts_by_part [n, M]`` are the numbers."""
    parts_by_class = []
    for label in classes:
        members = shuffled(torch.nonzero(labels == label).flatten(), generator)
        sizes = counts_by_part[:, label].tolist()
        members_used = members[: sum(sizes)]
        parts_by_class.append(members_used.split(sizes))
    return [torch.cat(parts) for parts in zip(*parts_by_class)]


def _have_shares_of_classes(matrix: Sequence[Sequence[float]]) -> bool:
    """Return whether the shares of each class sum to at most 1, up to rounding."""
    sums = _entries(matrix).sum(0)
    return bool(sums.max() <= 1 + 1e-6)


def _entries(matrix: Sequence[Sequence[float]], num_classes: int | None = None) -> Tensor:
    """Return the matrix as float64 ``[num_clients, num_classes]``. A single entry is repeated for every class."""
    num_columns = num_classes or max(map(len, matrix))
    rows = []
    for row in matrix:
        if len(row) == 1:  # one entry stands for all classes
            row = list(row) * num_columns
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)
