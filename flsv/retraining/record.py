"""CoalitionRecord: what a run's checkpoints keep of its coalitions."""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor


class CoalitionRecord(TypedDict, total=False):
    """The part of a run's checkpoints that belongs to its coalitions."""

    #: The fields of the :class:`flsv.retraining.price.Choice`.
    choice: list[Any]
    #: A hash of the weights before training, from which all coalitions must start.
    start: str
    #: Utilities of untrained models, ``[R, 1]`` or ``[R, M]``, by measure.
    untrained: dict[str, Tensor]
    #: The folder of the run whose coalitions are stored.
    folder: str
    #: The index of a round, and the run's model ``[P]`` after it, which the coalition of all clients must reproduce.
    checked_round: int
    first: Tensor
    #: The state of ``CoalitionsAtSites``, if sites train coalitions.
    sites: dict[str, Any]
