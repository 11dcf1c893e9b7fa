"""What a loop and a data module were made with is what they use and what they say: nothing can be set later that would
be told and not used."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from toys import toy_data

from flsv import ConfigurationError, FederatedDataModule, FederatedLoop
from flsv.aggregation import GeometricMedian
from flsv.attacks import SignFlip
from flsv.filters import CopyFilter, OutlierFilter
from flsv.metrics import ClassSpecificShapley

LOOP = list(inspect.signature(FederatedLoop).parameters)
DATA = [name for name in inspect.signature(FederatedDataModule).parameters if not name.endswith("batch_size")]


@pytest.mark.parametrize("name", LOOP)
def test_a_loops_argument_is_not_set_but_replaced(name: str) -> None:
    loop = FederatedLoop()
    before = loop.config
    with pytest.raises(ConfigurationError, match=rf"FederatedLoop\.{name} = 3 comes too .* loop\.replace\({name}=3\)"):
        setattr(loop, name, 3)
    assert loop.config is before
    assert getattr(loop, name) != 3


def test_another_loop_has_the_other_arguments_and_keeps_the_rest() -> None:
    first = FederatedLoop(
        local_epochs=3, filters=[OutlierFilter(), CopyFilter(0.7, gap=None)], metrics={"cssv": ClassSpecificShapley()}
    )
    second = first.replace(aggregator=GeometricMedian(), filters=[])
    assert (second.local_epochs, second.metrics["cssv"]) == (3, first.metrics["cssv"])
    assert isinstance(second.config.aggregator, GeometricMedian)
    assert len(first.filters) == 2
    assert repr(second.filters) == "(OutlierFilter(threshold=None),)"


def test_what_a_loop_holds_is_not_changed_from_outside() -> None:
    attacks: Any = [SignFlip(clients=[1])]
    loop = FederatedLoop(uploads=attacks)
    attacks.append(SignFlip(clients=[2]))
    assert len(loop.uploads) == 1
    for held in (loop.metrics, loop.strategies):
        with pytest.raises(TypeError, match="does not support item assignment"):
            held["mine"] = None  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        loop.config.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", DATA)
def test_a_data_modules_argument_is_not_set(name: str) -> None:
    data = toy_data()
    with pytest.raises(
        ConfigurationError, match=rf"{name} = 3 comes too late.*FederatedDataModule\(\.\.\., {name}=3\)"
    ):
        setattr(data, name, 3)
