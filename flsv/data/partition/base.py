"""What every partitioner shares: the arguments, the checks and the count matrix."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flsv.errors import ConfigurationError
from flsv.seeding import generator_for


class Partitioner(ABC):
    """Deals a data set's samples out to clients.

    Subclasses override :meth:`partition`; calling the object checks what goes in and what comes out. The result is a
    function of the seed and of what the call is given, nothing else: no global random generator is read or moved.

    Args:
        num_clients: how many clients the samples are dealt to, at least 2. None only in partitioners that let the
            data decide (:class:`~flsv.data.GroupPartitioner`).
        seed: seed of every random choice.

    Raises:
        ConfigurationError: ``num_clients`` below 2 at construction; at the call, data that cannot be dealt as asked.

    Example:
        >>> class EveryOther(Partitioner):
        ...     def partition(self, labels, num_classes, groups, generator):
        ...         return [torch.arange(client, len(labels), self.num_clients) for client in range(self.num_clients)]
        >>> EveryOther(num_clients=2)(torch.tensor([0, 1, 0, 1, 1]), num_classes=2)
        [tensor([0, 2, 4]), tensor([1, 3])]
    """

    num_clients: int

    needs_classes: bool = True
    """Whether :meth:`partition` looks at the labels. Where it does not, data without classes will do, whose labels are
    all 0."""

    keeps_groups: bool = False
    """Whether every natural group is dealt to one client as a whole, whose name is the group's then."""

    first_client: int = 0
    """The number, in the federation, of the first client that is dealt to."""

    deals_copies: bool = False
    """Whether a sample may be dealt more than once, as only cheating clients have it."""

    def __init__(self, num_clients: int, seed: int = 0) -> None:
        if num_clients < 2:
            raise ConfigurationError(
                f"{type(self).__name__}(num_clients={num_clients}): a federation needs at least 2 clients."
            )
        self.num_clients = num_clients
        self.seed = seed

    @abstractmethod
    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: torch.Generator
    ) -> Sequence[Tensor]:
        """The clients' sample indices, in any order inside a client. No sample twice; samples may stay unused.

        Args:
            labels: class of every sample, int64 ``[N]``, at least ``num_clients`` of them.
            num_classes: labels lie in ``0 .. num_classes - 1``; some classes may have no sample.
            groups: natural group of every sample, int64 ``[N]``, or None.
            generator: at the start of this partitioner's random stream.
        """

    def __call__(self, labels: Tensor, num_classes: int, groups: Tensor | None = None) -> list[Tensor]:
        """Deal the samples out.

        Args:
            labels: class of every sample, integer ``[N]``.
            num_classes: number of classes; labels lie in ``0 .. num_classes - 1``.
            groups: natural group of every sample, integer ``[N]``; needed by some partitioners, ignored by the rest.

        Returns:
            One sorted int64 tensor of sample indices per client, none of them empty; pairwise disjoint but for
            partitioners that deal copies.
        """
        labels = _checked_labels(torch.as_tensor(labels), num_classes)
        if self.num_clients is not None and len(labels) < self.num_clients:
            raise ConfigurationError(
                f"{self!r}: {len(labels)} samples cannot be dealt to {self.num_clients} clients, each of which needs "
                f"at least one. Lower num_clients to {len(labels)} or less, or use more data."
            )
        if groups is not None and len(groups) != len(labels):
            raise ConfigurationError(f"{self!r}: {len(groups)} groups were given for {len(labels)} samples.")
        parts = [
            part.sort().values
            for part in self.partition(labels, num_classes, groups, generator_for(self.seed, "partition"))
        ]
        empty = [client for client, part in enumerate(parts) if len(part) == 0]
        if empty:
            raise ConfigurationError(
                f"{self!r} leaves {_some('client', empty)} without samples (the data set has {len(labels)}). Every "
                f"client needs at least one: use fewer clients, more data or a less extreme split."
            )
        if not self.deals_copies and torch.bincount(torch.cat(parts), minlength=len(labels)).max() > 1:
            raise ConfigurationError(f"{self!r} deals a sample twice: clients' samples must be disjoint.")
        return parts

    def __repr__(self) -> str:
        names = inspect.signature(type(self).__init__).parameters
        arguments = [f"{name}={_short(getattr(self, name))}" for name in names if hasattr(self, name)]
        return f"{type(self).__name__}({', '.join(arguments)})"


def partition_counts(parts: Sequence[Tensor], labels: Tensor, num_classes: int) -> Tensor:
    """How many samples of each class each client has: int64 ``[num_clients, num_classes]``.

    Example:
        >>> partition_counts([torch.tensor([0, 2]), torch.tensor([1])], torch.tensor([0, 1, 1]), num_classes=2)
        tensor([[1, 1],
                [0, 1]])
    """
    return torch.stack([torch.bincount(labels[part], minlength=num_classes) for part in parts])


def shuffled(indices: Tensor, generator: torch.Generator) -> Tensor:
    """``indices`` in random order."""
    return indices[torch.randperm(len(indices), generator=generator)]


def cut(indices: Tensor, shares: Tensor) -> list[Tensor]:
    """Cut ``indices`` into consecutive pieces of the given shares; what exceeds their sum is left over.

    Cut points are rounded cumulative shares, so a piece is off its exact size by less than one sample, and shares that
    sum to 1 use every sample.

    Example:
        >>> [len(piece) for piece in cut(torch.arange(10), torch.tensor([0.5, 0.25, 0.25]))]
        [5, 3, 2]
    """
    ends = (shares.double().cumsum(0) * len(indices)).round().long().clamp(max=len(indices))
    return list(indices[: int(ends[-1])].tensor_split(ends[:-1]))


def _checked_labels(labels: Tensor, num_classes: int) -> Tensor:
    if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
        raise ConfigurationError(
            f"Partitioning needs one integer class label per sample, [N]; got {labels.dtype} of shape "
            f"{list(labels.shape)}."
        )
    labels = labels.cpu().long()
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ConfigurationError(
            f"Labels lie in {int(labels.min())} .. {int(labels.max())}, but num_classes={num_classes} allows "
            f"0 .. {num_classes - 1}."
        )
    return labels


def _some(noun: str, ids: Sequence[int]) -> str:
    """``client 3``, ``clients 3, 5`` or ``clients 0, 1, 2, 3, 4 and 15 more``."""
    more = f" and {len(ids) - 5} more" if len(ids) > 5 else ""
    return f"{noun}{'s' * (len(ids) > 1)} {', '.join(map(str, ids[:5]))}{more}"


def _short(value: Any) -> str:
    """A value for a one-line ``repr``: tables by their size."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple):
        return f"<{len(value)} x {max(map(len, value))}>"
    if isinstance(value, list | tuple) and len(value) > 10:
        return f"<{len(value)} values>"
    return repr(value)
