"""Partition of samples among server and clients: base class, simple partitioners, counts, plots, and splits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
from annotated_types import Ge, Lt
from lightning.pytorch.utilities import rank_zero_warn
from torch import Generator, Tensor

from flsv.data.groups import client_called
from flsv.utilities.charts import PALETTE, label_text
from flsv.utilities.declared import Count, Rules, ValidatedArguments, checked
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.seeding import generator_for

#: Number of clients among whom the samples are divided.
Clients = Annotated[int, Ge(2), "A federation needs at least 2 clients."]


class Partitioner(ValidatedArguments, ABC):
    """Base class of partitioners, which assign a data set's samples to clients.

    Subclasses override :meth:`partition`. Call the object itself, ``partitioner(labels, num_classes, groups)``, which
    calls :meth:`partition` and checks its arguments and result. The result depends only on the seed and these
    arguments: no global random generator is used.

    Args:
        num_clients: number of clients, at least 2. None is allowed only in partitioners that take the number from the
            data (:class:`~flsv.data.GroupPartitioner`).
        seed: seed of every random choice. None: the seed of ``seed_everything``, or 0 if that has not been called.

    Raises:
        ConfigurationError: at construction: ``num_clients`` is below 2. At the call: the data cannot be partitioned in
            this way.

    Example:
        >>> class EveryOther(Partitioner):
        ...     def partition(self, labels, num_classes, groups, generator):
        ...         return [torch.arange(client, len(labels), self.num_clients) for client in range(self.num_clients)]
        >>> EveryOther(num_clients=2)(torch.tensor([0, 1, 0, 1, 1]), num_classes=2)
        [tensor([0, 2, 4]), tensor([1, 3])]
    """

    num_clients: int

    needs_classes: bool = True
    """True if :meth:`partition` uses the labels. If False, data without classes (all labels are 0) are accepted."""

    keeps_groups: bool = False
    """True if every natural group goes to one client as a whole; a client with one group is named after it."""

    first_client: int = 0
    """Number that the first client of this partition has in the whole federation; 0 unless this process has a single
    client."""

    def __init__(self, num_clients: Clients, seed: int | None = None) -> None:
        self.num_clients = num_clients
        self.seed = seed

    @abstractmethod
    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: Generator
    ) -> Sequence[Tensor]:
        """Return the indices of each client's samples, in any order. No index may occur twice. Samples may stay unused.

        Args:
            labels: class of every sample, int64 ``[N]``. ``N`` is at least ``num_clients``.
            num_classes: number of classes. Labels lie in ``0 .. num_classes - 1``, and some classes may have no sample.
            groups: natural group of every sample, int64 ``[N]``, or None.
            generator: random generator, seeded by this partitioner's seed.
        """

    def __call__(
        self, labels: Tensor, num_classes: int, groups: Tensor | None = None
    ) -> list[Tensor]:
        """Divide the samples among the clients.

        Args:
            labels: class of every sample, integer ``[N]``.
            num_classes: number of classes. Labels lie in ``0 .. num_classes - 1``.
            groups: natural group of every sample, integer ``[N]``. Some partitioners need it, the others ignore it.

        Returns:
            One sorted int64 tensor of sample indices per client, none of them empty, pairwise disjoint.
        """
        labels = torch.as_tensor(labels).cpu().long()
        parts = [
            part.sort().values
            for part in self.partition(
                labels, num_classes, groups, generator_for(self.seed, "partition")
            )
        ]
        if min(map(len, parts)) == 0 or torch.bincount(torch.cat(parts)).max() > 1:
            raise ConfigurationError(
                f"{self!r} gives the clients {listed(map(len, parts), 20)} of {len(labels)} samples. Each needs "
                "at least one, and no sample may be assigned twice: use fewer clients, more data or a more even split."
            )
        return parts


def partition_counts(parts: Sequence[Tensor], labels: Tensor, num_classes: int) -> Tensor:
    """Count the samples of each class at each client.

    Args:
        parts: for each client the indices of its samples, int64.
        labels: class of every sample, int64 ``[N]``.
        num_classes: number of classes.

    Returns:
        The counts, int64 ``[num_clients, num_classes]``.

    Example:
        >>> partition_counts([torch.tensor([0, 2]), torch.tensor([1])], torch.tensor([0, 1, 1]), num_classes=2)
        tensor([[1, 1],
                [0, 1]])
    """
    return torch.stack([torch.bincount(labels[part], minlength=num_classes) for part in parts])


def shuffled(indices: Tensor, generator: torch.Generator) -> Tensor:
    """Return ``indices`` in a random order drawn from ``generator``."""
    return indices[torch.randperm(len(indices), generator=generator)]


def cut(indices: Tensor, shares: Tensor) -> list[Tensor]:
    """Cut ``indices`` into consecutive parts by ``shares``, with each size rounded up or down."""
    ends = (shares.double().cumsum(0) * len(indices)).round().long().clamp(max=len(indices))
    return list(indices[: int(ends[-1])].tensor_split(ends[:-1]))


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from flsv.data.datamodule import FederatedDataModule

_MOST_LEGEND_ENTRIES = 20


def plot_partition(
    counts: Tensor,
    class_names: Sequence[str] | None = None,
    client_names: Sequence[str] | None = None,
) -> tuple[Figure, Axes]:
    """Plot each client's number of samples per class as one stacked bar.

    Up to 20 classes have a legend. The figure does not touch pyplot's global state.

    Args:
        counts: number of samples ``[num_clients, num_classes]``, as returned by :func:`~flsv.data.partition_counts`.
        class_names: ``num_classes`` names for the legend. None: the classes' numbers.
        client_names: ``num_clients`` names of the bars. None: the clients' numbers.

    Returns:
        ``(figure, axes)``.

    Example:
        >>> import torch
        >>> figure, axes = plot_partition(torch.tensor([[10, 0], [5, 5]]), class_names=["normal", "pneumonia"])
        >>> axes.get_xlabel()
        'samples'
    """
    import pandas as pd
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    clients, classes = counts.shape
    names = [label_text(name) for name in (range(classes) if class_names is None else class_names)]
    figure = Figure(figsize=(8, min(max(2.5, 1.2 + 0.26 * clients), 16)), layout="constrained")
    axes = figure.add_subplot()
    many = colormaps["tab20" if classes <= _MOST_LEGEND_ENTRIES else "viridis"].resampled(classes)
    colors = PALETTE[:classes] if classes <= len(PALETTE) else [many(c) for c in range(classes)]
    frame = pd.DataFrame(counts.tolist(), columns=names)
    frame.plot.barh(
        stacked=True,
        ax=axes,
        color=colors,
        width=0.84,
        legend=False,
        xlabel="samples",
        ylabel="client",
    )
    axes.invert_yaxis()
    # At most about 50 client numbers, or they run into each other.
    shown = range(0, clients, -(-clients // 50))
    axes.set_yticks(
        shown, [label_text(i if client_names is None else client_names[i]) for i in shown]
    )
    if 1 < classes <= _MOST_LEGEND_ENTRIES:
        figure.legend(loc="outside right upper", title="class", frameon=False)
    return figure, axes


class IIDPartitioner(Partitioner):
    """Random partition into clients of equal size, up to one sample.

    Args:
        num_clients: number of clients, at least 2.
        seed: seed of the shuffle.

    Example:
        >>> [len(part) for part in IIDPartitioner(num_clients=3)(torch.zeros(10, dtype=torch.long), num_classes=1)]
        [4, 3, 3]
    """

    needs_classes = False

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: Generator
    ) -> list[Tensor]:
        return list(shuffled(torch.arange(len(labels)), generator).tensor_split(self.num_clients))


class GroupPartitioner(Partitioner):
    """Partition by natural groups, with one or several whole groups per client.

    A group is never split. With fewer clients than groups, the groups are dealt to the clients in turn, the largest
    group first, which makes the clients' sizes similar if there are many groups.

    Args:
        num_clients: number of clients, at least 2. None: one client per group, in the order of the groups; the number
            is then known only after the data have been read. Clients are named after their groups if each has one.
        seed: has no effect, because nothing here is random; every partitioner has this argument.

    Raises:
        ConfigurationError: the data have no groups, fewer than 2 groups, or fewer groups than clients.

    Example:
        >>> hospital = torch.tensor([7, 7, 7, 3, 3, 9])
        >>> GroupPartitioner()(torch.zeros(6, dtype=torch.long), num_classes=1, groups=hospital)
        [tensor([3, 4]), tensor([0, 1, 2]), tensor([5])]
    """

    needs_classes = False
    keeps_groups = True

    def __init__(self, num_clients: Clients | None = None, seed: int | None = None) -> None:
        self.num_clients = num_clients  # type: ignore[assignment]  # unknown until groups are read
        self.seed = seed

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: Generator
    ) -> list[Tensor]:
        if groups is None:
            raise ConfigurationError(
                f"{self!r} needs each sample's group: give groups=, a list or a field's name."
            )
        _, member_of, sizes = groups.cpu().unique(return_inverse=True, return_counts=True)
        clients = len(sizes) if self.num_clients is None else self.num_clients
        if len(sizes) < max(clients, 2):
            least = max(clients, 2)
            raise ConfigurationError(
                f"{self!r}: the samples fall into {len(sizes)} groups, and at least {least} are needed."
            )
        if self.num_clients is None:
            client_of = torch.arange(len(sizes))
        else:
            client_of = torch.empty(len(sizes), dtype=torch.long)
            client_of[sizes.argsort(descending=True, stable=True)] = (
                torch.arange(len(sizes)) % clients
            )
        return [
            torch.nonzero(client_of[member_of] == client).flatten() for client in range(clients)
        ]


class OneClient(Partitioner):
    """Partition into a single client, for a participant that trains in its own process.

    Args:
        seed: has no effect, because nothing here is random; every partitioner has this argument.

    Attributes:
        first_client: number of this participant in the federation, which the server assigns. The participant's
            validation and test samples are the same as those of that client in a federation in one process.

    Example:
        >>> OneClient()(torch.tensor([0, 1, 0]), num_classes=2)
        [tensor([0, 1, 2])]
    """

    needs_classes = False

    def __init__(self, seed: int | None = None) -> None:
        self.num_clients, self.seed = 1, seed

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: Generator
    ) -> list[Tensor]:
        return [torch.arange(len(labels))]


#: Share of a number of samples, in [0, 1).
Part = Annotated[float, Ge(0), Lt(1), "0.1 is 10 %."]


class SampleFilter(ABC):
    """Base class of methods that flag training samples, which ``Splits(drop_flagged=...)`` leaves out."""

    @abstractmethod
    def unflagged(self, data: FederatedDataModule, generator: Generator) -> list[Tensor]:
        """Return for each client which of its m training samples remain, bool ``[m]``.

        Args:
            data: the data module, whose samples are assigned to clients.
            generator: generator of all random numbers.
        """


@checked
@dataclass(frozen=True)
class Splits:
    """Shares of the samples that are set aside as validation and test sets, or left out.

    Args:
        server_val: share of the training data that becomes the server's validation set, before the rest is partitioned.
            0: no validation set. Without effect if the source has its own validation data.
        client_val: share of each client's samples for that client's validation set, at least one sample unless 0.
        client_test: share of each client's samples for that client's test set, at least one sample unless 0.
        max_samples: size of the random subset of the training samples that is used, including the server's validation
            set. None: all samples.
        drop_flagged: whether to leave out the training samples that clients flag as harmful. The clients value their
            samples by :class:`flsv.valuation.FedBary`: against the server's validation set or, without one, against
            each other. True takes that class's defaults. An instance sets its options.
        seed: seed of all splits except the partition, whose seed is the partitioner's. None: the seed of
            ``seed_everything``.

    Raises:
        ConfigurationError: a share lies outside ``[0, 1)``, nothing is left for training, ``max_samples`` is below 1,
            or an argument has another type.

    Example:
        >>> Splits(client_test=1.0)
        Traceback (most recent call last):
        ...
        flsv.utilities.errors.ConfigurationError: Splits(client_test=1.0): expected a finite number in [0, 1). 0.1 is \
