"""The map between a module and what travels of it, as a loop's arguments and strategies say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from flsv.parameters import ParameterSpace
from flsv.participants.sharing import Sharing, sharing
from flsv.strategy import Strategy


def shared_space(
    module: nn.Module, arguments: Mapping[str, Any], strategies: Mapping[str, Strategy]
) -> tuple[ParameterSpace, Sharing]:
    """The map, the same on both sides of a federation, and what does not travel because of ``share``."""
    private = [pattern for strategy in strategies.values() for pattern in strategy.private]
    shared = sharing(arguments["share"], module, arguments["head"])
    return ParameterSpace(module, arguments["head"], private, **shared._asdict()), shared
