"""Corruption: what changes some clients' training data, and the choice of these clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from flsv.utilities.arguments import rounded_up
from flsv.utilities.declared import Rules, Share, ValidatedArguments
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for


class ClientChoice(ValidatedArguments):
    """Choice of clients: given ids, a random share, or all clients.

    The choice depends only on its arguments and the number of clients, so that a corruption and an attack with the same
    ``fraction`` and ``seed`` choose the same clients. A larger fraction chooses all clients of a smaller one, and more.

    Args:
        clients: ids of the clients, from 0. None: see ``fraction``.
        fraction: share of the clients to draw, in [0, 1], rounded to a whole number of clients. None: all clients,
            unless ``clients`` is given.
        seed: seed of the draw. None: the seed of ``seed_everything``.

    Raises:
        ConfigurationError: both ``clients`` and ``fraction`` are given, or one is out of range. From :meth:`chosen`: a
            client does not exist, or a fraction above 0 is rounded to no client.

    Example:
        >>> ClientChoice(fraction=0.3, seed=1).chosen(10)
        [0, 3, 4]
        >>> ClientChoice(clients=[2, 0]).chosen(10), ClientChoice().chosen(3)
        ([0, 2], [0, 1, 2])
    """

    rules: ClassVar[Rules] = (
        (
            lambda a: a.clients is None or a.fraction is None,
            "expected clients or fraction, not both.",
        ),
        (
            lambda a: a.clients is None or len({*a.clients}) == len(a.clients),
            "expected different clients.",
        ),
    )

    def __init__(
        self,
        clients: Sequence[Annotated[int, Ge(0)]] | None = None,
        fraction: Share | None = None,
        seed: int | None = None,
    ) -> None:
        self.clients = None if clients is None else list(clients)
        self.fraction = fraction
        self.seed = seed

    def chosen(self, num_clients: int) -> list[int]:
        """Return the ids of the chosen clients out of ``num_clients``, ascending."""
        if self.clients is not None:
            largest_id = max(self.clients, default=0)
            if largest_id >= num_clients:
                raise ConfigurationError(
                    f"{self!r}: there is no client {largest_id}. The clients are 0 .. {num_clients - 1}."
                )
            return sorted(self.clients)
        if self.fraction is None:
            return list(range(num_clients))
        count = int(self.fraction * num_clients + 0.5)  # 0.5 is rounded up
        if self.fraction > 0 and count == 0:
            # Without an error, results of a federation without malicious clients would be taken for those with them.
            raise ConfigurationError(
                f"{self!r} chooses none of {num_clients} clients. The smallest fraction that chooses one is "
                f"{rounded_up(0.5 / num_clients)}. If you want none, set fraction=0."
            )
        order = torch.randperm(num_clients, generator=generator_for(self.seed, "chosen clients"))
        return sorted(order[:count].tolist())


class Corruption(ClientChoice, ABC):
    """Base class of corruptions, which change some clients' training data once, after partitioning.

    Subclasses override :meth:`corrupt`, which is called for each chosen client with its training samples. The other
    clients' data, and all validation and test samples, are not changed. Changed samples are stored in a copy of the
    data set.

    Args:
        clients: numbers of the clients whose data are changed, see :class:`~flsv.data.ClientChoice`.
        fraction: share of the clients whose data are changed, in place of ``clients``.
        seed: seed of the choice of clients and of all noise. None: the seed of ``seed_everything``.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> class Darker(Corruption):
        ...     def corrupt(self, x, y, num_classes, generator):
        ...         return x / 2, y
        >>> Darker(clients=[0])(torch.ones(2, 1, 1, 1), torch.tensor([0, 1]), 2, torch.Generator())[0].flatten()
        tensor([0.5000, 0.5000])
    """

    #: Classes that are not part of the task, see :class:`~flsv.data.OpenSetLabelNoise`.
    unknown_classes: Sequence[int] = ()

    #: Whether :meth:`corrupt` uses or changes the labels. If False, the data need no classes, and ``y`` is 0 then.
    needs_classes: bool = True

    @abstractmethod
    def corrupt(
        self, x: Tensor, y: Tensor, num_classes: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return one client's corrupted training samples, in the same number and order.

        Args:
            x: inputs ``[n, ...]`` on the CPU, a copy that may be changed in place.
            y: classes, int64 ``[n]``, a copy that may be changed in place.
            num_classes: number of classes, which lie in ``0 .. num_classes - 1``.
            generator: CPU generator, seeded for this corruption and this client.
        """

    def __call__(
        self, x: Tensor, y: Tensor, num_classes: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Call :meth:`corrupt`, and convert its results to the types of ``x`` and ``y``."""
        new_x, new_y = self.corrupt(x, y, num_classes, generator)
        return new_x.to(x.dtype), new_y.to(y.dtype)


def draw_share(count: int, rate: float, generator: torch.Generator) -> Tensor:
    """Draw ``round(rate * count)`` different indices from 0 to ``count`` - 1, int64 ``[n]``. 0.5 is rounded up."""
    return torch.randperm(count, generator=generator)[: int(rate * count + 0.5)]
