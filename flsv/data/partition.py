"""Partition of samples among clients: base class, simple partitioners, counts, and a plot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Ge
from torch import Generator, Tensor

from flsv.utilities.declared import ValidatedArguments
from flsv.utilities.display import PALETTE, Shown, label_text
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.seeding import generator_for

#: Number of clients among which the samples are divided.
Clients = Annotated[int, Ge(2), "A federation needs at least 2 clients."]


class Partitioner(ValidatedArguments, ABC):
    """Base class of partitioners, which assign a data set's samples to clients.

    Subclasses override :meth:`partition`. Call the object itself, ``partitioner(labels, num_classes, groups)``, which
    calls :meth:`partition` and checks the result. This depends only on the seed and the arguments, since no global
    random generator is used.

    Args:
        num_clients: number of clients, at least 2. Only a :class:`~flsv.data.GroupPartitioner` may have None, since it
            reads the number from the data.
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
    """Whether :meth:`partition` uses the labels. If False, the data need no classes, and all labels are 0 then."""

    keeps_groups: bool = False
    """Whether each natural group goes to one client as a whole. A client with a single group is named after it."""

    first_client: int = 0
    """Id of the first client of this partition in the federation. Not 0 only at a site, which has a single client."""

    def __init__(
        self,
        num_clients: Clients,
        seed: int | None = None,
    ) -> None:
        self.num_clients = num_clients
        self.seed = seed

    @abstractmethod
    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: Generator
    ) -> Sequence[Tensor]:
        """Return the indices of each client's samples, in any order. No index may occur twice, but some may be missing.

        Args:
            labels: class of every sample, int64 ``[N]``. ``N`` is at least ``num_clients``.
            num_classes: number of classes. Labels lie in ``0 .. num_classes - 1``, and some classes may have no sample.
            groups: natural group of every sample, int64 ``[N]``, or None.
            generator: random generator, seeded by this partitioner's seed.
        """

    def __call__(
        self, labels: Tensor, num_classes: int, groups: Tensor | None = None
    ) -> list[Tensor]:
        """Return each client's sorted sample indices, int64 ``[n]``. Arguments are those of :meth:`partition`."""
        labels = torch.as_tensor(labels).cpu().long()
        generator = generator_for(self.seed, "partition")
        parts = []
        for part in self.partition(labels, num_classes, groups, generator):
            parts.append(part.sort().values)
        sizes = list(map(len, parts))
        if min(sizes) == 0 or torch.bincount(torch.cat(parts)).max() > 1:
            raise ConfigurationError(
                f"{self!r} gives the clients {listed(sizes, 20)} of {len(labels)} samples, but each client needs at "
                "least one, and no sample may be assigned twice. Use fewer clients, more data or a more even "
                "partition."
            )
        return parts


def partition_counts(
    parts: Sequence[Tensor],
    labels: Tensor,
    num_classes: int,
) -> Tensor:
    """Count the samples of each class at each client.

    Args:
        parts: for each client the indices of its samples, int64.
        labels: class of every sample, int64 ``[N]``.
        num_classes: number of classes M.

    Returns:
        int64 ``[num_clients, M]``.

    Example:
        >>> partition_counts([torch.tensor([0, 2]), torch.tensor([1])], torch.tensor([0, 1, 1]), num_classes=2)
        tensor([[1, 1],
                [0, 1]])
    """
    counts = [torch.bincount(labels[part], minlength=num_classes) for part in parts]
    return torch.stack(counts)


def shuffled(indices: Tensor, generator: torch.Generator) -> Tensor:
    """Return ``indices`` in a random order drawn from ``generator``."""
    return indices[torch.randperm(len(indices), generator=generator)]


def cut(indices: Tensor, shares: Tensor) -> list[Tensor]:
    """Cut ``indices`` into consecutive parts by ``shares``. Sizes are rounded up or down."""
    count = len(indices)
    cumulated_shares = shares.double().cumsum(0)
    boundaries = (cumulated_shares * count).round().long()
    boundaries = boundaries.clamp(max=count)  # by rounding, shares may sum to more than 1
    parted = indices[: int(boundaries[-1])]
    return list(parted.tensor_split(boundaries[:-1]))


if TYPE_CHECKING:
    from matplotlib.axes import Axes


_MAX_LEGEND_ENTRIES = 20
#: Largest number of clients in a plot.
_MAX_BARS = 50


