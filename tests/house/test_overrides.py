"""A method of a part has the arguments' names of the method that it overrides: callers may pass keywords."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

from flsv.core.strategy import Component
from flsv.uploads import Upload

PACKAGES = (
    "flsv.aggregation",
    "flsv.attacks",
    "flsv.contrib",
    "flsv.filters",
    "flsv.personalization",
    "flsv.sampling",
    "flsv.training.algorithms",
)


def import_all_parts():
    importlib.import_module("flsv.privacy")
    for package_name in PACKAGES:
        package = importlib.import_module(package_name)
        for module in pkgutil.iter_modules(package.__path__, f"{package_name}."):
            importlib.import_module(module.name)


def subclasses_of(base: type) -> Iterator[type]:
    for subclass in base.__subclasses__():
        yield subclass
        yield from subclasses_of(subclass)


def overridden_methods(part: type) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each public method of a part, the method, and the one that it overrides."""
    for name, method in vars(part).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        for base in part.__mro__[1:]:
            overridden = vars(base).get(name)
            if inspect.isfunction(overridden):
                yield name, method, overridden
                break


@pytest.mark.parametrize("base", [Component, Upload])
def test_overriding_methods_keep_the_names_of_arguments(base):
    import_all_parts()
    parts = [part for part in subclasses_of(base) if part.__module__.startswith("flsv.")]
    num_compared = 0
    for part in parts:
        for name, method, overridden in overridden_methods(part):
            expected_names = list(inspect.signature(overridden).parameters)
            names = list(inspect.signature(method).parameters)
            assert names[: len(expected_names)] == expected_names, f"{part.__qualname__}.{name}"
            num_compared += 1

    assert num_compared > len(parts)
