"""What a loop and a data module were made with is what they use and what they say: nothing can be set later that would
be told and not used. And what may be part of a path."""

import inspect

import pytest

from flsv import FederatedDataModule, FederatedLoop
from flsv.aggregation import GeometricMedian
from flsv.attacks import SignFlip
from flsv.filters import NormCap, OutlierFilter
from flsv.metrics import ClassSpecificShapley
from flsv.utilities.arguments import attribute_of, client_number, plain_name
from helpers import refused
from helpers.data import toy_data


def test_setting_an_argument_of_a_loop_names_replace():
    loop = FederatedLoop()
    data = toy_data()

    config = loop.config
    for name in inspect.signature(FederatedLoop).parameters:
        with refused(rf"\.{name} = 3 comes.*loop\.replace\({name}=3\)"):
            setattr(loop, name, 3)
        assert getattr(loop, name) != 3
    assert loop.config is config

    for name in inspect.signature(FederatedDataModule).parameters:
        if not name.endswith("batch_size"):
            with refused(rf"{name} = 3.*late.*Module\(\.\.\., {name}=3\)"):
                setattr(data, name, 3)


def test_replace_changes_given_arguments_and_keeps_the_rest():
    loop = FederatedLoop(
        local_epochs=3,
        filters=[OutlierFilter(), NormCap(1.25)],
        metrics={"cssv": ClassSpecificShapley()},
    )
    changed = loop.replace(aggregator=GeometricMedian(), filters=[])

    assert changed.local_epochs == 3
    assert changed.metrics["cssv"] == loop.metrics["cssv"]
    assert isinstance(changed.config.aggregator, GeometricMedian)
    assert len(loop.filters) == 2
    # No list is without an OutlierFilter: an empty one leaves out only updates that no mean can hold.
    assert repr(changed.filters) == "(OutlierFilter(threshold=None),)"


def test_lists_given_to_a_loop_cannot_change_it_later():
    attacks = [SignFlip(clients=[1])]
    loop = FederatedLoop(uploads=attacks)
    attacks.append(SignFlip(clients=[2]))

    assert len(loop.uploads) == 1
    for mapping in (loop.metrics, loop.strategies):
        with pytest.raises(TypeError, match="does not support item assignment"):
            mapping["mine"] = None

    with refused(r"loop.replace\(seed=3\)"):
        loop.config.seed = 3


def test_plain_name_refuses_paths_and_other_types():
    for name in ("ours, renormalized", "cssv-2.1", "Größe", "x" * 100):
        assert plain_name(name) == name

    paths = ("", "..", "a/b", "a\\b", ".hidden", "a\0b", "a\n", "C:x")
    for name in (*paths, "x" * 101, 3):
        with refused("picture .*expected a plain name"):
            plain_name(name, "picture")


def test_a_client_is_told_by_name_or_number():
    names = ["Boston", "Lyon"]
    numbers = [client_number(client, names) for client in ("Lyon", 0, "1")]

    assert numbers == [1, 0, 1]
    assert client_number("0", ["1", "0"]) == 1

    with refused(r"client=2:.*It has Boston, Lyon\."):
        client_number(2, ["Boston", "Lyon"])


def test_failing_attribute_is_not_taken_for_a_missing_one():
    class Part:
        @property
        def needs_classes(self):
            return self.misspelt

    assert attribute_of(Part(), "prior", 0.0) == 0.0

    with pytest.raises(AttributeError, match="misspelt"):
        attribute_of(Part(), "needs_classes", False)