10 %.
    """

    rules: ClassVar[Rules] = (
        (
            lambda a: a.client_val + a.client_test < 1,
            "client_val and client_test leave no samples for training.",
        ),
    )

    server_val: Part = 0.1
    client_val: Part = 0.0
    client_test: Part = 0.0
    max_samples: Count | None = None
    drop_flagged: bool | SampleFilter = False
    seed: int | None = None

    @cached_property
    def detector(self) -> SampleFilter | None:
        """Method that flags the samples to leave out, or None if none are left out."""
        if self.drop_flagged is True:
            default: SampleFilter = resolve_name("flsv.valuation.fedbary:FedBary")()
            return default
        return self.drop_flagged or None


@dataclass(frozen=True)
class FederatedSplits:
    """Sorted indices, int64, of the server's validation samples and each client's three splits."""

    server_val: Tensor
    clients: tuple[dict[str, Tensor], ...]
    names: tuple[str, ...] = ()


def split_federation(
    labels: Tensor,
    num_classes: int,
    groups: Tensor | None,
    pool: Tensor,
    partitioner: Partitioner,
    options: Splits,
    group_names: Sequence[str] = (),
    whole: bool = False,
) -> FederatedSplits:
    """Split the samples ``pool``, int64 ``[n]``, among the server and the clients.

    With ``whole``, each group must keep at least one training sample.
    """
    everybody = pool
    if options.max_samples is not None:
        pool = shuffled(pool, generator_for(options.seed, "max_samples"))[: options.max_samples]
    pool = shuffled(pool, generator_for(options.seed, "server_val"))
    held_back = int(options.server_val * len(pool) + 0.5)
    if options.server_val > 0 and held_back == 0:
        given = f"Splits(server_val={options.server_val}) of {len(pool)} samples gives no sample"
        raise ConfigurationError(f"{given}. Raise it, or set it to 0 to train without validation.")
    server_val, rest = pool[:held_back].sort().values, pool[held_back:].sort().values
    if partitioner.keeps_groups and groups is not None:
        lost = sorted({*groups[everybody].tolist()} - {*groups[rest].tolist()})
        shown = listed([group_names[group] if group_names else group for group in lost], show=repr)
        message = (
            f"No sample is left to {shown}: all went to the server's validation set or were left out "
            f"(max_samples={options.max_samples}). Give the server its own data (val), or set server_val: 0."
        )
        if lost and whole:
            raise ConfigurationError(message)
        if lost:
            rank_zero_warn(message)
    parts = partitioner(labels[rest], num_classes, None if groups is None else groups[rest])
    called: tuple[str, ...] = ()
    if partitioner.keeps_groups and groups is not None and group_names:
        held = [groups[rest[part]].unique() for part in parts]
        # Clients with several groups have no names.
        called = (
            tuple(group_names[int(each)] for each in held)
            if all(len(each) == 1 for each in held)
            else ()
        )
    numbered = enumerate(parts, partitioner.first_client)
    clients = [_split_client(client, rest[part], options, called) for client, part in numbered]
    return FederatedSplits(server_val, tuple(clients), called)


def _split_client(
    client: int, samples: Tensor, options: Splits, names: Sequence[str]
) -> dict[str, Tensor]:
    # At least one sample unless the share is 0, so that a mean score over clients includes all clients.
    val, test = (
        max(1, int(fraction * len(samples) + 0.5)) if fraction > 0 else 0
        for fraction in (options.client_val, options.client_test)
    )
    train = len(samples) - val - test
    if train < 1:
        raise ConfigurationError(
            f"{client_called(client, names, 'Client')} has {len(samples)} samples, of which client_val="
            f"{options.client_val} and client_test={options.client_test} leave none for training. Set them to 0, or "
            "partition so that every client has more (min_samples)."
        )
    order = shuffled(samples, generator_for(options.seed, "client_split", client))
    pieces = order.split([train, val, test])
    return {
        name: piece.sort().values
        for name, piece in zip(("train", "val", "test"), pieces, strict=True)
    }
