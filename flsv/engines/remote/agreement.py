"""What the server and every site must have alike, or the numbers mean different things on the two sides."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import lightning as L

from flsv.engines.vectors import shared_space
from flsv.errors import ConfigurationError

_ARGUMENTS = ("local_epochs", "client_optimizer", "head")


def agreement(module: L.LightningModule, settings: Any) -> dict[str, str]:
    """What one side has, in words: the version, the module's state and what happens at clients."""
    strategies = settings.strategies
    space, _ = shared_space(module, settings.arguments, strategies)
    layout = hashlib.sha256(repr(list(zip(space.names, map(tuple, space.shapes)))).encode()).hexdigest()[:16]
    at_clients = [repr(strategies[role]) for role in ("client_algorithm", "personalizer") if role in strategies]
    return {
        "flsv": version("flsv"),
        "module": f"{type(module).__name__}, {space.size} numbers, {layout}",
        "at clients": ", ".join([*at_clients, *map(repr, settings.uploads)]) or "nothing",
        "training": ", ".join(f"{name}={settings.arguments[name]!r}" for name in _ARGUMENTS),
    }


def check_agreement(site: str, theirs: Mapping[str, Any], ours: Mapping[str, str]) -> None:
    """Raise ConfigurationError where a site has something else than the server, and name it."""
    for what, value in ours.items():
        if theirs.get(what) != value:
            raise ConfigurationError(
                f"site {site!r} and the server differ in {what}: {theirs.get(what)!r} there, {value!r} here. Start "
                "both from the same version, module and settings."
            )
