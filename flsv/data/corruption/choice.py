"""Which clients something happens to: the same choice for corrupted data and for attacks on updates."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch

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
