"""Base class of corruptions: which clients are affected, the method to override, and checks."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from flsv.errors import ConfigurationError
from flsv.seeding import generator_for


class ClientChoice:
    """Named clients, a random share of them, or all.

    The choice is a function of its arguments and the number of clients only, so that a corruption and an attack with
    the same ``fraction`` and ``seed`` concern the same clients, and a larger fraction adds clients to a smaller one's.

    Args:
        clients: client numbers; None for all, or for those that ``fraction`` draws.
        fraction: share of the clients, in [0, 1], rounded to a whole number of them; None without a draw.
        seed: seed of the draw.

    Raises:
        ConfigurationError: both ``clients`` and ``fraction``, one out of range; from :meth:`chosen`, clients that do
            not exist, or a fraction above 0 that rounds to no client.

    Example:
        >>> ClientChoice(fraction=0.3, seed=1).chosen(10)
        [0, 3, 4]
        >>> ClientChoice(clients=[2, 0]).chosen(10), ClientChoice().chosen(3)
        ([0, 2], [0, 1, 2])
    """

    def __init__(self, clients: Sequence[int] | None = None, fraction: float | None = None, seed: int = 0) -> None:
        self.clients = None if clients is None else list(clients)
        self.fraction = fraction
        self.seed = seed
        if clients is not None and fraction is not None:
            raise ConfigurationError(f"{self!r}: give clients or fraction, not both.")
        if self.clients is not None and (min(self.clients, default=0) < 0 or len({*self.clients}) < len(self.clients)):
            raise ConfigurationError(f"{self!r}: clients are different numbers from 0 up.")
        if fraction is not None and not 0 <= fraction <= 1:
            raise ConfigurationError(f"{self!r}: fraction is a share of the clients, 0 to 1.")

    def chosen(self, num_clients: int) -> list[int]:
        """The clients concerned out of ``num_clients``, ascending."""
        if self.clients is not None:
            if max(self.clients, default=0) >= num_clients:
                raise ConfigurationError(
                    f"{self!r}: there is no client {max(self.clients)}; clients are 0 .. {num_clients - 1}."
                )
            return sorted(self.clients)
        if self.fraction is None:
            return list(range(num_clients))
        count = int(self.fraction * num_clients + 0.5)
        if self.fraction > 0 and count == 0:
            # Silently concerning nobody would make a robust method look good.
            raise ConfigurationError(
                f"{self!r} concerns none of {num_clients} clients. The least fraction that concerns one is "
                f"{0.5 / num_clients:.3g}; 0 is for none."
            )
        order = torch.randperm(num_clients, generator=generator_for(self.seed, "chosen clients"))
        return sorted(order[:count].tolist())

    def __repr__(self) -> str:
        names = inspect.signature(type(self)).parameters
        given = {name: getattr(self, name) for name, p in names.items() if getattr(self, name, p.default) != p.default}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"


class Corruption(ClientChoice, ABC):
    """Base class: changes the training data of some clients, once, when data are dealt out.

    Subclasses override :meth:`corrupt`, which sees one client's training samples and nothing else. The clients' own
    validation and test samples, the server's validation set and everybody else's data stay as they are. So does the
    data set itself: the changed samples are kept beside it.

    Args:
        clients: whom it concerns, see :class:`~flsv.data.ClientChoice`.
        fraction: likewise.
        seed: seed of the choice of clients and of all noise.

    Raises:
        ConfigurationError: arguments out of range; at the call, a result that does not fit the samples.

    Example:
        >>> class Darker(Corruption):
        ...     def corrupt(self, x, y, num_classes, generator):
        ...         return x / 2, y
        >>> Darker(clients=[0])(torch.ones(2, 1, 1, 1), torch.tensor([0, 1]), 2, torch.Generator())[0].flatten()
        tensor([0.5000, 0.5000])
    """

    #: Classes whose images are irrelevant to the task, see :class:`~flsv.data.OpenSetLabelNoise`.
    unknown_classes: Sequence[int] = ()

    #: Whether :meth:`corrupt` looks at the labels or changes them. Where it does not, data without classes will do,
    #: whose labels are all 0 for it.
    needs_classes: bool = True

    @abstractmethod
    def corrupt(self, x: Tensor, y: Tensor, num_classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """One client's training samples as it will use them: as many, in the same order.

        Args:
            x: inputs ``[n, ...]`` on the CPU, a copy that may be changed in place.
            y: classes, int64 ``[n]``, likewise.
            num_classes: classes lie in ``0 .. num_classes - 1``.
            generator: CPU generator at the start of this corruption's stream for this client.
        """

    def __call__(self, x: Tensor, y: Tensor, num_classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """:meth:`corrupt`, and a check of what comes out."""
        new_x, new_y = self.corrupt(x, y, num_classes, generator)
        if new_x.shape != x.shape or new_y.shape != y.shape:
            raise ConfigurationError(
                f"{self!r} made x {list(new_x.shape)} and y {list(new_y.shape)} out of x {list(x.shape)} and y "
                f"{list(y.shape)}. A corruption keeps the number and the shape of the samples."
            )
        if len(new_y) and not 0 <= int(new_y.min()) <= int(new_y.max()) < num_classes:
            raise ConfigurationError(f"{self!r} made labels outside 0 .. {num_classes - 1}.")
        return new_x.to(x.dtype), new_y.to(y.dtype)

    def _check_rate(self, name: str) -> None:
        rate = getattr(self, name)
        if not 0 <= rate <= 1:
            raise ConfigurationError(f"{self!r}: {name} is a share, 0 to 1; 0.1 is 10 %.")


def some(count: int, rate: float, generator: torch.Generator) -> Tensor:
    """Random indices below ``count``, ``rate`` of them to the nearest whole number, int64.

    Example:
        >>> len(some(10, 0.25, torch.Generator().manual_seed(0)))
        3
    """
    return torch.randperm(count, generator=generator)[: int(rate * count + 0.5)]
