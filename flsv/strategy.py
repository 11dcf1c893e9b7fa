"""What aggregators, personalisers, samplers and client terms share."""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Mapping
from typing import Any

from torch import Tensor

Contributions = Mapping[str, Tensor]
"""The metrics' current values by name: ``[n]`` or ``[n, M]`` over all clients, NaN for clients never seen. A metric
that has not been updated yet has no entry."""


class Strategy(ABC):  # noqa: B024 - its subclasses have the abstract methods
    """A small object with one decision to override.

    A strategy that reads a metric stores its name as ``self.metric``; the loop then checks, before training, that a
    metric of that name is defined. One that keeps state between rounds returns it from ``state_dict``.
    """

    metric: str | None = None

    def state_dict(self) -> dict[str, Any]:
        """What the next round needs to know; tensors, numbers, lists and dicts of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - most have nothing to load
        """The inverse of ``state_dict``."""

    def __repr__(self) -> str:
        names = inspect.signature(type(self)).parameters
        return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)!r}' for n in names if hasattr(self, n))})"