def plot_partition(
    counts: Tensor,
    class_names: Sequence[str] | None = None,
    client_names: Sequence[str] | None = None,
) -> Shown:
    """Plot each client's number of samples per class as one stacked bar.

    Of more than 50 clients, the first 50 are shown. Up to 20 classes have a legend. pyplot's global state is not
    changed.

    Args:
        counts: number of samples ``[num_clients, num_classes]``, as returned by :func:`~flsv.data.partition_counts`.
        class_names: ``num_classes`` names for the legend. None: the classes' numbers.
        client_names: ``num_clients`` names of the bars. None: the clients' ids.

    Returns:
        ``(figure, axes)``, which a notebook shows as a picture.

    Example:
        >>> import torch
        >>> figure, axes = plot_partition(torch.tensor([[10, 0], [5, 5]]), class_names=["normal", "pneumonia"])
        >>> axes.get_xlabel()
        'samples'
    """
    from matplotlib.figure import Figure

    num_clients, num_classes = counts.shape
    num_bars = min(num_clients, _MAX_BARS)
    height = max(2.5, 1.2 + 0.26 * num_bars)
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.add_subplot()
    if class_names is None:
        class_names = list(map(str, range(num_classes)))
    _draw_bars(axes, counts[:num_bars], class_names)
    if num_bars < num_clients:
        axes.set_title(f"the first {num_bars} of {num_clients:,} clients")
    if client_names is None:
        client_names = list(map(str, range(num_bars)))
    axes.set_yticks(range(num_bars), list(map(label_text, client_names[:num_bars])))
    if 1 < num_classes <= _MAX_LEGEND_ENTRIES:
        figure.legend(loc="outside right upper", title="class", frameon=False)
    return Shown((figure, axes))


def _draw_bars(
    axes: Axes,
    counts: Tensor,
    class_names: Sequence[str],
) -> None:
    """Draw a bar for each row of ``counts``, the first at the top."""
    import pandas as pd

    frame = pd.DataFrame(counts.tolist(), columns=list(map(label_text, class_names)))
    frame.plot.barh(
        stacked=True,
        ax=axes,
        color=_class_colors(len(class_names)),
        width=0.84,
        legend=False,
        xlabel="samples",
        ylabel="client",
    )
    axes.invert_yaxis()


def _class_colors(num_classes: int) -> Sequence[Any]:
    from matplotlib import colormaps

    if num_classes <= len(PALETTE):
        return PALETTE[:num_classes]
    name = "tab20" if num_classes <= _MAX_LEGEND_ENTRIES else "viridis"
    color_map = colormaps[name].resampled(num_classes)
    return list(map(color_map, range(num_classes)))


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
        order = shuffled(torch.arange(len(labels)), generator)
        return list(order.tensor_split(self.num_clients))


class GroupPartitioner(Partitioner):
    """Partition by natural groups, with one or several whole groups per client.

    A group is never split. With fewer clients than groups, the groups are given to the clients in turn, the largest
    group first, so that many groups make clients of similar sizes.

    Args:
        num_clients: number of clients, at least 2. None: one client per group, in the order of the groups. The number
            is then known only after the data have been read, and clients are named after their groups.
        seed: has no effect, since the partition is not random.

    Raises:
        ConfigurationError: the data have no groups, fewer than 2 groups, or fewer groups than clients.

    Example:
        >>> hospital = torch.tensor([7, 7, 7, 3, 3, 9])
        >>> GroupPartitioner()(torch.zeros(6, dtype=torch.long), num_classes=1, groups=hospital)
        [tensor([3, 4]), tensor([0, 1, 2]), tensor([5])]
    """

    needs_classes = False
    keeps_groups = True

    def __init__(
        self,
        num_clients: Clients | None = None,
        seed: int | None = None,
    ) -> None:
        self.num_clients = num_clients  # type: ignore[assignment]  # not known until groups are read
        self.seed = seed

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: Generator
    ) -> list[Tensor]:
        if groups is None:
            raise ConfigurationError(
                f"{self!r} needs each sample's group. Set groups= to a list or to a field's name."
            )
        _, group_of_sample, sizes = groups.cpu().unique(return_inverse=True, return_counts=True)
        num_groups = len(sizes)
        num_clients = num_groups if self.num_clients is None else self.num_clients
        num_needed = max(num_clients, 2)
        if num_groups < num_needed:
            raise ConfigurationError(
                f"{self!r}: the samples have {num_groups} groups, but at least {num_needed} are needed."
            )

        client_of_group = torch.arange(num_groups)
        if self.num_clients is not None:
            largest_first = sizes.argsort(descending=True, stable=True)
            client_of_group[largest_first] = torch.arange(num_groups) % num_clients  # in turn
        clients = client_of_group[group_of_sample]
        return [(clients == client).nonzero().flatten() for client in range(num_clients)]


class OneClient(Partitioner):
    """Partition into a single client, for a site, which trains in its own process.

    Args:
        seed: has no effect, since the partition is not random.

    Attributes:
        first_client: id of the site in the federation, which the server assigns. The site's validation and test samples
            are those that a client with this id has in a federation in one process.

    Example:
        >>> OneClient()(torch.tensor([0, 1, 0]), num_classes=2)
        [tensor([0, 1, 2])]
    """

    needs_classes = False

    def __init__(self, seed: int | None = None) -> None:
        self.num_clients = 1
        self.seed = seed

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: Generator
    ) -> list[Tensor]:
        return [torch.arange(len(labels))]
