"""Maps between a module and the vector of its shared entries."""

from __future__ import annotations

from torch import nn

from flsv.parameters import ParameterSpace
from flsv.participants.sharing import Sharing, sharing
from flsv.server.config import FederationConfig


def shared_space(module: nn.Module, config: FederationConfig) -> tuple[ParameterSpace, Sharing]:
    """The map, the same on both sides of a federation, and what does not travel because of ``share``."""
    private = [pattern for strategy in config.strategies.values() for pattern in strategy.private]
    shared = sharing(config.share, module, config.head)
    return ParameterSpace(module, config.head, private, **shared._asdict()), shared
