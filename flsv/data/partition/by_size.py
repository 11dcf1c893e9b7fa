"""Partitions by size, by a table of proportions, by natural groups, and to one client alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from flsv.data.partition.base import Partitioner, cut, shuffled
from flsv.errors import ConfigurationError


class IIDPartitioner(Partitioner):
    """Random samples in equal numbers (they differ by at most one).

    Args:
        num_clients: number of clients, at least 2.
        seed: seed of the shuffle.

    Example:
        >>> [len(part) for part in IIDPartitioner(num_clients=3)(torch.zeros(10, dtype=torch.long), num_classes=1)]
        [4, 3, 3]
    """

    needs_classes = False

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: torch.Generator
    ) -> Sequence[Tensor]:
        return shuffled(torch.arange(len(labels)), generator).tensor_split(self.num_clients)


class SizePartitioner(Partitioner):
    """Random samples in given proportions, all of them used.

    Args:
        proportions: one positive number per client, on any scale: ``[2, 3, 4, 5, 6]`` gives the clients 2/20 .. 6/20 of
            the samples (each off by less than one sample).
        seed: seed of the shuffle.

    Raises:
        ConfigurationError: fewer than 2 proportions, or one that is not a positive finite number.

    Example:
        >>> [len(part) for part in SizePartitioner([1, 2, 2])(torch.zeros(10, dtype=torch.long), num_classes=1)]
        [2, 4, 4]
    """

    needs_classes = False

    def __init__(self, proportions: list[float], seed: int = 0) -> None:
        super().__init__(len(proportions), seed)
        self.proportions = list(proportions)
        if not all(math.isfinite(share) and share > 0 for share in self.proportions):
            raise ConfigurationError(f"{self!r}: proportions must be positive numbers, one per client.")

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: torch.Generator
    ) -> Sequence[Tensor]:
        shares = torch.tensor(self.proportions, dtype=torch.float64)
        return cut(shuffled(torch.arange(len(labels)), generator), shares / shares.sum())


class ProportionPartitioner(Partitioner):
    """A partition given by a matrix with one row per client and one column per class.

    What an entry says is chosen by ``of``:

    - ``"class"``: the share of that class's samples which this client receives. A column sums to at most 1; what is
      missing to 1 stays unused.
    - ``"client"``: the weight of that class among this client's samples. Rows are on any scale: ``[4, 4, 1, 1]`` is
      80 % of two classes and 20 % of the rest. How much each client has is up to ``sizes`` and ``total``.
    - ``"count"``: that many samples.

    A row with a single entry stands for the same number in every column.

    ========================================  ====================================================================
    ShapFed's imbalanced split, 4 clients     ``[[0.7], [0.1], [0.1], [0.1]]``
    ShapFed's heterogeneous one, 2 clients    ``[[1, 0.5, 0.5], [0, 0.5, 0.5]]``
    ShapFed's chest X-rays, 5 hospitals       ``[[.4, 0], [.3, .1], [.2, .2], [.1, .3], [0, .4]]``
    ========================================  ====================================================================

    Args:
        matrix: the entries, ``num_clients`` rows of ``num_classes`` non-negative numbers (or of one).
        of: what an entry is a share of, see above.
        sizes: relative numbers of samples of the clients, only with ``of="client"``; equal by default.
        total: samples of all clients together, only with ``of="client"``; by default as many as the data allow.
        seed: seed of which samples of a class go where.

    Raises:
        ConfigurationError: a matrix that is not one, or that asks for more than there is.

    Example:
        >>> labels = torch.arange(2).repeat_interleave(100)
        >>> xrays = ProportionPartitioner([[0.4, 0.0], [0.3, 0.1], [0.2, 0.2], [0.1, 0.3], [0.0, 0.4]])
        >>> [torch.bincount(labels[part], minlength=2).tolist() for part in xrays(labels, num_classes=2)]
        [[40, 0], [30, 10], [20, 20], [10, 30], [0, 40]]
    """

    def __init__(
        self,
        matrix: list[list[float]],
        of: Literal["class", "client", "count"] = "class",
        sizes: list[float] | None = None,
        total: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(len(matrix), seed)
        self.matrix = [[float(entry) for entry in row] for row in matrix]
        # A single entry is the same for all classes, so also for the one of data without classes.
        self.needs_classes = any(len(row) != 1 for row in self.matrix)
        self.of = of
        self.sizes = sizes
        self.total = total
        if of not in ("class", "client", "count"):
            raise ConfigurationError(f"{self!r}: of must be 'class', 'client' or 'count'.")
        if of != "client" and (sizes is not None or total is not None):
            raise ConfigurationError(f"{self!r}: sizes and total belong to of='client'.")
        if sizes is not None and (len(sizes) != len(matrix) or min(sizes) <= 0):
            raise ConfigurationError(f"{self!r}: sizes needs one positive number per client, {len(matrix)} in all.")
        self._check()

    def _check(self) -> None:
        entries = self._entries(max(len(row) for row in self.matrix))
        if not (entries.isfinite().all() and (entries >= 0).all()):
            raise ConfigurationError(f"{self!r}: entries must be finite and not negative.")
        empty = (entries.sum(1) == 0).nonzero().flatten().tolist()
        if empty:
            raise ConfigurationError(f"{self!r}: row {empty[0]} is all zeros, but every client needs a sample.")
        if self.of == "class":
            sums = entries.sum(0)
            if sums.max() > 1 + 1e-6:
                raise ConfigurationError(
                    f"{self!r}: column {int(sums.argmax())} sums to {float(sums.max()):.4g}. Entries are shares of a "
                    f"class's samples, so a column sums to at most 1. For shares of a client's samples say "
                    f"of='client', for absolute numbers of='count'."
                )
        if self.of == "count" and (entries != entries.round()).any():
            raise ConfigurationError(f"{self!r}: with of='count' entries are whole numbers of samples.")

    def _entries(self, num_classes: int) -> Tensor:
        """The matrix, float64 ``[num_clients, num_classes]``, single entries spread over the row."""
        rows = [row * num_classes if len(row) == 1 else row for row in self.matrix]
        widths = sorted({len(row) for row in rows})
        if widths != [num_classes]:
            raise ConfigurationError(
                f"{self!r}: the data have {num_classes} classes, but the rows have {widths} entries. Give every row "
                f"{num_classes} entries, or a single one for all classes."
            )
        return torch.tensor(rows, dtype=torch.float64)

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: torch.Generator
    ) -> Sequence[Tensor]:
        entries = self._entries(num_classes)
        available = torch.bincount(labels, minlength=num_classes)
        counts = None if self.of == "class" else self._counts(entries, available)
        pieces: list[list[Tensor]] = [[] for _ in range(self.num_clients)]
        for label in range(num_classes):
            members = shuffled(torch.nonzero(labels == label).flatten(), generator)
            if counts is None:
                parts = cut(members, entries[:, label])
            else:
                parts = list(members[: int(counts[:, label].sum())].split(counts[:, label].tolist()))
            for client, part in enumerate(parts):
                pieces[client].append(part)
        return [torch.cat(piece) for piece in pieces]

    def _counts(self, entries: Tensor, available: Tensor) -> Tensor:
        """Whole numbers of samples, int64 ``[num_clients, num_classes]``, that the classes can bear."""
        if self.of == "client":
            sizes = torch.tensor(self.sizes or [1.0] * self.num_clients, dtype=torch.float64)
            mix = entries / entries.sum(1, keepdim=True) * (sizes / sizes.sum())[:, None]
            demand = mix.sum(0)
            most = float((available / demand)[demand > 0].min())
            if self.total is not None and self.total > most:
                raise ConfigurationError(
                    f"{self!r}: there are not enough samples of some classes. At most total={int(most)} fits."
                )
            exact = mix * (most if self.total is None else self.total)
            # Rounding cumulative sums keeps each client's number of samples within one of what was asked.
            counts = exact.cumsum(1).round().long().diff(dim=1, prepend=torch.zeros(len(exact), 1, dtype=torch.long))
            for label in range(len(available)):
                while counts[:, label].sum() > available[label]:
                    counts[counts[:, label].argmax(), label] -= 1
            return counts
        counts = entries.long()
        short = (counts.sum(0) > available).nonzero().flatten().tolist()
        if short:
            raise ConfigurationError(
                f"{self!r}: class {short[0]} has {int(available[short[0]])} samples, but the matrix asks for "
                f"{int(counts[:, short[0]].sum())}."
            )
        return counts


class GroupPartitioner(Partitioner):
    """One client per natural group, or whole groups dealt to a given number of clients.

    A group is never split. With fewer clients than groups, groups are dealt in turn from the largest to the smallest,
    which keeps the clients' sizes close where the groups are many.

    Args:
        num_clients: number of clients, at least 2; None makes one client of each group, in the groups' order, and is
            known to the caller only after the data have been seen. Clients are called after their groups.
        seed: taken for uniformity; nothing here is random.

    Raises:
        ConfigurationError: data without groups, fewer than 2 groups, or fewer groups than clients.

    Example:
        >>> hospital = torch.tensor([7, 7, 7, 3, 3, 9])
        >>> GroupPartitioner()(torch.zeros(6, dtype=torch.long), num_classes=1, groups=hospital)
        [tensor([3, 4]), tensor([0, 1, 2]), tensor([5])]
    """

    needs_classes = False
    keeps_groups = True

    def __init__(self, num_clients: int | None = None, seed: int = 0) -> None:
        super().__init__(2 if num_clients is None else num_clients, seed)
        self.num_clients = num_clients  # type: ignore[assignment] # unknown until the groups are seen

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: torch.Generator
    ) -> Sequence[Tensor]:
        if groups is None:
            raise ConfigurationError(
                f"{self!r} needs to know each sample's group. Give the data module groups=[...], one entry per "
                f"training sample, the name of an attribute or a field that has them, or a data set with an attribute "
                f"`groups`."
            )
        _, member_of, sizes = groups.cpu().unique(return_inverse=True, return_counts=True)
        clients = len(sizes) if self.num_clients is None else self.num_clients
        if len(sizes) < max(clients, 2):
            raise ConfigurationError(
                f"{self!r}: the samples fall into {len(sizes)} groups, and a group is not split. At least "
                f"{max(clients, 2)} groups are needed; lower num_clients, or choose a partitioner that splits samples."
            )
        if self.num_clients is None:
            client_of = torch.arange(len(sizes))
        else:
            client_of = torch.empty(len(sizes), dtype=torch.long)
            client_of[sizes.argsort(descending=True, stable=True)] = torch.arange(len(sizes)) % clients
        return [torch.nonzero(client_of[member_of] == client).flatten() for client in range(clients)]


class OneClient(Partitioner):
    """No partition: all data belong to one participant, which trains with others in other processes.

    Args:
        seed: taken for uniformity; nothing here is random.

    Attributes:
        first_client: which client of the federation this participant is: its validation and test samples are drawn as
            they would be drawn for that client in one process. A site is told by its server.

    Example:
        >>> OneClient()(torch.tensor([0, 1, 0]), num_classes=2)
        [tensor([0, 1, 2])]
    """

    needs_classes = False

    def __init__(self, seed: int = 0) -> None:
        self.num_clients, self.seed = 1, seed

    def partition(
        self, labels: Tensor, num_classes: int, groups: Tensor | None, generator: torch.Generator
    ) -> Sequence[Tensor]:
        return [torch.arange(len(labels))]
