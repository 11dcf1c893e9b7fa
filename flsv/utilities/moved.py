"""Imports of modules and classes by their names in 1.0 to 1.2.0, which work until 2.0."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: ``{old name: new name}``; submodules of an old name are found below the new name.
MOVED = {
    "flsv.clients": "flsv.training",
    "flsv.config": "flsv.configuration.federation_config",
    "flsv.errors": "flsv.utilities.errors",
    "flsv.features": "flsv.valuation.features",
    "flsv.games.class_scores": "flsv.scores.ranking",
    "flsv.games.coalition_training": "flsv.retraining.global_model_scoring",
    "flsv.games.retrained_utility": "flsv.retraining.retrained_utility",
    "flsv.loop": "flsv.federation",
    "flsv.models.imbalance": "flsv.scores.class_scores",
    "flsv.parameters": "flsv.core.parameter_space",
    "flsv.participants": "flsv.core",
    "flsv.plots": "flsv.utilities.plots",
    "flsv.retraining.coalition_training": "flsv.retraining.global_model_scoring",
    "flsv.round": "flsv.core",
    "flsv.seeding": "flsv.utilities.seeding",
    "flsv.server.value_round": "flsv.outside.value_round",
    "flsv.strategy": "flsv.core.strategy",
    "flsv.training.local_steps": "flsv.training.step_counts",
    "flsv.training.turn": "flsv.training.client_turn",
}

#: ``{old name of a class: the module that has it today}``.
MOVED_CLASSES = {"flsv.games.RetrainedUtility": "flsv.retraining"}


class MovedModules(MetaPathFinder, Loader):
    """Import finder that maps old module names to today's: it returns the same module object, not a copy."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not (today := _today(fullname)):
            return None
        # Python leaves out the frames of its import system: the warning is of the line that imports.
        warnings.warn(f"{fullname} is called {today}; its old name ends in 2.0.", DeprecationWarning, stacklevel=2)
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(_today(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Python has set the module's spec to that of the old name; restore the module's own.
        module.__spec__ = module.__spec__.loader_state  # type: ignore[union-attr]  # an imported module has one


def _today(name: str) -> str:
    """Return the present name of the module with the old name ``name``; "" if neither it nor a package that contains it
    was moved."""
    parts = name.split(".")
    found = (MOVED.get(".".join(parts[:i])) for i in range(2, len(parts) + 1))
    return next((".".join([new, *parts[i:]]) for i, new in enumerate(found, start=2) if new), "")


def moved_class(package: str, name: str) -> Any:
    """Return the class that ``package.name`` was in flsv 1.1, with a DeprecationWarning; called by the package's
    ``__getattr__``.

    Raises:
        AttributeError: there was no such class, or it has not moved.
    """
    old = f"{package}.{name}"
    if not (today := MOVED_CLASSES.get(old)):
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    warnings.warn(f"{old} is called {today}.{name}; its old name ends in 2.0.", DeprecationWarning, stacklevel=2)
    return getattr(import_module(today), name)


def find_moved_modules() -> None:
    """Install :class:`MovedModules` before Python's own finders, which would load a submodule of a moved package a
    second time under its old name."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
