"""What aggregators, personalisers, samplers and client terms share."""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from flsv.local_data import LocalData
    from flsv.parameters import ParameterSpace

Contributions = Mapping[str, Tensor]
"""The metrics' current values by name: ``[n]`` or ``[n, M]`` over all clients, NaN for clients never seen. A metric
that has not been updated yet has no entry."""


@dataclass(frozen=True)
class Federation:
    """What is known before the first round: n = clients, M = classes, P = length of the parameter vector.

    Args:
        global_vector: ``[P]``, the model that the first round starts from.
        space: the map between vectors and modules.
        num_clients: n.
        num_classes: M.
        split_sizes: ``"train"``, ``"val"`` and ``"test"`` to int64 ``[n]``, how many samples every client has of each.
        seed: of the run's random choices.
    """

    global_vector: Tensor
    space: ParameterSpace
    num_clients: int
    num_classes: int
    split_sizes: Mapping[str, Tensor]
    seed: int


class Strategy(ABC):  # noqa: B024 - its subclasses have the abstract methods
    """A small object with one decision to override.

    A strategy that reads a metric stores its name as ``self.metric``; the loop then checks, before training, that a
    metric of that name is defined. One that keeps state between rounds returns it from ``state_dict``.
    """

    metric: str | None = None

    def begin(self, federation: Federation) -> None:  # noqa: B027 - most have nothing to prepare
        """Before the first round of a new fit: forget what an earlier one left, check, prepare. A resumed fit has its
        ``load_state_dict`` called instead, and then :meth:`resume`.

        Raises:
            ConfigurationError: what the strategy needs is not there.
        """

    def resume(self, federation: Federation) -> None:  # noqa: B027
        """After ``load_state_dict``, before the first round of a resumed fit. The global vector is that round's."""

    def report(self, local: LocalData) -> Mapping[str, float]:
        """What every client of a cohort adds to its update, worked out at the client from its own data.

        Returns:
            Fields of :class:`flsv.round.ClientUpdate` by name. Nothing else of the data crosses to the server.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What the next round needs to know; tensors, numbers, lists and dicts of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - most have nothing to load
        """The inverse of ``state_dict``."""

    def __repr__(self) -> str:
        names = inspect.signature(type(self)).parameters
        return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)!r}' for n in names if hasattr(self, n))})"
